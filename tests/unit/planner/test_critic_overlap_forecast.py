"""Forecast of `rlhf plan` for critics beside decoding, from constructed facts of a run."""

from typing import Any

import pytest

from rlhf_planner.critic_overlap_choice import MeasuredOverlap
from rlhf_planner.critic_overlap_forecast import SHARED_OUT, forecast
from rlhf_planner.explain.iteration_profile import IterationProfile, JobSettings, SampleFacts, TaskFacts

SETTINGS = JobSettings(
    generation_workers=1, inference_workers=1, max_batch_size=8, max_response_tokens=64, inter_stage="Disabled",
    balance="Disabled", overlap="Enabled", speculation="Disabled", intra_stage="Disabled", weight_sharing="Auto",
    pipeline=1, checkpoint_every=0, evaluation_every=0, tokens_replayed=False,
)  # fmt: skip


def facts(iteration: int, *, at_once: bool = True, seen: bool = True, **others: Any) -> IterationProfile:
    """Two responses, finished after 4 and 8 s, each scored 1 s later; 6 s of training and 0.5 s of publishing."""
    samples = SampleFacts(
        prompts=[20.0, 20.0], responses=[20.0, 40.0], begun=[0.0, 0.0], finished=[4.0, 8.0],
        scored=[5.0, 9.0] if seen else [], workers=[0, 0],
    )  # fmt: skip
    return IterationProfile(
        iteration=iteration,
        total=16.0,
        phases={"Training": 6.0 if at_once else 4.0, "Publishing": 0.5},
        settings=SETTINGS.model_copy(update=others),
        samples=samples,
        tasks=[TaskFacts(name=name, call=False, last=0, busy=1.0, setup=0, per_token=0) for name in ("values", "kl")],
        training={"step_seconds": 6.0} if at_once else {},
    )


def test_without_a_measurement_training_is_shared_out_by_size_and_that_is_said() -> None:
    prediction = forecast([facts(3)], None, 2 / 3, {"values"})
    assert prediction is not None
    assert (prediction.iteration, prediction.auto, prediction.assumptions) == (3, True, (SHARED_OUT,))
    assert [prediction.disabled, prediction.enabled] == pytest.approx([6 + 0.5 + 9, 4 + 0.5 + 9])


def test_what_the_run_measured_of_both_ways_counts() -> None:
    measured = MeasuredOverlap().with_together(100, 6.0).with_parts(100, 6.0, 6.0).with_scoring(1.0, 1.0, 0.5)
    prediction = forecast([facts(3), facts(4, at_once=False)], measured, None, {"values"})
    assert prediction is not None
    assert (prediction.iteration, prediction.auto, prediction.assumptions) == (4, False, ())
    assert prediction.enabled >= prediction.disabled


def test_an_iteration_that_was_not_seen_whole_or_waited_for_critics_says_nothing() -> None:
    assert forecast([], None, 0.5, ()) is None
    assert forecast([facts(0, seen=False)], None, 0.5, ()) is None
    assert forecast([facts(0)], None, None, ()) is None, "sizes are not known"
    assert forecast([facts(0, at_once=False), facts(1)], None, 0.5, ()) is None, "it was decoded beside critics"
    prediction = forecast([facts(0), facts(1, at_once=False)], None, 0.5, ())
    assert prediction is not None
    assert prediction.iteration == 0


def test_scoring_that_begins_when_all_is_generated_hides_more() -> None:
    def gain(overlap: str) -> float:
        prediction = forecast([facts(0, overlap=overlap)], None, 0.1, {"values", "kl"})
        assert prediction is not None
        return prediction.disabled - prediction.enabled

    assert gain("Disabled") >= gain("Enabled")
