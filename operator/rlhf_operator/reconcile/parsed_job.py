"""Parses a stored object into a job that can run, or into the problems of its manifest.

An accepted manifest may still break a rule that the API server cannot check, or come from an older definition.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_api.job.scheduling import OURS
from rlhf_api.problems import ManifestError, Problem, Severity
from rlhf_api.rules.advice import advice
from rlhf_api.rules.unavailable import UNAVAILABLE
from rlhf_common.conditions import PlannedReason
from rlhf_common.names import Group
from rlhf_common.nesting import MAX_DEPTH, too_deep
from rlhf_operator.bounded_cache import cached
from rlhf_operator.manifests.pod_problems import problems_of_pods, without_broken_templates
from rlhf_operator.manifests.rendering import group_sizes, template_hash
from rlhf_operator.stored_job import UNREADABLE

REMEMBERED: Final = 2048
"""Jobs whose parsed form is cached if they are not too large; the least recently used ones are parsed again."""
_PODS_ROOT: Final = Path("/")
_METADATA: Final = ("name", "namespace", "uid", "labels")


def managed_elsewhere(stored: Mapping[str, Any]) -> bool:
    """Return whether another controller manages the job (spec.managedBy); its plan is then empty."""
    spec = stored.get("spec")
    return isinstance(spec, Mapping) and bool(spec.get("managedBy", OURS) != OURS)


@dataclass(frozen=True)
class ParsedJob:
    """A job, and whether pods may be created from it. The job is None if it cannot be read."""

    job: RLHFJob | None
    problem: str = ""
    """Problem of the manifest; empty if there is none."""
    reason: PlannedReason = PlannedReason.PLANNED

    @property
    def planned(self) -> bool:
        """Return whether pods may be created."""
        return not self.problem

    @cached_property
    def warnings(self) -> str:
        """Return the warnings about a manifest as text; empty if there are none."""
        if self.job is None:
            return ""
        of_pods = [problem for problem in problems_of_pods(self.job) if problem.severity is Severity.WARNING]
        return _listed([*of_pods, *advice(self.job)])

    @cached_property
    def template_hashes(self) -> Mapping[Group, str]:
        """Return `template_hash` of every group that the job's graph needs; empty without a job."""
        return {} if self.job is None else {group: template_hash(self.job, group) for group in group_sizes(self.job)}


def parse_job(body: Mapping[str, Any]) -> ParsedJob:
    """Return the job of a stored RLHFJob, resolved, without its status, or the problems of its manifest."""
    if wrong := body.get(UNREADABLE):
        return ParsedJob(None, wrong, PlannedReason.INVALID)
    meta = {key: value for key, value in body["metadata"].items() if key in _METADATA}
    document = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": meta, "spec": body.get("spec")}
    # The following code recurses.
    if deep := too_deep(document):
        problem = Problem(deep[:200], None, f"is nested more than {MAX_DEPTH} levels deep: nothing in a manifest is")
        return ParsedJob(None, _listed([problem]), PlannedReason.INVALID)
    return _parse(json.dumps(document))


@cached(REMEMBERED)
def _parse(text: str) -> ParsedJob:
    try:
        job = manifest.resolve(manifest.parse_stored(json.loads(text)), _PODS_ROOT)
    except ManifestError as error:
        return ParsedJob(None, _listed(error.problems), _reason(error.problems))
    except ValidationError as error:
        return ParsedJob(None, str(error), PlannedReason.INVALID)
    problems = problems_of_pods(job)
    errors = [problem for problem in problems if problem.severity is Severity.ERROR]
    if errors:
        return ParsedJob(without_broken_templates(job, errors), _listed(errors), PlannedReason.INVALID)
    return ParsedJob(job)


def _listed(problems: list[Problem]) -> str:
    return "; ".join(str(Problem(problem.field, problem.value, problem.message)) for problem in problems)


def _reason(problems: list[Problem]) -> PlannedReason:
    lacking = {problem.field for problem in UNAVAILABLE}
    unavailable = all(
        problem.field in lacking and "not available in this version" in problem.message for problem in problems
    )
    return PlannedReason.UNAVAILABLE if unavailable else PlannedReason.INVALID
