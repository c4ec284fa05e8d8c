"""Finds the problems of a job's pods before any is created, for `rlhf validate` and for the operator. Rule: pure."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_api.problems import Problem, Severity
from rlhf_common.names import Group
from rlhf_operator.manifests import checkpoint_volumes, loopback_urls
from rlhf_operator.manifests.pods import coordinator_pod
from rlhf_operator.manifests.rendering import mounting, unused_template, worker
from rlhf_operator.manifests.template import problems_of

_GROUPS: Final = (Group.GENERATION, Group.INFERENCE, Group.TRAINING)


def problems_of_pods(job: RLHFJob) -> list[Problem]:
    """Return the problems of a resolved job's pod templates and replanning, with warnings.

    If none is an error, the problems of its checkpoint folder and its loopback URLs follow.
    """
    problems = [*_of_templates(job), *_of_replanning(job)]
    if not any(problem.severity is Severity.ERROR for problem in problems):
        problems += [*checkpoint_volumes.problems_of(job), *loopback_urls.problems_of(job)]
    return problems


def _of_replanning(job: RLHFJob) -> Iterator[Problem]:
    """Yield the problem of a job whose plan would change while it runs."""
    if job.spec.devices is not None and job.spec.devices.replan == "Auto":
        message = "is not available in a cluster: use Report, and suspend and resume the job for a new plan"
        yield Problem("spec.devices.replan", "Auto", message)


def without_broken_templates(job: RLHFJob, problems: list[Problem]) -> RLHFJob:
    """Return the job without the templates that have an error among `problems`."""
    update = {}
    for group in Group:
        path, fields = f"spec.{group}.template", getattr(job.spec, group)
        if any(problem.severity is Severity.ERROR and problem.field.startswith(path) for problem in problems):
            update[group.value] = fields.model_copy(update={"template": {}})
    return job.model_copy(update={"spec": job.spec.model_copy(update=update)})


def _of_templates(job: RLHFJob) -> Iterator[Problem]:
    unused = unused_template(job)
    yield from unused
    with_mounts = coordinator_pod(job, "")
    for group in _GROUPS:
        path = f"spec.{group}.template"
        problems = problems_of(getattr(job.spec, group).template, path, worker(job, group, 0, ""))
        yield from problems
        broken = unused or any(problem.severity is Severity.ERROR for problem in problems)
        if group is job.spec.rank_group and not broken:
            # If mounts cannot be read, the coordinator's template is checked without them.
            with_mounts = mounting(job, "", {})
    yield from problems_of(job.spec.coordinator.template, "spec.coordinator.template", with_mounts)
