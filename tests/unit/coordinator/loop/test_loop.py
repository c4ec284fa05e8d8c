"""A tick decides and acts until no decision is left; it enters the right phases and stores data for reports."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import SpansInMemory, begin_in_process

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.timeline_spans import draw_last_phase
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.loop.loop import DEBOUNCE_SECONDS, MAX_DEBOUNCE_SECONDS, Loop, pause_before_tick
from rlhf_coordinator.scheduling import iteration
from rlhf_coordinator.scheduling.consolidation import Consolidation
from rlhf_coordinator.scheduling.decisions import CloseIteration, CommitTrained, Decision
from rlhf_coordinator.scheduling.iteration import SchedulerOutput
from rlhf_coordinator.storage.journal_pb2 import Begun
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver


class Recorded(SpansInMemory):
    """Stores spans, and the kinds of events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def event(self, time_ns: int, kind: str, *_: object, **__: object) -> None:
        self.events.append(kind)


class LoopBench:
    """A loop that records the scheduler's decisions without acting on them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tracker = Recorded()
        job = make_job(folder, batch=8, fusion={"intraStage": {"mode": "Disabled"}})
        self.run: JobRun = begin_in_process(folder, job, self.tracker)[0]
        self.outputs: Iterator[SchedulerOutput] = iter(())
        self.done: list[Decision] = []
        saver = CheckpointSaver(self.run)
        actions = Actions(self.run, saver)
        monkeypatch.setattr(actions, "carry_out", self.done.append)
        monkeypatch.setattr(iteration, "decide", lambda *_: next(self.outputs))
        self.loop = Loop(self.run, EventHandlers(self.run, saver), actions)

    def tick(self, *outputs: SchedulerOutput) -> list[str]:
        """Let the scheduler make these decisions, one per round; return the phases that ended."""
        self.outputs = iter(outputs)
        before = len(self.tracker.spans)
        self.loop.tick()
        assert next(self.outputs, None) is None, "there is something left to decide"
        assert self.run.scheduled == outputs[-1]
        return [span.name for span in self.tracker.spans[before:]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopBench:
    """Return a started job before its first tick."""
    return LoopBench(tmp_path, monkeypatch)


def test_a_fifth_of_the_time_goes_into_deciding_and_what_comes_after_a_silence_waits_for_no_more() -> None:
    """A message after half a second of work once waited four times as long as the tick before it took."""
    assert pause_before_tick(10.0, 10.004, 10.004) == pytest.approx(0.016)
    assert pause_before_tick(10.0, 10.004, 10.014) == pytest.approx(0.006)
    assert pause_before_tick(10.0, 10.004, 10.5) == DEBOUNCE_SECONDS
    assert pause_before_tick(10.0, 10.1, 10.1) == pytest.approx(MAX_DEBOUNCE_SECONDS)


def test_a_phase_that_ends_with_the_decisions_of_its_own_tick_is_not_entered(bench: LoopBench) -> None:
    assert bench.tick(SchedulerOutput("Publishing")) == ["Starting"]
    closing = SchedulerOutput("Checkpointing", decisions=(CloseIteration(),))
    assert bench.tick(closing, SchedulerOutput("Generating")) == ["Publishing"]
    assert bench.done == [CloseIteration()]
    assert bench.run.times.phase == "Generating"


def test_the_phase_in_which_an_iteration_closes_is_drawn_as_a_part_of_it(bench: LoopBench) -> None:
    bench.tick(SchedulerOutput("Checkpointing"))
    bench.run.times.phase_start = 7.0
    draw_last_phase(bench.run, 9.5, 10**12)
    drawn = bench.tracker.spans[-1]
    assert (drawn.name, drawn.iteration, drawn.worker) == ("Checkpointing", bench.run.state.iteration, "coordinator")
    assert (drawn.end_ns, drawn.end_ns - drawn.start_ns) == (10**12, 2_500_000_000)


def test_an_iteration_that_closes_draws_the_phase_from_its_beginning(tmp_path: Path) -> None:
    spans = SpansInMemory()
    run = begin_in_process(tmp_path, make_job(tmp_path, batch=4), spans)[0]
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    run.times.phase, run.times.phase_start = "Publishing", time.monotonic() - 100
    Actions(run, CheckpointSaver(run)).carry_out(CloseIteration(last=True))
    drawn = [span for span in spans.spans if span.name == "Publishing"]
    assert [(span.end_ns - span.start_ns) // 10**9 for span in drawn] == [100]


def test_a_phase_that_decisions_lead_to_is_entered_before_what_follows_from_it(bench: LoopBench) -> None:
    committing = SchedulerOutput("Training", decisions=(CommitTrained(),))
    publishing = SchedulerOutput("Publishing", decisions=(CloseIteration(),))
    assert bench.tick(committing, publishing, SchedulerOutput("Generating")) == ["Starting", "Publishing"]


def test_the_pool_is_recorded_when_it_forms_and_when_it_dissolves(bench: LoopBench) -> None:
    def with_pool(*pool: str) -> SchedulerOutput:
        return SchedulerOutput("Generating", Consolidation(possible=True, planned=True, pool=pool))

    bench.tick(with_pool())
    bench.tick(with_pool("generation-1"))
    bench.tick(with_pool("generation-0"))
    bench.tick(with_pool())
    assert [kind for kind in bench.tracker.events if kind.startswith("pool")] == ["pool-formed", "pool-dissolved"]
