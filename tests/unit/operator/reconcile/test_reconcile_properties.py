"""For any order of events, reconcile settles, counts correctly, and deletes no more than it should."""

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator.manifests.rendering import template_hash
from rlhf_operator.reconcile import ObservedPod, ReconcilePlan, pod_of
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.reconcile.scaling import pod_places

WORKERS = ["generation-0", "generation-1", "generation-2", "inference-0", "training-0", "training-1"]
STEP = st.one_of(
    st.tuples(st.just("end"), st.sampled_from(WORKERS), st.sampled_from([1, 3, 4, 75, 0, 137])),
    st.tuples(st.just("crash"), st.sampled_from(WORKERS), st.sampled_from([1, 75])),
    st.tuples(st.sampled_from(["evict", "delete", "vanish", "full", "sick"]), st.sampled_from(WORKERS), st.just(0)),
    st.tuples(
        st.sampled_from(["scale", "resume", "suspend", "run", "gone", "read", "reconcile", "die", "template", "pool"]),
        st.just(""),
        st.integers(0, 4),
    ),
)


RULES = [
    {"name": "cuda", "action": "Restart", "scope": "Group", "onExitCodes": {"values": [3]}},
    {"name": "fabric", "action": "Ignore", "scope": "Job", "onExitCodes": {"values": [4]}},
]


class Life:
    """Applies random steps to a cluster and counts the expected results."""

    def __init__(self, *, sidecars: bool = False) -> None:
        self.sidecars = sidecars
        policy = {"backoffLimit": 1000, "failurePolicy": {"rules": RULES}}
        self.cluster = SimulatedCluster(runPolicy=policy, checkpoints={"path": "/checkpoints"}).begin()
        self.expected: Counter[str] = Counter()
        self.run()

    def run(self) -> None:
        """Start pending pods, including their other containers."""
        self.cluster.run()
        if self.sidecars:
            running = [name for name, body in self.cluster.pods.items() if body["status"]["phase"] == "Running"]
            self.cluster.add_sidecar(*(name.removeprefix("job-") for name in running))

    def reconcile(self, *, dies: bool = False) -> None:
        plan = self.cluster.plan()
        wanted = {name for name, _, _ in pod_places(parse_job(self.cluster.job).job)}  # type: ignore[arg-type]
        suspended = self.cluster.job["spec"]["suspend"]
        for item in plan.delete:
            if self.is_old(item.name, plan):
                continue
            status = self.cluster.pods[item.name]["status"]
            state = (status.get("containerStatuses") or [{}])[0].get("state", {})
            ended = status["phase"] in ("Succeeded", "Failed") or "waiting" in state or "terminated" in state
            assert suspended or ended or item.force or item.name not in wanted, f"{item.name} is wanted and well"
        self.cluster.carry_out(plan, only_status=dies)

    def is_old(self, name: str, plan: ReconcilePlan) -> bool:
        """Return whether the pod is of an earlier epoch, or of another template."""
        pod, job = pod_of(self.cluster.pods[name]), parse_job(self.cluster.job).job
        assert isinstance(pod, ObservedPod)
        assert job is not None
        groups = (plan.status or self.cluster.job["status"])["groups"]
        epochs = {group["name"]: group["epoch"] for group in groups}
        return bool(pod.epoch < epochs[pod.group]) or pod.template_hash != template_hash(job, Group(pod.group))

    def step(self, event: str, worker: str, number: int) -> None:
        cluster = self.cluster
        name = f"job-{worker}"
        if worker:
            pod = cluster.pods.get(name)
            if pod is None or "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] != "Running":
                return
            parsed = parse_job(cluster.job).job
            assert parsed is not None
            if cluster.job["spec"]["suspend"] or name not in {each for each, _, _ in pod_places(parsed)}:
                return
            self._disturb(event, worker, number)
            # Ends between two looks at one pod count once; the books are simple because we look after each.
            self.reconcile()
        elif event == "scale":
            cluster.job["spec"]["generation"]["replicas"] = max(1, number)
        elif event in ("suspend", "resume"):
            cluster.settle()
            cluster.job["spec"]["suspend"] = event == "suspend"
            cluster.settle()
        elif event == "template":
            spec = cluster.job["spec"][("generation", "inference", "training")[number % 3]]
            spec["template"] = spec.get("template", {}) | {"metadata": {"annotations": {"note": str(number)}}}
        elif event == "pool":
            cluster.later(number * 5)
            cluster.read(pool=tuple(WORKERS[:number]))
        elif event == "run":
            self.run()
        elif event == "gone":
            cluster.finish_deletions()
        elif event == "read":
            cluster.later(number * 5)
            cluster.read(iteration=number)
        else:
            self.reconcile(dies=event == "die")

    def _disturb(self, event: str, worker: str, code: int) -> None:
        if event in ("end", "crash"):
            self.cluster.end(worker, code, restarted=event == "end")
            self.expected["failures"] += code not in (0, 4, 75)
            self.expected["disruptions"] += code == 4
            return
        if event == "full":
            self.cluster.fail(worker, "Evicted", 'Usage of EmptyDir volume "scratch" exceeds the limit', killed=True)
            self.expected["failures"] += 1
            return
        if event == "evict":
            self.cluster.evict(worker)
        elif event == "sick":
            self.cluster.fail(worker, "UnexpectedAdmissionError", "Pod was rejected: no device plugin")
        else:
            self.cluster.ask_deletion(f"job-{worker}")
        self.expected["disruptions"] += 1
        if event == "vanish":
            self.reconcile()
            self.cluster.finish_deletions()


@settings(max_examples=60)
@given(steps=st.lists(STEP, max_size=25), sidecars=st.booleans())
@example(steps=[("end", "generation-1", 0), ("pool", "", 3), ("end", "generation-0", 1)], sidecars=False)
@example(steps=[("end", "generation-1", 0), ("pool", "", 3), ("end", "generation-0", 1)], sidecars=True)
def test_any_history_settles_with_the_right_pods_and_the_right_counts(
    steps: list[tuple[str, str, int]], sidecars: bool
) -> None:
    """A container next to the worker may outlive it or not."""
    life = Life(sidecars=sidecars)
    for step in steps:
        life.step(*step)
    cluster = life.cluster
    cluster.job["spec"]["suspend"] = False
    # A roll goes on one pod at a time, as each comes up.
    for _ in range(12):
        cluster.settle()
        cluster.finish_deletions()
        cluster.settle()
        life.run()
        cluster.later(60)
        sizes = {group["name"]: group["desired"] for group in cluster.job["status"]["groups"]}
        cluster.read(working=sizes, replicas=sizes)
    assert cluster.settle().idle, "a plan that is carried out leaves nothing to do"
    parsed = parse_job(cluster.job).job
    assert parsed is not None
    assert sorted(cluster.pods) == sorted(name for name, _, _ in pod_places(parsed))
    assert all(group["updated"] == group["desired"] for group in cluster.job["status"]["groups"])
    assert cluster.condition("Restarting")["status"] == "False"
    assert not [name for name, body in cluster.pods.items() if names.LABEL_POOL in body["metadata"]["labels"]]
    restarts = cluster.job["status"]["restarts"]
    assert Counter({item: restarts[item] for item in ("failures", "disruptions") if restarts[item]}) == +life.expected
