"""Grace periods of processes, and pods that autoscalers must not evict."""

from typing import Any

from tests.support.operator.pod_templates import job_with, pods, worker

from rlhf_api.job import RLHFJob
from rlhf_common.names import Env
from rlhf_operator.manifests.pods import STAYS


def grace(pod: dict[str, Any]) -> int:
    return int(pod["spec"]["terminationGracePeriodSeconds"])


def grace_problem(pod: dict[str, Any]) -> str | None:
    env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
    return env.get(Env.GRACE)


def marks(pod: dict[str, Any]) -> dict[str, str]:
    annotations = pod["metadata"].get("annotations") or {}
    return {key: annotations[key] for key in STAYS if key in annotations}


def test_ranks_outlast_the_coordinator_that_needs_them_for_its_checkpoint() -> None:
    rendered = pods(job_with({}))
    assert grace(rendered["merged-training-0"]) >= grace(rendered["merged-coordinator"]) + 30
    assert grace_problem(rendered["merged-training-0"]) == str(grace(rendered["merged-training-0"]))
    assert grace(rendered["merged-generation-0"]) == 30
    assert grace_problem(rendered["merged-generation-0"]) is None


def test_a_rank_is_told_the_grace_of_its_template() -> None:
    template = {"spec": {"terminationGracePeriodSeconds": 900}}
    assert grace_problem(pods(job_with(template, "training"))["merged-training-0"]) == "900"


def test_every_place_of_pipeline_data_and_tensor_is_a_pod() -> None:
    document = job_with({}).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["spec"]["training"] = {"backend": "megatron", "parallelism": {"pipeline": 2, "tensor": 4}}
    rendered = pods(RLHFJob.model_validate(document))
    ranks = sorted(name for name in rendered if "-training-" in name)
    assert ranks == [f"merged-training-{rank}" for rank in range(8)]
    assert all(marks(rendered[name]) == STAYS for name in ranks)


def test_colocated_ranks_are_those_of_their_group() -> None:
    document = job_with({}).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["spec"] |= {"placement": "Colocated", "generation": {"replicas": 2}, "inference": {"replicas": 0}}
    rendered = pods(RLHFJob.model_validate(document))
    assert marks(rendered["merged-generation-0"]) == STAYS
    assert marks(rendered["merged-generation-1"]) == {}, "it holds no rank"


def test_autoscalers_are_asked_to_leave_coordinator_and_ranks_alone_unless_a_template_says_otherwise() -> None:
    rendered = pods(job_with({}))
    assert marks(rendered["merged-coordinator"]) == marks(rendered["merged-training-0"]) == STAYS
    assert marks(rendered["merged-generation-0"]) == marks(rendered["merged-inference-0"]) == {}
    own = {"karpenter.sh/do-not-disrupt": "false", "team": "a"}
    rendered = pods(job_with({"metadata": {"annotations": own}, **worker()}, "training"))
    assert marks(rendered["merged-training-0"]) == {**STAYS, "karpenter.sh/do-not-disrupt": "false"}
    assert rendered["merged-training-0"]["metadata"]["annotations"]["team"] == "a"
    assert marks(rendered["merged-coordinator"]) == STAYS
