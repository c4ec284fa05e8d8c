"""The cost functions of the plan search against numbers that are computed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.plans.plan_jobs import PARAMETERS, PPO, ROUND, SHAPE, SIZE, plan_document, plan_workload

from rlhf_api.job.groups import TrainingParallelism
from rlhf_coordinator.state.fusion_state import nominal_costs
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.plan_search.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    transfer_seconds,
)
from rlhf_planner.plan_search.context_switch import switch_seconds
from rlhf_planner.plan_search.cost_figures import (
    CostFigure,
    EngineProfile,
    FigureSource,
    LayerProfile,
    ModelPart,
    weakest,
)
from rlhf_planner.plan_search.engine_costs import engine_costs
from rlhf_planner.plan_search.learned_training import learned_compute, learned_rest
from rlhf_planner.plan_search.phase_memory import with_activations
from rlhf_planner.plan_search.publishing import Readers, publish_seconds
from rlhf_planner.plan_search.rollout_forecast import lower_bound, rollout_forecast
from rlhf_planner.plan_search.training_compute import interpolated, layer_seconds
from rlhf_planner.plan_search.training_seconds import TrainingSettings, training_times
from rlhf_planner.plan_search.workload import MicroBatchSize, UnplannableError
from rlhf_planner.training_layouts import layout_of

BATCH = MicroBatchSize(4, tokens=160.0, squares=6400.0, responses=128.0)
ACTOR = plan_workload(plan_document()).policy
LAYER = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 128


def settings(micro: int = 4, *, checkpointing: bool = False, **axes: Any) -> TrainingSettings:
    return TrainingSettings(TrainingParallelism(**axes), micro, checkpointing)


def test_collectives_move_their_bytes_over_the_link() -> None:
    inside = ROUND.inside  # 1e8 bytes per second, 1e-5 s
    assert transfer_seconds(1e6, inside) == pytest.approx(1e-2 + 1e-5)
    assert all_gather_seconds(1e6, 4, inside) == pytest.approx(0.75e-2 + 2e-5)
    assert all_reduce_seconds(1e6, 4, inside) == pytest.approx(1.5e-2 + 4e-5)
    assert all_to_all_seconds(1e6, 4, inside) == pytest.approx(0.75e-2 + 1e-5)
    assert all_reduce_seconds(1e6, 1, inside) == all_to_all_seconds(1e6, 1, inside) == 0
    assert ROUND.link(4) is ROUND.inside
    assert ROUND.link(5) is ROUND.between


def test_a_layer_without_a_profile_takes_the_time_of_the_roofline() -> None:
    assert ACTOR.layer_parameters == pytest.approx(LAYER)
    operations = 6 * LAYER * 160 + 6 * 64 * 6400
    assert layer_seconds(ACTOR, BATCH, ROUND).value == pytest.approx(operations / 1e10 + 3e-5)
    recomputed = layer_seconds(ACTOR, BATCH, ROUND, recompute=True).value
    assert recomputed == pytest.approx(4 / 3 * (operations / 1e10 + 3e-5))
    split = layer_seconds(ACTOR, BATCH, ROUND, tensor=2, context=2).value
    assert split == pytest.approx(operations / 4e10 + 3e-5)
    adapters = layer_seconds(ACTOR, BATCH, ROUND, adapters=True).value
    assert adapters == pytest.approx((operations - 2 * LAYER * 160) / 1e10 + 3e-5)
    small = MicroBatchSize(1, 2.0, 2.0, 1.0)
    assert layer_seconds(ACTOR, small, ROUND).value == pytest.approx(3 * LAYER * 2 / 1e9 + 3e-5), "reads of weights"


def test_a_profile_of_a_layer_replaces_the_roofline() -> None:
    profile = LayerProfile("actor", 1, ((100.0, 0.01), (200.0, 0.02)), FigureSource.MEASURED)
    costs = replace(ROUND, layers=(profile,))
    found = layer_seconds(ACTOR, BATCH, costs)
    assert found.value == pytest.approx(0.016)
    assert found.source is FigureSource.MEASURED
    whole, split = (layer_seconds(ACTOR, BATCH, ROUND, tensor=tensor).value for tensor in (1, 2))
    assert layer_seconds(ACTOR, BATCH, costs, tensor=2).value == pytest.approx(0.016 * split / whole)
    other = replace(ACTOR, role="critic")
    assert layer_seconds(other, BATCH, costs).source is FigureSource.ASSUMED
    assert interpolated(profile.points, 300.0) == pytest.approx(0.03), "linear beyond the last point"
    assert interpolated(((100.0, 0.01),), 50.0) == pytest.approx(0.005)


def test_a_mini_batch_is_one_micro_batch_on_all_stages_and_the_rest_on_the_slowest() -> None:
    workload = plan_workload(plan_document(PPO))
    single, two = (training_times(workload, ROUND, settings(pipeline=stages)) for stages in (1, 2))
    critic = single.models["critic"]
    layer = layer_seconds(replace(ACTOR, role="critic"), workload.micro_batch(4), ROUND, value_bytes=4).value
    mini_batches, micro_batches = 2, 4
    assert critic["layers"] == pytest.approx(mini_batches * micro_batches * 8 * layer)
    assert critic["optimizer"] == pytest.approx(mini_batches * PARAMETERS * 28 / 1e9)
    assert set(critic) == {"layers", "optimizer"}
    staged = two.models["critic"]
    edge = 2 * transfer_seconds(workload.micro_batch(4).tokens * 64 * 4, ROUND.inside)
    assert staged["layers"] == pytest.approx(mini_batches * micro_batches * 4 * layer)
    assert staged["pipeline bubbles"] == pytest.approx(mini_batches * (4 * layer + edge))
    assert staged["stage transfers"] == pytest.approx(mini_batches * micro_batches * edge)
    assert staged["optimizer"] == pytest.approx(critic["optimizer"] / 2)


def test_measured_parts_count_on_the_stages_that_have_them() -> None:
    """The first stage has the embedding, the last one the head; every stage has the constant of a micro-batch."""
    workload = plan_workload(plan_document(PPO))
    measured, tokens = FigureSource.MEASURED, workload.micro_batch(4).tokens
    seconds = {ModelPart.LAYER: 0.001, ModelPart.EMBEDDING: 0.01, ModelPart.HEAD: 0.1}
    layers = tuple(
        LayerProfile(role, 1, ((tokens, each), (2 * tokens, each)), measured, part)
        for role in ("actor", "critic")
        for part, each in seconds.items()
    )
    figure = CostFigure(0.0005, measured)
    costs = replace(ROUND, layers=layers, stage_seconds=figure, optimizer_seconds=CostFigure(1e-9, measured))
    single, two = (training_times(workload, costs, settings(pipeline=stages)) for stages in (1, 2))
    mini_batches, micro_batches = 2, 4
    first, last = 4 * 0.001 + 0.01 + 0.0005, 4 * 0.001 + 0.1 + 0.0005
    whole = 8 * 0.001 + 0.11 + 0.0005
    assert single.models["critic"]["layers"] == pytest.approx(mini_batches * micro_batches * whole)
    assert single.models["critic"]["optimizer"] == pytest.approx(mini_batches * PARAMETERS * 1e-9)
    assert single.source is FigureSource.ASSUMED, "as weak as the lengths"
    observed = replace(workload, length_source=measured)
    assert training_times(observed, costs, settings()).source is measured
    assert training_times(observed, costs, settings(data=2)).source is FigureSource.ASSUMED, "as weak as the link"
    edge = 2 * transfer_seconds(tokens * 64 * 4, ROUND.inside)
    assert two.models["critic"]["layers"] == pytest.approx(mini_batches * micro_batches * last)
    assert two.models["critic"]["pipeline bubbles"] == pytest.approx(mini_batches * (first + edge))
    assert two.total == pytest.approx(sum(two.of_model(role) for role in two.models))
    late = replace(costs, start_seconds=CostFigure(0.25, measured))
    started = training_times(workload, late, settings(pipeline=2)).models["critic"]
    assert started["first micro-batch"] == pytest.approx(mini_batches * 2 * 0.25), "one stage after the other"
    rested = training_times(workload, replace(costs, iteration_seconds=CostFigure(5.0)), settings())
    assert rested.total == pytest.approx(single.total + 5.0)


def test_a_run_teaches_the_seconds_outside_of_its_mini_batches() -> None:
    def facts(iteration: int, seconds: float, step: float) -> IterationProfile:
        read: dict[str, Any] = {
            "iteration": iteration,
            "phases": {"Training": seconds},
            "training": {"step_seconds": step},
        }
        return IterationProfile.model_construct(**read)

    runs = [facts(0, 99.0, 1.0), facts(1, 10.0, 4.0), facts(2, 9.0, 3.0), facts(3, 13.0, 4.0)]
    assert learned_rest(runs, 2, 0.5) == CostFigure(2.5, FigureSource.LEARNED)
    assert learned_rest(runs, 2, 100.0) == CostFigure(0.0, FigureSource.LEARNED)
    assert learned_rest(runs[:2], 2, 0.5) is None


def test_copies_sum_gradients_and_share_what_they_are_asked_to() -> None:
    workload = plan_workload(plan_document(PPO))
    plain, shared, hosted = (
        training_times(workload, ROUND, settings(data=2, **more)).models["critic"]
        for more in ({}, {"shard_optimizer": True}, {"offload_optimizer": True})
    )
    stage = 4 * PARAMETERS
    assert plain["gradient sums"] == pytest.approx(2 * all_reduce_seconds(stage, 2, ROUND.inside))
    messages = 8 * 9 * ROUND.inside.latency.value
    assert shared["gathered weights"] == pytest.approx(2 * (all_gather_seconds(stage, 2, ROUND.inside) + messages))
    assert shared["optimizer"] == pytest.approx(plain["optimizer"] / 2)
    assert hosted["moments from the host"] == pytest.approx(2 * 2 * 8 * PARAMETERS / 1e8)
    far = training_times(workload, ROUND, settings(data=8, micro=2)).models["critic"]
    assert far["gradient sums"] == pytest.approx(2 * all_reduce_seconds(stage, 8, ROUND.between))


def test_tensor_and_sharded_layers_communicate_per_micro_batch() -> None:
    workload = plan_workload(plan_document(PPO))
    tokens = workload.micro_batch(4).tokens
    split = training_times(workload, ROUND, settings(tensor=2)).models["critic"]
    sums = 4 * all_reduce_seconds(tokens * 64 * 4, 2, ROUND.inside)
    assert split["tensor sums"] == pytest.approx(2 * 4 * 8 * sums)
    again = training_times(workload, ROUND, settings(tensor=2, checkpointing=True)).models["critic"]
    assert again["tensor sums"] == pytest.approx(1.5 * split["tensor sums"])
    sharded = training_times(workload, ROUND, settings(data=2, shard=2)).models["critic"]
    assert sharded["gathered parts"] == pytest.approx(2 * 2 * 8 * 3 * all_gather_seconds(LAYER * 4, 2, ROUND.inside))
    assert "gradient sums" not in sharded


def test_padding_counts_and_packing_saves_it() -> None:
    padded, packed = (
        plan_workload(plan_document(PPO, training={"packing": packing})).micro_batch(4) for packing in (False, True)
    )
    assert padded.tokens > packed.tokens
    lengths = np.concatenate(plan_workload(plan_document(PPO)).draws) + 8.0
    assert packed.tokens == pytest.approx(4 * lengths.mean())


def test_a_shared_prompt_counts_once_in_a_packed_micro_batch() -> None:
    """Prompts have 8 tokens. A mini-batch of 32 samples has four responses to a prompt, one of 16 has two."""

    def micro_batch(mode: str, samples: int, mini_batch: int) -> MicroBatchSize:
        training = {"packing": True, "sharedPrompts": mode}
        grpo = {"grpo": {"groupSize": 4, "miniBatchSize": mini_batch}}
        return plan_workload(plan_document(grpo, training=training)).micro_batch(samples)

    for samples, mini_batch, repeated in ((8, 32, 6), (8, 16, 4), (2, 32, 1), (1, 32, 0), (3, 32, 2), (8, 8, 0)):
        whole = micro_batch("Disabled", samples, mini_batch)
        shared = micro_batch("Enabled", samples, mini_batch)
        assert whole.tokens - shared.tokens == pytest.approx(8 * repeated)
        assert whole.squares - shared.squares == pytest.approx(64 * repeated)
        assert whole.responses == shared.responses
    assert micro_batch("Auto", 8, 32) == micro_batch("Enabled", 8, 32)
    assert micro_batch("Auto", 8, 8) == micro_batch("Disabled", 8, 8)


def test_an_engine_of_several_devices_reads_less_and_waits_for_sums() -> None:
    workload = plan_workload(plan_document(PPO))
    single, _ = engine_costs(workload, ROUND, 1, 8, 1)
    four, source = engine_costs(workload, ROUND, 4, 8, 1)
    weights = 4 * PARAMETERS / 1e9
    assert single.decode_seconds(1, 0) == pytest.approx(weights + 8 * 1e-5)
    row = 2 * 8 * 2 * 0.75 * 64 * 4 / 1e8
    latency = 8 * 2 * math.log2(4) * 2 * 1e-5
    assert four.decode_seconds(1, 0) == pytest.approx(weights / 4 + 8 * 1e-5 + latency + row)
    assert four.score == single.score, "scoring workers have their own devices"
    assert source is FigureSource.ASSUMED


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_path_to_costs_scores_a_deterministic_job_one_by_one(engine: str, deterministic: bool) -> None:
    document = plan_document(PPO, gpus=1, deterministic=deterministic, generation={"engine": engine})
    workload = plan_workload(document)
    expected = 1 if deterministic else 16
    assert engine_costs(workload, ROUND, 1, 8, 1)[0].score_batch == expected
    assert nominal_costs(workload.spec).score_batch == expected


def test_a_profiled_engine_is_scaled_to_another_tensor_size() -> None:
    workload = plan_workload(plan_document(PPO))
    measured = StageCosts(DecodeLines((1, 8), (0.5, 1.0), (0.0, 0.0)), 8)
    costs = replace(ROUND, engine=EngineProfile(measured, 1, FigureSource.LEARNED))
    same, source = engine_costs(workload, costs, 1, 8, 1)
    assert (same.decode_seconds(8, 0), source) == (1.0, FigureSource.LEARNED)
    sums = 2 * 8 * all_reduce_seconds(8 * 64 * 4, 2, ROUND.inside)
    single, two = (engine_costs(workload, ROUND, tensor, 8, 1)[0].decode_seconds(8, 0) for tensor in (1, 2))
    scaled, weak = engine_costs(workload, costs, 2, 8, 1)
    assert scaled.decode_seconds(8, 0) == pytest.approx(1.0 * (two - sums) / single + sums), "sums depend on the link"
    assert weak is FigureSource.ASSUMED, "as weak as the link"


def test_publishing_is_bound_by_holders_or_by_the_slowest_reader() -> None:
    many = [Readers(8, 1, 1e6), Readers(0, 1, 1e9)]
    assert publish_seconds(many, 2, 16, ROUND).value == pytest.approx(8e6 / 2 / 1e7 + 1e-4)
    few = [Readers(1, 1, 1e6)]
    assert publish_seconds(few, 4, 16, ROUND).value == pytest.approx(1e6 / 1e7 + 1e-4)
    assert publish_seconds([], 1, 2, ROUND).value == pytest.approx(1e-5)


def test_a_switch_moves_both_sides_twice() -> None:
    moved = switch_seconds(1e6, 4e6, ROUND, moments_in_host=False, on_gpus=True).value
    assert moved == pytest.approx(2 * (12e6 + 4e6) / 1e8)
    light = switch_seconds(1e6, 4e6, ROUND, moments_in_host=True, on_gpus=True).value
    assert light == pytest.approx(2 * (4e6 + 4e6) / 1e8)
    assert switch_seconds(1e6, 4e6, ROUND, moments_in_host=False, on_gpus=False).value == 0


def test_memory_of_training_includes_activations_of_the_largest_stage() -> None:
    workload = plan_workload(plan_document(PPO))
    base = layout_of(workload.spec, workload.sizes).memory
    whole = with_activations(workload, base, settings())
    assert whole.total > base.total
    assert whole.parts["weights"] == base.parts["weights"]
    assert with_activations(workload, base, settings(micro=8)).parts["activations"] > whole.parts["activations"]
    recomputed = with_activations(workload, base, settings(checkpointing=True))
    assert recomputed.parts["activations"] < whole.parts["activations"]
    blind = replace(workload, shapes={})
    assert with_activations(blind, base, settings()).unknown == ("activations of actor", "activations of critic")


def test_no_rollout_is_faster_than_its_lower_bound() -> None:
    workload = plan_workload(plan_document(PPO))
    stage, _ = engine_costs(workload, ROUND, 1, 8, 1)
    for generation, inference in ((1, 0), (2, 1), (4, 0), (8, 4)):
        forecast = rollout_forecast(workload, stage, generation, inference)
        assert lower_bound(workload, stage, generation, inference) <= forecast.seconds
        assert forecast.generation_seconds <= forecast.seconds


def test_a_result_is_as_weak_as_its_weakest_figure() -> None:
    measured, learned, assumed = FigureSource
    assert weakest([learned, measured]) is learned
    assert weakest([learned, assumed, measured]) is assumed
    assert weakest([]) is measured


def test_a_job_without_generation_or_sizes_has_no_plan() -> None:
    with pytest.raises(UnplannableError, match="sft generates nothing"):
        plan_workload(plan_document({"sft": {"miniBatchSize": 16}}))
    with pytest.raises(UnplannableError, match=r"generation\.replicas is 0"):
        plan_workload(plan_document(suspend=True, generation={"replicas": 0}))
    workload = plan_workload(plan_document())
    with pytest.raises(UnplannableError, match="models of critic"):
        replace(workload, sizes={"actor": SIZE})
    assert workload.policy.hidden == SHAPE.hidden
    assert replace(workload.policy, shape=None).hidden == pytest.approx(math.sqrt(PARAMETERS / (12 * 8)))


def test_a_run_teaches_the_factor_with_which_its_own_training_is_predicted() -> None:
    workload = plan_workload(plan_document())
    own = settings(pipeline=2, data=2)

    def predict(factor: float) -> float:
        costs = replace(ROUND, compute=CostFigure(factor, FigureSource.LEARNED))
        return training_times(workload, costs, own).total

    assert predict(1.0) == training_times(workload, ROUND, own).total
    seconds = [9.0, 3 * predict(1.0), 0.1]
    factor = learned_compute(predict, seconds)
    assert factor is not None
    assert predict(factor.value) == pytest.approx(3 * predict(1.0))
    assert factor.value > 3, "communication does not take longer"
    seen = replace(workload, length_source=FigureSource.LEARNED)
    one_rank = training_times(seen, replace(ROUND, compute=factor), settings())
    assert one_rank.source is FigureSource.LEARNED, "one rank uses no link"


def test_nothing_is_learned_from_one_iteration_or_from_less_than_communication() -> None:
    predict = lambda factor: 2.0 + factor  # noqa: E731
    assert learned_compute(predict, [30.0]) is None
    assert learned_compute(predict, [1.0, 1.0]) is None
    assert learned_compute(predict, [5.0, 5.0]) == CostFigure(3.0, FigureSource.LEARNED)
