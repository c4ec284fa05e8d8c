"""Memory by phase of a worker whose roles take turns, in numbers that can be checked by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import Group
from rlhf_planner.device_memory import GIBIBYTE, ModelSize, budget, estimates
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.plan_search.device_plan import DevicePlan
from rlhf_planner.plan_search.phase_memory import generation_memory
from rlhf_planner.plan_search.workload import Workload

BILLION = 10**9
SEVEN = ModelSize(7 * BILLION, 2 * 32 * 8 * 128)


def spec(**changes: Any) -> RLHFJobSpec:
    content = {
        "placement": "Colocated",
        "algorithm": {"ppo": {}},
        "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": 1024, "maxResponseTokens": 1024},
        "generation": {"replicas": 8, "gpusPerReplica": 1, "maxBatchSize": 64},
        "inference": {"replicas": 0},
        "training": {"parallelism": {"pipeline": 4, "data": 2}},
        **changes,
    }
    return RLHFJobSpec.model_validate(content)


SIZES: dict[str, ModelSize | None] = {ModelRole.ACTOR: SEVEN, ModelRole.CRITIC: SEVEN, ModelRole.REFERENCE: SEVEN}


def test_each_phase_and_the_host_by_hand() -> None:
    result = budget(spec(), SIZES)
    decoding, training = result.phases
    cache = 64 * 2048 * 2 * 32 * 8 * 128 * 2
    half = 14 * BILLION
    assert decoding.onloaded.parts == {
        "weights": half, "key-value cache": cache, "reference weights": half, "critic weights": half
    }  # fmt: skip
    stages = 2 * 7 * BILLION // 4
    assert training.onloaded.parts == {
        "weights": 4 * stages, "gradients": 4 * stages, "optimizer": 8 * stages, "half-precision weights": 2 * stages
    }  # fmt: skip
    assert result.peak is training
    assert result.host.total == 3 * half + (4 + 8 + 2) * stages, "what sleeps, and what is published of it"
    assert estimates(spec(), SIZES)[Group.GENERATION] == training.onloaded
    assert Group.TRAINING not in estimates(spec(), SIZES)


def test_ranks_that_hold_parts_have_a_share_of_everything() -> None:
    parallelism = {"data": 4, "shard": 4}
    of_rank = estimates(spec(placement="Dedicated", training={"gpusPerReplica": 1, "parallelism": parallelism}), SIZES)
    share = 2 * 7 * BILLION // 4
    assert of_rank[Group.TRAINING].parts == {
        "weights": 4 * share, "gradients": 4 * share, "optimizer": 8 * share, "published weights": 4 * share
    }  # fmt: skip


def test_ranks_of_a_tensor_group_have_a_share_of_a_stage() -> None:
    training = {"gpusPerReplica": 1, "backend": "megatron", "parallelism": {"pipeline": 2, "tensor": 4}}
    of_rank = estimates(spec(placement="Dedicated", training=training), SIZES)
    share = 2 * 7 * BILLION // 8
    assert of_rank[Group.TRAINING].parts == {
        "weights": 4 * share, "gradients": 4 * share, "optimizer": 8 * share, "half-precision weights": 2 * share,
        "published weights": 4 * share,
    }  # fmt: skip


def test_only_models_in_tensor_groups_keep_whole_tensors_to_publish() -> None:
    parallelism = {"pipeline": 2, "tensor": 4, "criticTensor": 1}
    training = {"gpusPerReplica": 1, "backend": "megatron", "parallelism": parallelism}
    parts = estimates(spec(placement="Dedicated", training=training), SIZES)[Group.TRAINING].parts
    share = 7 * BILLION // 8
    assert (parts["weights"], parts["published weights"]) == (2 * 4 * share, 4 * share)


def test_what_cannot_fit_names_the_phase_and_the_numbers() -> None:
    result = budget(spec(), SIZES)
    assert result.problem(80 * GIBIBYTE) == ""
    assert result.problem(40 * GIBIBYTE).startswith(
        "phase training needs 58.7 GiB a device (weights 13 GiB, gradients 13 GiB, optimizer 26.1 GiB, "
        "half-precision weights 6.52 GiB), which has 40 GiB: raise spec.training.parallelism.pipeline"
    )
    crowded = budget(spec(generation={"replicas": 8, "gpusPerReplica": 1, "maxBatchSize": 256}), SIZES)
    assert crowded.problem(80 * GIBIBYTE).startswith("phase decoding and scoring needs 103 GiB a device")


def test_a_model_that_is_not_here_is_said_to_be_unknown() -> None:
    result = budget(spec(), {ModelRole.ACTOR: None, ModelRole.CRITIC: SEVEN, ModelRole.REFERENCE: SEVEN})
    assert result.host.unknown == ("actor",)
    assert "weights" not in result.phases[0].onloaded.parts


@given(
    st.integers(1, 8), st.integers(0, 2), st.sampled_from(["Disabled", "Auto"]), st.integers(0, 1),
    st.integers(1, 10**10), st.integers(1, 10**10),
)  # fmt: skip
def test_turns_need_no_more_than_everything_at_once_and_no_less_than_any_role(
    pipeline: int, inference: int, mode: str, gpus: int, actor: int, critic: int
) -> None:
    changes: dict[str, Any] = {
        "generation": {"replicas": 8, "gpusPerReplica": gpus},
        "inference": {"replicas": inference, "gpusPerReplica": gpus},
        "training": {"parallelism": {"pipeline": pipeline}, "gpusPerReplica": gpus},
        "fusion": {"interStage": {"mode": mode}},
    }
    sizes: dict[str, ModelSize | None] = {
        ModelRole.ACTOR: ModelSize(actor, 64),
        ModelRole.CRITIC: ModelSize(critic, 64),
        ModelRole.REFERENCE: ModelSize(actor, 64),
    }
    apart = estimates(spec(placement="Dedicated", **changes), sizes)
    peak = budget(spec(**changes), sizes).peak.onloaded.total
    assert peak <= sum(item.total for item in apart.values())
    assert peak >= max(apart[Group.GENERATION].total, apart[Group.TRAINING].total)


@pytest.mark.parametrize(
    ("inference", "mode", "scores"),
    [(2, "Auto", True), (2, "Fixed", True), (2, "Disabled", False), (0, "Disabled", True)],
)
def test_a_generation_worker_counts_the_scoring_models_that_it_may_load(
    inference: int, mode: str, scores: bool
) -> None:
    """Both estimates count them, in each placement: a worker that fusion releases keeps its engine, and scores."""
    for placement in ("Colocated", "Dedicated"):
        changes: dict[str, Any] = {
            "placement": placement, "inference": {"replicas": inference, "gpusPerReplica": 1},
            "training": {"gpusPerReplica": 1, "parallelism": {"pipeline": 4, "data": 2}},
            "fusion": {"interStage": {"mode": mode, **({"threshold": 8, "pool": 1} if mode == "Fixed" else {})}},
        }  # fmt: skip
        body = spec(**changes)
        workload = Workload(body, SIZES, {}, LengthModel.prior(1024), (8,))
        counted = [generation_memory(workload, DevicePlan.from_spec(body)).parts]
        if placement == "Dedicated":
            counted.append(estimates(body, SIZES)[Group.GENERATION].parts)
        else:
            counted.append(budget(body, SIZES).phases[0].onloaded.parts)
        assert [{"reference weights", "critic weights"} <= parts.keys() for parts in counted] == [scores] * 2


@pytest.mark.parametrize("inference", [0, 2])
def test_a_cpu_keeps_nothing_apart_for_what_sleeps(inference: int) -> None:
    result = budget(spec(generation={"replicas": 8}, inference={"replicas": inference}), SIZES)
    assert result.host.parts == {}


DRAFT = ModelSize(BILLION // 2, 2 * 24 * 2 * 64)
APART: dict[str, Any] = {
    "placement": "Dedicated",
    "training": {"gpusPerReplica": 1, "parallelism": {"pipeline": 4, "data": 2}},
}


def with_draft(train: str, **changes: Any) -> RLHFJobSpec:
    draft = {"path": "draft", "train": train}
    speculation = {"drafters": ["Model"], "draftModel": draft, **changes}
    generation = {"replicas": 8, "gpusPerReplica": 1, "maxBatchSize": 64, "speculation": speculation}
    return spec(generation=generation, **APART)


def test_a_draft_model_is_counted_where_it_drafts_and_where_it_is_trained() -> None:
    sizes = SIZES | {"draft": DRAFT}
    cached = 64 * 2048 * 2 * 24 * 2 * 64
    for train, trained in (("Enabled", (4 + 4 + 8 + 2) * BILLION // 2), ("Disabled", None)):
        result = estimates(with_draft(train), sizes)
        assert result[Group.GENERATION].parts["draft model"] == 2 * (BILLION // 2 + cached)
        assert result[Group.TRAINING].parts.get("draft model") == trained
    assert "draft model" not in estimates(with_draft("Disabled", mode="Disabled"), sizes)[Group.GENERATION].parts
    assert estimates(with_draft("Enabled"), SIZES | {"draft": None})[Group.GENERATION].unknown == ("draft",)


def test_each_of_several_reward_models_is_counted_and_what_is_called_is_not() -> None:
    rewards = [
        {"name": "helpful", "model": {"path": "helpful"}},
        {"name": "true", "judge": {"model": {"path": "judge"}, "template": "{prompt} {response}"}},
        {"name": "short", "function": {"file": "reward.py"}},
    ]
    several = spec(models={"actor": {"path": "policy"}, "rewards": rewards}, **APART)
    small = ModelSize(BILLION, 64)
    parts = estimates(several, SIZES | {"reward helpful": small, "reward true": None})[Group.INFERENCE]
    assert parts.parts == {
        "reference weights": 14 * BILLION, "critic weights": 14 * BILLION, "reward helpful weights": 2 * BILLION
    }  # fmt: skip
    assert parts.unknown == ("reward true",)
