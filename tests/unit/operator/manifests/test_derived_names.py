"""Two jobs with accepted names never need an object of the same kind and name."""

from functools import cache
from pathlib import Path

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import ManifestError, parse
from rlhf_api.rules.table import MAX_WORKERS
from rlhf_common.names import Group
from rlhf_operator.gang.apis import APIS, COSCHEDULING, KUEUE, NATIVE, VOLCANO, kind_of
from rlhf_operator.gang.backend import GangBackend
from rlhf_operator.gang.coscheduling import CoschedulingBackend
from rlhf_operator.gang.kueue import KueueBackend
from rlhf_operator.gang.kueue_workload import slice_name
from rlhf_operator.gang.members import examples
from rlhf_operator.gang.native import NativeBackend
from rlhf_operator.gang.volcano import VolcanoBackend
from rlhf_operator.manifests import identity, render

ROOT = Path(__file__).parents[4]
BACKENDS: list[GangBackend] = [
    make(version)
    for mode, make in (
        (NATIVE, NativeBackend),
        (KUEUE, KueueBackend),
        (VOLCANO, VolcanoBackend),
        (COSCHEDULING, CoschedulingBackend),
    )
    for version, _ in APIS[mode]
]
PARTS = [
    "a",
    "b",
    "a1",
    "0",
    "1",
    "rlhfjob",
    "rlhfslice",
    "job",
    "certificates",
    "authority",
    "coordinator",
    "certificate",
]
PARTS += [str(group) for group in Group]
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("-".join)


EXAMPLE = yaml.safe_load((ROOT / "examples/ppo.yaml").read_text())


@cache
def derived(name: str) -> frozenset[tuple[str, str]] | None:
    """Return (kind, name) of all objects of a job with that name; None if the name is rejected."""
    body = EXAMPLE | {"metadata": {"name": name, "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "q"}}}
    try:
        job = parse(yaml.safe_dump(body))
    except ManifestError as error:
        if {problem.field for problem in error.problems} != {"metadata.name"}:
            raise
        return None
    return objects(job)


def objects(job: RLHFJob) -> frozenset[tuple[str, str]]:
    bodies = [*render(job, {}).all, *(item for backend in BACKENDS for item in backend.objects(job, examples(job)))]
    object_names = [(kind_of(body), str(body["metadata"]["name"])) for body in bodies]
    object_names.append(("Secret", identity.authority_name(job)))
    object_names += [(f"{version}/Workload", slice_name(job.name)) for version, _ in APIS[KUEUE]]
    object_names += [
        ("Pod", identity.pod_name(job, group, index))
        for group in Group
        if group is not Group.COORDINATOR
        for index in (0, 1, 10, 11, MAX_WORKERS - 1)
    ]
    return frozenset(object_names)


@example(name="x", more=["coordinator"], before=False)
@given(name=NAMES, more=st.lists(st.sampled_from(PARTS), max_size=3), before=st.booleans())
def test_jobs_of_two_accepted_names_have_no_object_in_common(name: str, more: list[str], before: bool) -> None:
    other = "-".join([*more, name] if before else [name, *more])
    ours, theirs = derived(name), derived(other)
    if name != other and ours is not None and theirs is not None:
        assert not ours & theirs, (name, other)


def test_what_is_derived_has_every_kind_with_two_forms() -> None:
    result = derived("job")
    assert result is not None
    assert {("Service", "job"), ("Service", "job-coordinator"), ("Secret", "job-authority")} <= result
    assert {kind for kind, _ in result} >= {"Pod", "ConfigMap", "NetworkPolicy", "kueue.x-k8s.io/v1beta2/Workload"}
