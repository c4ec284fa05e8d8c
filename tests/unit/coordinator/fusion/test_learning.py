"""A coordinator learns from its workers' observations and never from spans."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import SpansInMemory, begin_in_process

import rlhf_coordinator
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_coordinator.fusion import learning, reallocation
from rlhf_coordinator.fusion.learning import with_contention
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE
from rlhf_coordinator.state.fusion_state import ExecutedReallocation, WorkInterval
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.storage.journal_pb2 import Begun, Record
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver
from rlhf_planner.inter_stage.balance import Reallocation
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.learned_costs import ObservedWork
from rlhf_planner.inter_stage.tail_placement import Move
from rlhf_planner.inter_stage.throughput import ThroughputCurve

DECODE = pb.DecodeObservation(steps=100, rows_per_step=12.5, keys_per_row=300, prefill_seconds=0.1)
REBUILD = pb.RebuildObservation(passes=2, rows_per_pass=1.5, tokens_per_row=200, seconds=0.09)
SCORING = pb.ScoringObservation(task="values", samples=4, tokens=200)
STEPS = ObservedWork("decode", 10, 4, 100, 1.0)
SPAN = st.tuples(st.integers(1, 50), st.integers(1, 20))


@given(st.lists(SPAN, max_size=8), SPAN)
def test_a_span_is_beside_scoring_for_as_long_as_anybody_scores_in_it(
    scored: list[tuple[int, int]], decoded: tuple[int, int]
) -> None:
    spans = [WorkInterval(f"generation-{number}", start, start + long) for number, (start, long) in enumerate(scored)]
    start, long = decoded
    (work,) = with_contention([(WorkInterval("generation-9", start, start + long), STEPS)], spans)
    moments = sum(
        any(interval.start_ns <= at < interval.end_ns for interval in spans) for at in range(start, start + long)
    )
    assert work == STEPS._replace(contended=moments / long)


ABOUT: Any = pytest.approx
"""Placeholder for a number of any type in a comparison."""


def observation(seconds: float, iteration: int = 0, **work: Any) -> pb.Observation:
    return pb.Observation(start_ns=0, end_ns=int(seconds * 1e9), iteration=iteration, **work)


def test_costs_are_learned_from_the_rows_and_tokens_of_the_work_itself(tmp_path: Path) -> None:
    decoded = learning.decode_work(observation(0.6, decode=DECODE))
    assert decoded == ObservedWork("decode", 100, 12.5, 300, ABOUT(0.5))
    assert learning.rebuild_work(observation(0.6, rebuild=REBUILD)) == ObservedWork("rebuild", 2, 1.5, 200, 0.09)
    moved = [pb.MigratedSample(bytes=400, paused_seconds=0.01), pb.MigratedSample(bytes=800, paused_seconds=0.02)]
    transfer, pause = learning.transfer_work(moved, 4.0, 0.2)
    assert transfer == ObservedWork("transfer", 2, 1, 150, 0.2)
    assert pause == ObservedWork("pause", 2, 1, 150, ABOUT(0.03))
    assert learning.transfer_work([], 4.0, 0.2) == []
    job = make_job(tmp_path)
    context = job_context(job, schedule_json(job.spec))  # tasks: values, reference, and a reward that is a function
    scored = learning.scoring_work(context, observation(0.4, scoring=SCORING))
    assert scored == ObservedWork("score", 1 / 2, 4, 50, ABOUT(0.4))


def test_what_steps_cost_is_learned_from_plain_ones_and_what_drafts_give_from_all() -> None:
    verified = pb.VerifiedSteps(steps=60, rows_per_step=10, keys_per_row=310, seconds=0.3)
    decode = pb.DecodeObservation(
        steps=100, rows_per_step=10, keys_per_row=302, prefill_seconds=0.1, tokens_per_row=2.2, draft_seconds=0.05,
        verified=verified,
    )  # fmt: skip
    plain = learning.decode_work(observation(0.85, decode=decode))
    assert plain == ObservedWork("decode", 40, ABOUT(10), ABOUT(290), ABOUT(0.4))
    assert learning.drafted_steps(observation(0.85, decode=decode)) == (100, 10, 302, 2.2, ABOUT(0.75), 60)


def test_what_a_move_gave_is_told_by_the_lengths_and_times_that_came_out(run: JobRun) -> None:
    costs = StageCosts.measured(decode=[StepTime(1, 1, 0.1), StepTime(4, 1, 0.4)], max_batch_size=4)
    curve = ThroughputCurve(costs, 0.0, 4)
    together = Reallocation((Move(1, "generation-0", "generation-1", True),), 100.0, 140.0, 0.5)
    samples_by_worker = (((0, 5), (1, 0)), ())
    fusion = run.state.fusion
    fusion.reallocated = [ExecutedReallocation(10.0, 0, together, samples_by_worker, (curve, curve))]
    # As they were: 10 steps of two samples, which take 0.2 s each, and 10 of one.
    (gain,) = reallocation.measured(fusion, [15, 20], {0: 11.0, 1: 12.5})
    assert (gain.predicted_gain, gain.measured_gain) == (0.5, ABOUT(3.0 - 2.5))
    assert reallocation.measured(fusion, [15, 20], {0: 11.0}) == [], "one of them was not finished"


@pytest.fixture
def tracker() -> SpansInMemory:
    return SpansInMemory()


@pytest.fixture
def run(tmp_path: Path, tracker: SpansInMemory) -> JobRun:
    return begin_in_process(tmp_path, make_job(tmp_path), tracker)[0]


@pytest.fixture
def handlers(run: JobRun) -> EventHandlers:
    return EventHandlers(run, CheckpointSaver(run))


def test_observations_reach_all_that_learn_from_them(run: JobRun, handlers: EventHandlers) -> None:
    for work in (
        observation(0.6, decode=DECODE),
        observation(0.6, rebuild=REBUILD),
        observation(0.4, scoring=SCORING),
        observation(0.2, decode=pb.DecodeObservation(steps=1, prefill_seconds=0.2)),
        observation(3.0, iteration=5, decode=DECODE),
        observation(0.1, offload=pb.OffloadObservation(role="generation")),
        observation(0.3, iteration=5, onload=pb.OnloadObservation(role="generation")),
    ):
        handlers.message("generation-0", pb.WorkerMessage(observation=work))
    fusion = run.state.fusion
    assert fusion.busy == {"generation-0": {"decode": pytest.approx(0.8), "score": pytest.approx(0.4)}}
    assert [work.kind for _, work in fusion.decoded] == ["decode"], "prefills alone are no steps"
    assert [work.kind for work in fusion.observed] == ["rebuild", "score"]
    assert [stretch.worker for stretch in fusion.scored] == ["generation-0"]
    assert run.state.incremental.passes.keys() == {"values"}
    assert run.times.turn_seconds == {"generation-0": pytest.approx(0.4)}


def test_nobody_learns_from_a_span(run: JobRun, handlers: EventHandlers, tracker: SpansInMemory) -> None:
    attributes = {"steps": "100", "rows": "12.50", "context": "300", "prefill_seconds": "0.100", "tokens": "1250"}
    before = repr((run.state.fusion, run.state.incremental, run.times))
    for name in ("decode", "prefill", "score/values", "score-prefix/values", "offload/generation", "onload/generation"):
        span = pb.Span(worker="generation-0", name=name, start_ns=1, end_ns=5, attributes=attributes)
        handlers.message("generation-0", pb.WorkerMessage(span=span))
    assert repr((run.state.fusion, run.state.incremental, run.times)) == before
    assert [span.name for span in tracker.spans][:2] == ["decode", "prefill"], "they are drawn"


def test_a_score_of_a_task_that_the_job_has_not_ends_the_session(handlers: EventHandlers) -> None:
    unknown = observation(0.4, scoring=pb.ScoringObservation(task="taste", samples=1, tokens=2))
    with pytest.raises(ValueError, match="a score of task 'taste'; this job has"):
        handlers.message("generation-0", pb.WorkerMessage(observation=unknown))


@pytest.mark.parametrize("package", ["fusion", "training", "scheduling", "state"])
def test_what_decides_and_learns_does_not_know_spans(package: str) -> None:
    for path in (Path(rlhf_coordinator.__file__).parent / package).glob("*.py"):
        named = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not named & {"Span", "span"}, f"{path} names spans: it may only use observations"


def test_a_restart_learns_lengths_of_batches_and_not_of_samples_of_evaluations(tmp_path: Path) -> None:
    """Its number does not belong to the batch; the search for its prompt there took minutes."""
    run, _ = begin_in_process(tmp_path, make_job(tmp_path, fusion={"interStage": {"mode": "Auto"}}))
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    for number, length in ((0, 3), (1, 5), (FIRST_SAMPLE, 40)):
        tokens = pack(np.zeros(length, "<i4"))
        run.journal.append(Record(finished=pb.FinishedSample(key=pb.SampleKey(sample=number), tokens=tokens)))
    run.state.ledger = Ledger(1, run.context.spec.rollout.batch_size, run.context.tasks, 1)
    learning.restore_learned(run, {})
    assert run.state.fusion.lengths.samples == 2
