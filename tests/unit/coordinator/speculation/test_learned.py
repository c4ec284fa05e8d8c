"""Learned statistics of drafts reach new workers, survive the coordinator, and are reported with numbers."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.coordinator.job_states import NOW, ready_state

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.speculation_metrics import speculation_metrics
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration
from rlhf_coordinator.service.status import job_status
from rlhf_coordinator.speculation import learned
from rlhf_coordinator.speculation.learned import SAY_SECONDS
from rlhf_coordinator.storage.journal_pb2 import Begun
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver


def begin(folder: Path, **speculation: Any) -> JobRun:
    run, _ = begin_in_process(folder, make_job(folder, generation={"replicas": 2, "speculation": speculation}))
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    return run


def showed(drafted: int, accepted: int, *, drafted_steps: int = 100, probes: int = 0, **more: Any) -> pb.Observation:
    count = pb.DraftCount(drafter="Ngram", match=2, position=0, drafted=drafted, judged=drafted, accepted=accepted)
    mean_step = pb.StepMean(steps=100, samples=4, slots=2, keys=400, seconds=0.01)
    message = pb.SpeculationObservation(
        steps=100,
        drafted_steps=drafted_steps,
        probes=probes,
        samples=400,
        tokens=400 + accepted,
        seconds=1.0,
        regret_seconds=0.01,
        learned=pb.LearnedDrafts(counts=[count], steps=[mean_step]),
        **more,
    )
    return pb.Observation(end_ns=1, speculation=message)


def test_a_worker_that_starts_is_given_what_others_learned_by_a_coordinator_that_starts_too(tmp_path: Path) -> None:
    run = begin(tmp_path)
    learned.observe(run, showed(40, 30))
    learned.iteration_ended(run, NOW)
    run, _ = begin_in_process(tmp_path, run.context.job)
    assert not run.state.speculation.learned
    learned.restore_learned_drafts(run)
    state = ready_state(run.context, absent=("generation-1",))
    state.speculation = run.state.speculation
    worker = pb.Register(worker="generation-1", group="generation", index=1, incarnation="x", address="a:1")
    state.fleet.register(worker, 77, NOW)
    commands = [
        item for item in iteration.decide(run.context, state, NOW).decisions if isinstance(item, d.PrepareWorker)
    ]
    [received] = [item.command.become_generation.learned for item in commands if item.worker == "generation-1"]
    [count] = received.counts
    assert (count.drafter, count.match, count.judged, count.accepted) == ("Ngram", 2, 20, 15), "weighed half since"
    assert received.steps[0].seconds == pytest.approx(0.01)


def test_figures_of_an_iteration_are_metrics_and_words(tmp_path: Path) -> None:
    run = begin(tmp_path)
    learned.observe(run, showed(200, 150))
    metrics = speculation_metrics(run)
    assert metrics["speculation/drafted"] == 200
    assert metrics["speculation/acceptance"] == metrics["speculation/acceptance_ngram"] == 0.75
    assert metrics["speculation/tokens_per_step"] == pytest.approx(550 / 400)
    assert "speculation/acceptance_siblings" not in metrics, "of nothing there is no share"
    status = job_status(run).speculation
    assert status.summary == (
        "Auto: 1.38 tokens per step, drafts in 100% of the steps; 75% of 200 drafted tokens were accepted "
        "(Ngram 75% of 200)"
    )
    disabled = begin(tmp_path / "disabled", mode="Disabled")
    assert speculation_metrics(disabled) == {}
    assert job_status(disabled).speculation.summary == "Disabled"


def test_an_event_says_that_drafting_was_switched_and_not_in_every_iteration(tmp_path: Path) -> None:
    run = begin(tmp_path)

    def after(now: float, observation: pb.Observation) -> list[str]:
        learned.observe(run, observation)
        learned.iteration_ended(run, now)
        run.state.speculation.begin_iteration()
        return run.state.speculation.switches

    off = showed(40, 2, drafted_steps=4, probes=4)
    assert after(NOW, off) == [], "it never was on"
    assert after(NOW + SAY_SECONDS / 2, showed(200, 150)) == [], "too soon"
    [text] = after(NOW + SAY_SECONDS, showed(200, 150))
    assert "speculation is on: 1.38 tokens per step" in text
    assert len(after(NOW + 1.5 * SAY_SECONDS, off)) == 1
    newest, _ = after(NOW + 2 * SAY_SECONDS, off)
    assert "speculation is off, because plain steps are faster: 5% of 40 drafted tokens were accepted" in newest
    assert job_status(run).speculation.summary.startswith("Auto, off: plain steps are faster; 5% of 40")


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafter": "Model"},
        {"position": 8},
        {"accepted": 3.0},
        {"judged": 9.0},
        {"match": 999},
        {"drafted": float("nan")},
        {"accepted": -1.0},
    ],
)
def test_a_message_that_no_worker_can_mean_counts_for_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    run = begin(tmp_path)
    fields: dict[str, Any] = {"drafter": "Ngram", "drafted": 2.0, "judged": 2.0, "accepted": 1.0}
    count = pb.DraftCount(**{**fields, **wrong})
    message = pb.SpeculationObservation(steps=1, samples=1, tokens=1, learned=pb.LearnedDrafts(counts=[count]))
    observation = pb.Observation(end_ns=1, speculation=message)
    handlers = EventHandlers(run, CheckpointSaver(run))
    with pytest.raises(ValueError, match=r"draft|observation"):
        handlers.message("generation-0", pb.WorkerMessage(observation=observation))
    assert not run.state.speculation.learned
    assert run.state.speculation.iteration.steps == 0
