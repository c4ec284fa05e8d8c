"""The contract of every gang backend: all registered ones, none, and one from outside the project."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster, stored_job

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.gang import GangBackend, QueueingBackend, ServedApis, choose
from rlhf_operator.gang.apis import APIS, MODES, RESOURCES, kind_of
from rlhf_operator.gang.kueue_queue import KueueState
from rlhf_operator.gang.members import counts, examples, requests_hash
from rlhf_operator.gang.none import NoGangBackend
from rlhf_operator.gang.registry import BACKENDS, BackendKind, queue_api_of, queue_apis
from rlhf_operator.index import Index
from rlhf_operator.manifests import identity
from rlhf_operator.queueing import Queueing
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.untrusted import owner_of

Json = dict[str, Any]
OUTSIDE, OUTSIDE_API, OUTSIDE_SCHEDULER = "Outside", "gangs.example.org/v1", "outside-scheduler"
VERSIONS = [(mode, version) for mode, versions in APIS.items() for version, _ in versions]


@dataclass(frozen=True)
class OutsideBackend:
    """A backend from outside the project."""

    version: str
    mode: str = OUTSIDE
    makes_objects: bool = True
    immutable: bool = False

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        meta = identity.metadata(job, job.name, identity.labels(job))
        return [{"apiVersion": self.version, "kind": "Gang", "metadata": meta, "spec": {"groups": len(pods)}}]

    def join(self, job: RLHFJob, pod: Json) -> Json:
        return {**pod, "spec": {**pod["spec"], "schedulerName": OUTSIDE_SCHEDULER}}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the backend from outside."""
    for table, key, value in (
        (BACKENDS, OUTSIDE, BackendKind(OutsideBackend, "install it", scheduler=OUTSIDE_SCHEDULER)),
        (APIS, OUTSIDE, ((OUTSIDE_API, ("Gang",)),)),
        (RESOURCES, f"{OUTSIDE_API}/Gang", (f"/apis/{OUTSIDE_API}", "gangs")),
    ):
        monkeypatch.setitem(table, key, value)


def queued_job(mode: str = "Auto", **spec: Any) -> RLHFJob:
    """Return a job with everything that a backend may need."""
    body = stored_job(scheduling={"gang": {"mode": mode}}, **spec)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    parsed = parse_job(body)
    assert parsed.job is not None, parsed.problem
    return parsed.job


@dataclass(frozen=True)
class OutsideQueued:
    """The object of a job in the queue below."""

    name: str
    uid: str
    version: int
    owner: str


class OutsideQueue:
    """The reading half of a queue from outside the project; its state is the object."""

    def reads(self, kind: str) -> bool:
        return kind == f"{OUTSIDE_API}/Gang"

    def object_names(self, job_name: str) -> tuple[str]:
        return (job_name,)

    def current(self, objects: Sequence[OutsideQueued]) -> OutsideQueued:
        return objects[0]

    def parse(self, body: Json) -> OutsideQueued:
        meta = body["metadata"]
        return OutsideQueued(meta["name"], meta["uid"], int(meta["resourceVersion"]), owner_of(meta))

    def references(self, version: str, stored: Json, queue_object: OutsideQueued | None) -> tuple[()]:
        return ()

    def state(self, stored: Json, queue_object: OutsideQueued | None, records: Json) -> Any:
        return queue_object or OUTSIDE


async def test_the_state_is_of_the_queue_that_has_the_jobs_object_or_is_served(
    outside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    api: Any = OutsideQueue()
    queued: Any = OutsideQueued("job", "1", 7, "job-uid")
    without: Any = OUTSIDE
    kind = BackendKind(OutsideBackend, "install it", queue=api)
    monkeypatch.setitem(BACKENDS, OUTSIDE, kind)
    queueing, index, job = Queueing(None), Index(), stored_job()  # type: ignore[arg-type]
    assert isinstance(await queueing.state(index, "team/job", job), KueueState), "the first one, without any sign"
    queueing.served = ServedApis(frozenset({OUTSIDE_API}))
    assert await queueing.state(index, "team/job", job) == without
    queueing.served = ServedApis()
    body = OutsideBackend(OUTSIDE_API).objects(queued_job(), {})[0]
    body["metadata"] |= {"uid": "1", "resourceVersion": "7"}
    index.put(f"{OUTSIDE_API}/Gang", "team/job", body)
    assert index.queue_object("team/job", "job-uid", api) == queued
    assert index.queue_object("team/job", "job-uid", next(queue_apis())[1]) is None
    assert await queueing.state(index, "team/job", job) == queued
    index.drop(f"{OUTSIDE_API}/Gang", "team/job", "job", "1")
    assert index.queue_object("team/job", "job-uid", api) is None


def check_contract(backend: GangBackend) -> None:
    """Check every guarantee of `GangBackend`."""
    job = queued_job()
    pods = examples(job)
    original = copy.deepcopy(pods)
    objects = backend.objects(job, pods)
    assert objects == backend.objects(job, pods), "the same job gives the same objects"
    assert bool(objects) == backend.makes_objects
    for body in objects:
        assert kind_of(body) in RESOURCES, "the operator can apply, watch and delete it"
        [owner] = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("job-uid", True), "it goes with the job"
        assert body["metadata"]["namespace"] == "team"
    schedulers = set()
    for group, pod in pods.items():
        joined = backend.join(job, pod)
        assert joined == backend.join(job, pod)
        assert backend.join(job, joined) == joined, "a member joins once"
        assert joined["spec"]["containers"] == original[group]["spec"]["containers"]
        before, after = original[group]["metadata"], joined["metadata"]
        assert after["labels"].items() >= before["labels"].items(), "our own labels stay"
        assert after.get("annotations", {}).items() >= before.get("annotations", {}).items()
        assert (after["name"], after["ownerReferences"]) == (before["name"], before["ownerReferences"])
        schedulers.add(joined["spec"].get("schedulerName"))
    assert len(schedulers) == 1, "one gang has one scheduler"
    assert pods == original, "arguments are not changed"


def check_queue(backend: GangBackend) -> None:
    """Check the additional contract of a backend with a queue."""
    job, kind = queued_job(), BACKENDS[backend.mode]
    assert isinstance(backend, QueueingBackend) == (kind.queue is not None)
    if not isinstance(backend, QueueingBackend) or kind.queue is None:
        return
    pods = examples(job)
    waiting = backend.admit(job, requests_hash(job, pods), None)
    assert not waiting.gate.open, "no pod exists before the queue has said anything"
    assert waiting.gate.message
    [body] = waiting.backend.objects(job, pods)
    assert queue_api_of(kind_of(body)) is kind.queue
    assert body["metadata"]["name"] in kind.queue.object_names(job.name)
    stored = {**body, "metadata": {**body["metadata"], "uid": "1", "resourceVersion": "7"}}
    queue_object = kind.queue.parse(stored)
    assert (queue_object.name, queue_object.uid, queue_object.version, queue_object.owner) == (
        body["metadata"]["name"],
        "1",
        7,
        "job-uid",
    )
    assert queue_object.at_version(7) == queue_object != queue_object.at_version(8)
    state = kind.queue.state(stored_job(), queue_object, {})
    assert state.requests_hash == requests_hash(job, pods)
    assert not backend.admit(job, state.requests_hash, state).gate.open
    assert kind.queue.current([queue_object]) == queue_object
    assert kind.queue.state(stored_job(), queue_object.leaving(), {}).reserves(queue_object.name), (
        "what is going is not changed"
    )
    report = state.finished_report("done", succeeded=True)
    assert report is not None
    written = kind.queue.with_report(stored, report, "2026-08-22T10:00:00Z")
    reported = kind.queue.state(stored_job(), kind.queue.parse(written), {})
    assert reported.finished_report("done", succeeded=True) is None, "it is told once"


@pytest.mark.parametrize(("mode", "version"), VERSIONS)
def test_every_registered_backend_keeps_the_contract_in_every_version(mode: str, version: str) -> None:
    backend = BACKENDS[mode].make(version)
    assert backend.mode == mode
    check_contract(backend)
    check_queue(backend)


def test_no_gang_keeps_the_contract() -> None:
    check_contract(NoGangBackend())


def test_every_mode_has_one_entry() -> None:
    assert set(BACKENDS) == set(MODES) == set(APIS)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_given_as_asked_and_says_what_it_lacks(mode: str) -> None:
    served = ServedApis(frozenset(version for versions in APIS.values() for version, _ in versions))
    assert choose(queued_job(mode), served).backend.mode == mode
    missing = choose(queued_job(mode), ServedApis())
    assert BACKENDS[mode].remedy in missing.problem
    assert missing.backend == NoGangBackend()


@pytest.mark.parametrize("mode", MODES)
def test_a_job_runs_by_every_backend_once_its_queue_has_room(mode: str) -> None:
    cluster = SimulatedCluster(scheduling={"gang": {"mode": mode}})
    cluster.job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    version = APIS[mode][0][0]
    cluster.served = ServedApis(frozenset([version]))
    cluster.settle()
    queue = BACKENDS[mode].queue is not None
    assert bool(cluster.pods) is not queue
    assert any(kind.startswith(version) for kind, _ in cluster.applied)
    if not queue:
        job = parse_job(cluster.job).job
        assert job is not None
        assert len(cluster.pods) == sum(counts(job).values())


def test_a_backend_from_outside_takes_part_without_a_change_elsewhere(outside: None) -> None:
    check_contract(OutsideBackend(OUTSIDE_API))
    check_queue(OutsideBackend(OUTSIDE_API))
    named = {"spec": {"schedulerName": OUTSIDE_SCHEDULER}}
    cluster = SimulatedCluster(generation={"replicas": 2, "template": named})
    cluster.served = ServedApis(frozenset([OUTSIDE_API]))
    cluster.settle()
    assert {body["spec"]["schedulerName"] for body in cluster.pods.values()} == {OUTSIDE_SCHEDULER}
    assert (f"{OUTSIDE_API}/Gang", "job") in cluster.applied
    assert cluster.condition("Admitted")["message"].endswith(f"gang: {OUTSIDE}")
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    while cluster.pods:
        cluster.finish_deletions()
        cluster.settle()
    assert (f"{OUTSIDE_API}/Gang", "job") not in cluster.applied, "a suspended job keeps no room"
