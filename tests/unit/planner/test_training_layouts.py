"""Layouts of a training group: only valid ones, their memory, and the suggestion if one does not fit."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_api import manifest
from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.groups import TrainingParallelism
from rlhf_common.names import DRAFT_MODEL
from rlhf_planner.device_memory import (
    DRAFT,
    GIBIBYTE,
    OFFLOADED_PIECE_BYTES,
    OFFLOADED_PIECES,
    ModelSize,
    budget,
    training,
)
from rlhf_planner.training_layouts import first_that_fits, layout_of, layout_problem, layouts

BILLION = 10**9
SEVEN = ModelSize(7 * BILLION, 2 * 32 * 8 * 128, layers=32, key_value_heads=8)
SIZES: dict[str, ModelSize | None] = {ModelRole.ACTOR: SEVEN, ModelRole.CRITIC: SEVEN, ModelRole.REFERENCE: SEVEN}
Backend = Literal["torch", "megatron"]


def document(backend: Backend = "torch", **training: Any) -> dict[str, Any]:
    spec = {
        "algorithm": {"ppo": {"miniBatchSize": 64}},
        "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "training": {"backend": backend, "gpusPerReplica": 1, "microBatchSize": 2, **training},
    }
    return {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "large"}, "spec": spec}


def spec(backend: Backend = "torch", **training: Any) -> RLHFJobSpec:
    return RLHFJob.model_validate(document(backend, **training)).spec


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(("torch", "megatron")), st.integers(1, 48), st.integers(1, 40), st.sampled_from((1, 2, 3, 8)))
def test_every_layout_that_is_listed_is_one_that_validation_takes(
    backend: Backend, ranks: int, layers: int, heads: int
) -> None:
    experts = heads if heads > 1 else 0
    model = ModelSize(BILLION, 64, {}, layers, heads, experts, BILLION // 2 if experts else 0)
    sizes: dict[str, ModelSize | None] = dict.fromkeys(SIZES, model)
    listed = layouts(spec(backend), sizes, ranks)
    for layout in listed:
        parallelism = layout.parallelism
        assert parallelism.ranks == ranks
        assert parallelism.pipeline <= layers
        assert heads % parallelism.tensor == 0
        assert 0 < layout.busy <= 1
        assert layout.memory.total > 0
        given_layout = document(backend, parallelism=parallelism.model_dump(by_alias=True))
        assert manifest.broken_rules(RLHFJob.model_validate(given_layout)) == [], layout.words
    assert len({layout.parallelism.model_dump_json() for layout in listed}) == len(listed)
    offloaded = [layout.parallelism.offload_optimizer for layout in listed]
    assert offloaded == sorted(offloaded), "what waits for the host comes last"
    half = len(listed) // 2
    busy = [layout.busy for layout in listed[:half]]
    assert busy == sorted(busy, reverse=True) == [layout.busy for layout in listed[half:]]


def test_ranks_that_share_out_experts_hold_a_part_of_those_alone() -> None:
    model = ModelSize(8 * BILLION, 64, layers=32, key_value_heads=8, experts=8, expert_parameters=6 * BILLION)
    by_words = {layout.words: layout for layout in layouts(spec(), dict.fromkeys(SIZES, model), 4)}
    whole, shared = (by_words[words].memory.parts for words in ("data 4", "data 4, expert 4"))
    assert whole["gradients"] == 2 * 8 * BILLION * 4
    assert shared["gradients"] == 2 * (2 * BILLION + 6 * BILLION // 4) * 4
    assert shared["published weights"] == 2 * 6 * BILLION // 4 * 4, "of experts, one copy over the group"
    assert "pipeline 2, data 2, expert 2" in by_words
    by_megatron = layouts(spec("megatron"), dict.fromkeys(SIZES, model), 4)
    assert {layout.parallelism.tensor for layout in by_megatron} == {1}, "which splits no experts"


def test_layouts_keep_the_ranks_that_share_samples_by_position() -> None:
    by_words = {layout.words: layout for layout in layouts(spec(parallelism={"data": 1, "context": 2}), SIZES, 4)}
    assert {"pipeline 2, context 2", "data 2, context 2", "data 2, context 2, shard 4"} <= by_words.keys()
    assert {layout.parallelism.context for layout in by_words.values()} == {2}
    alone = {layout.words: layout for layout in layouts(spec(), SIZES, 4)}
    assert by_words["data 2, context 2"].memory.parts == alone["data 4"].memory.parts, "which hold whole copies"
    assert layouts(spec(parallelism={"data": 1, "context": 2}), SIZES, 3) == []


def test_a_pipeline_waits_and_copies_hold_all_of_it() -> None:
    """64 samples in micro-batches of two: 32 micro-batches in a pipeline of four, or 8 per copy with four copies."""
    by_words = {layout.words: layout for layout in layouts(spec(), SIZES, 4)}
    on_device = [words for words in by_words if "offloadOptimizer" not in words]
    assert list(by_words) == on_device + [f"{words}, offloadOptimizer" for words in on_device]
    assert on_device == [
        "data 4, shard 4",
        "data 4, shardOptimizer",
        "data 4",
        "pipeline 2, data 2, shardOptimizer",
        "pipeline 2, data 2",
        "pipeline 4",
    ]
    assert by_words["pipeline 4"].busy == 32 / 35
    assert by_words["pipeline 4"].seconds_by_rank == pytest.approx(35 / 32 / 4)
    assert by_words["data 4"].busy == 1
    whole, shared = (by_words[words].memory for words in ("data 4", "data 4, shardOptimizer"))
    assert whole.total == 4 * by_words["pipeline 4"].memory.total
    assert {name: whole.parts[name] / shared.parts[name] for name in whole.parts} == {
        "weights": 1, "gradients": 1, "optimizer": 4, "half-precision weights": 1,
    }  # fmt: skip
    tensor = {layout.words for layout in layouts(spec("megatron"), SIZES, 8)}
    assert {"tensor 8", "pipeline 2, tensor 4", "pipeline 2, data 2, tensor 2"} <= tensor
    assert not any("shard " in words for words in tensor)


def test_offloaded_moments_are_counted_on_the_host_and_pieces_of_them_on_the_device() -> None:
    asked = spec(parallelism={"data": 4, "shardOptimizer": True})
    beside = spec(parallelism={"data": 4, "shardOptimizer": True, "offloadOptimizer": True})
    on_device, offloaded = (layout_of(job_spec, SIZES).memory for job_spec in (asked, beside))
    pieces = OFFLOADED_PIECES * OFFLOADED_PIECE_BYTES
    assert offloaded.host == {"optimizer": on_device.parts["optimizer"]}
    assert on_device.host == {}
    assert offloaded.parts == {**on_device.parts, "optimizer": pieces}
    small: dict[str, ModelSize | None] = dict.fromkeys(SIZES, ModelSize(1000, 64))
    assert layout_of(beside, small).memory.parts["optimizer"] == 2 * 8 * 250


def test_moments_of_a_drafter_that_is_trained_are_offloaded_too() -> None:
    speculation = {"drafters": ["Model"], "draftModel": {"path": "draft", "train": "Enabled"}}
    counted = []
    for offload in (False, True):
        body = document(parallelism={"offloadOptimizer": offload})
        body["spec"]["generation"] = {"speculation": speculation}
        sizes = SIZES | {DRAFT_MODEL: ModelSize(BILLION, 64)}
        counted.append(training(RLHFJob.model_validate(body).spec, sizes))
    on_device, offloaded = counted
    assert on_device.parts[DRAFT] - offloaded.parts[DRAFT] == 8 * BILLION
    assert offloaded.host["optimizer"] == on_device.parts["optimizer"] + 8 * BILLION


def test_ranks_that_take_turns_keep_moments_on_the_host_either_way() -> None:
    hosts = []
    for offload in (False, True):
        body = document(parallelism={"offloadOptimizer": offload})
        body["spec"] |= {"placement": "Colocated", "generation": {"gpusPerReplica": 1}}
        hosts.append(budget(RLHFJob.model_validate(body).spec, SIZES).host.parts)
    assert hosts[0] == hosts[1]
    assert hosts[0]["optimizer (training)"] == 2 * 8 * 7 * BILLION


def test_critics_of_another_tensor_size_have_other_stages_and_as_much_memory() -> None:
    """Two models of one size on four ranks: the actor in pairs on two stages, the critic on four."""
    asked = {"pipeline": 2, "tensor": 2, "criticTensor": 1}
    own, other = (
        layout_of(spec("megatron", parallelism=parallelism), SIZES)
        for parallelism in (asked, {"pipeline": 2, "tensor": 2})
    )
    assert own.words == "pipeline 2, tensor 2, criticTensor 1"
    assert own.busy == pytest.approx(2 * 32 / (33 + 35))
    assert own.memory.total < other.memory.total, "the critic keeps no whole tensors apart"
    listed = layouts(spec("megatron", parallelism=asked), SIZES, 4)
    assert [layout for layout in listed if layout.parallelism == own.parallelism] == [own]
    few = SIZES | {ModelRole.CRITIC: ModelSize(7 * BILLION, 64, layers=32, key_value_heads=1)}
    words = {layout.words for layout in layouts(spec("megatron", parallelism=asked), few, 4)}
    assert "tensor 4, criticTensor 1" in words
    assert "tensor 4" not in words, "its heads cannot be split"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4), st.integers(1, 40), st.sampled_from((1, 2, 3, 8)))
def test_layouts_with_critics_of_another_size_are_those_that_validation_takes(
    pipeline: int, tensor: int, critic: int, layers: int, heads: int
) -> None:
    asked = {"pipeline": 2**pipeline, "tensor": 2**tensor, "criticTensor": 2**critic}
    if critic > pipeline + tensor:
        return
    sizes: dict[str, ModelSize | None] = dict.fromkeys(
        SIZES, ModelSize(BILLION, 64, layers=layers, key_value_heads=heads)
    )
    listed = layouts(spec("megatron", parallelism=asked), sizes, 2 ** (pipeline + tensor))
    for layout in listed:
        assert layout.parallelism.stages_of(ModelRole.CRITIC) <= layers
        given_layout = document("megatron", parallelism=layout.parallelism.model_dump(by_alias=True))
        assert manifest.broken_rules(RLHFJob.model_validate(given_layout)) == [], layout.words
    assert len({layout.parallelism.model_dump_json() for layout in listed}) == len(listed)


def test_a_layout_that_does_not_fit_is_told_with_the_one_that_does() -> None:
    """Two models of seven billion, 18 bytes per parameter: 235 GiB on one rank, 59 on four and 29 on eight."""
    device = 79 * GIBIBYTE
    assert layout_problem(spec(parallelism={"pipeline": 4}), SIZES, device) == ""
    problem = layout_problem(spec(), SIZES, device)
    assert problem.startswith("a training rank needs 235 GiB (weights 52.2 GiB, gradients 52.2 GiB, optimizer 104 GiB")
    assert problem.endswith(
        "and a device has 79 GiB: use spec.training.parallelism: data 4, shard 4 (4 ranks that need 65.2 GiB each) or "
        "data 2, shard 2, offloadOptimizer (2 ranks that need 78.4 GiB each, and 52.2 GiB of host memory)"
    )
    alone = layout_problem(spec(), SIZES, 140 * GIBIBYTE)
    assert alone.endswith("or offloadOptimizer (1 rank that needs 131 GiB, and 104 GiB of host memory)")
    assert "offloadOptimizer" not in layout_problem(spec(parallelism={"pipeline": 2}), SIZES, 60 * GIBIBYTE)
    fitting = first_that_fits(spec("megatron"), SIZES, device)
    assert fitting is not None
    assert fitting.parallelism == TrainingParallelism(tensor=4)
    assert "no layout of up to 64 ranks is known to fit" in layout_problem(spec(), SIZES, GIBIBYTE)


def test_what_is_not_known_is_not_refused_and_never_named() -> None:
    unknown: dict[str, ModelSize | None] = dict.fromkeys(SIZES)
    assert layout_problem(spec(), unknown, 1) == ""
    assert first_that_fits(spec(), unknown, 10**15) is None
    assert layout_of(spec(parallelism={"offloadOptimizer": True}), unknown).memory.parts == {}
    half = SIZES | {ModelRole.CRITIC: None}
    assert "no layout of up to 64 ranks is known to fit" in layout_problem(spec(), half, GIBIBYTE)


def test_the_jobs_own_layout_counts_as_it_is_though_it_would_not_be_chosen() -> None:
    asked = spec(parallelism={"pipeline": 3})
    assert layout_of(asked, SIZES).words == "pipeline 3"
    assert json.loads(layout_of(asked, SIZES).parallelism.model_dump_json())["pipeline"] == 3
