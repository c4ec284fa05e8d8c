"""Pods and their workers: every rank is in exactly one pod, in both directions of the mapping."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhf_api.job import RLHFJobSpec
from rlhf_api.rank_pods import (
    gpus_a_pod,
    indices,
    pod_index,
    pods_of,
    pods_of_workers,
    rank_pods,
    workers_a_pod,
    workers_of,
)
from rlhf_common.names import Group


def spec(pipeline: int, each: int, **more: Any) -> RLHFJobSpec:
    return RLHFJobSpec.model_validate(
        {
            "algorithm": {"grpo": {}},
            "models": {"actor": {"path": "p"}, "reward": {"function": {"file": "r.py"}}},
            "prompts": {"path": "p.jsonl"},
            "training": {"parallelism": {"pipeline": pipeline}, "ranksPerPod": each},
            **more,
        }
    )


@given(each=st.integers(1, 64), pods=st.integers(1, 64))
def test_every_rank_is_in_one_pod_in_order(each: int, pods: int) -> None:
    assert pods_of(each * pods, each) == pods
    listed = [index for pod in range(pods) for index in indices(pod, each)]
    assert listed == list(range(each * pods))
    assert all(pod_index(index, each) == pod for pod in range(pods) for index in indices(pod, each))


@given(each=st.integers(1, 64), pods=st.integers(1, 4))
def test_names_lead_to_the_pods_that_hold_them(each: int, pods: int) -> None:
    job = spec(each * pods, each)
    assert rank_pods(job) == pods
    for pod in range(pods):
        assert pods_of_workers(job, workers_of(job, Group.TRAINING, pod)) == {("training", pod)}


def test_other_groups_have_a_pod_a_worker_and_a_coordinator_is_no_worker() -> None:
    job = spec(8, 8)
    assert workers_of(job, Group.GENERATION, 3) == ["generation-3"]
    assert workers_of(job, Group.COORDINATOR, 0) == []
    assert [workers_a_pod(job, group) for group in Group] == [0, 1, 1, 8]


def test_ranks_in_generation_workers_are_one_a_pod() -> None:
    assert rank_pods(spec(2, 1, placement="Colocated", generation={"replicas": 2})) == 2


def test_gpus_of_a_stored_spec_whatever_somebody_wrote_there() -> None:
    training = {"gpusPerReplica": 1, "ranksPerPod": 8}
    assert gpus_a_pod({"training": training}, "training") == 8
    assert gpus_a_pod({"training": {"gpusPerReplica": 1}, "generation": {"gpusPerReplica": 4}}, "generation") == 4
    assert gpus_a_pod({"training": {"gpusPerReplica": 1}}, "training") == 1
    assert gpus_a_pod({"training": {"gpusPerReplica": 1, "ranksPerPod": "many"}}, "training") == 1
    assert gpus_a_pod({"training": []}, "training") is None
    assert gpus_a_pod(None, "training") is None
