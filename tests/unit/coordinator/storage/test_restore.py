"""Where a recovered coordinator continues, and what it rejects."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job, make_prompts
from tests.support.workers.checkpoint_folders import make_checkpoint

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import JobContext, job_context
from rlhf_coordinator.storage.journal import Journal, frame
from rlhf_coordinator.storage.journal_pb2 import Begun, Closed, Record, Trained
from rlhf_coordinator.storage.restore import Restored, restore
from rlhf_coordinator.storage.sample_codec import packed, span_messages


def context(tmp_path: Path, **spec: Any) -> JobContext:
    job = make_job(tmp_path, batch=8, **{"iterations": 9, **spec})
    return job_context(job, schedule_json(job.spec))


def begin(tmp_path: Path, digest: str = "d", *, resume: bool = False, **spec: Any) -> Restored:
    of_job = context(tmp_path, **spec)
    return restore(of_job, Journal(tmp_path / "journal"), make_prompts(of_job.job), digest, 7, resume=resume)


def segment(tmp_path: Path, iteration: int, *, upto: str) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin(Begun(iteration=iteration, coordinator_epoch=1, time_ns=5))
    for index in range(8 if upto != "half" else 3):
        key = pb.SampleKey(iteration=iteration, sample=index, attempt=1)
        array = packed("int32", bytes(4))
        finished = pb.FinishedSample(
            key=key,
            tokens=array,
            log_probabilities=packed("float32", bytes(4)),
            versions=span_messages([VersionSpan(iteration, 1)]),
        )
        journal.append(Record(finished=finished))
        for task in ("reference", "values", "reward"):
            journal.append(Record(scored=pb.ScoredSample(key=key, task=task, result=packed("float32", bytes(4)))))
    if upto in ("trained", "closed"):
        journal.append(Record(trained=Trained(result=pb.TrainResult(iteration=iteration, metrics={"actor/loss": 2.0}))))
    if upto == "closed":
        journal.append(Record(closed=Closed(metrics={"reward": 0.5}, rewards=[0.5] * (iteration + 1))))


def test_a_fresh_job_begins_at_zero_and_its_epoch_rises_with_every_start(tmp_path: Path) -> None:
    first = begin(tmp_path)
    assert (first.coordinator_epoch, first.ledger.iteration, first.begun_ns, first.started_ns) == (1, 0, None, 7)
    assert begin(tmp_path).coordinator_epoch == 2


def test_an_iteration_goes_on_where_it_was(tmp_path: Path) -> None:
    begin(tmp_path)
    segment(tmp_path, 0, upto="closed")
    segment(tmp_path, 1, upto="half")
    state = begin(tmp_path)
    assert state.ledger.iteration == 1
    assert (state.ledger.counts()["scored"], state.ledger.counts()["queued"]) == (3, 5)
    assert state.rewards == [0.5]
    segment(tmp_path, 1, upto="trained")
    state = begin(tmp_path)
    assert state.trained
    assert state.training_metrics == {"actor/loss": 2.0}
    segment(tmp_path, 1, upto="closed")
    state = begin(tmp_path)
    assert (state.ledger.iteration, state.begun_ns) == (2, None)
    assert state.last_closed == (1, {"reward": 0.5})
    assert state.rewards == [0.5, 0.5]


def test_another_number_of_iterations_is_kept_with_the_iteration_since_which_it_holds(tmp_path: Path) -> None:
    """The current iteration may have been trained with the old number, and would be trained with it again."""
    assert begin(tmp_path).iteration_totals.since == ((0, 9),)
    segment(tmp_path, 0, upto="closed")
    segment(tmp_path, 1, upto="half")
    assert begin(tmp_path, iterations=20).iteration_totals.since == ((0, 9), (2, 20))
    lengths = begin(tmp_path, iterations=20).iteration_totals
    assert [lengths.iterations_at(iteration) for iteration in (0, 1, 2, 19)] == [9, 9, 20, 20]


def test_the_training_group_starts_from_the_newest_checkpoint_the_journal_reaches(tmp_path: Path) -> None:
    begin(tmp_path)
    for iteration in (0, 1, 2):
        segment(tmp_path, iteration, upto="closed")
    make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 8)
    state = begin(tmp_path)
    assert (state.checkpoint.newest, Path(state.checkpoint.folder).name) == (2, "iteration-000002")
    Journal(tmp_path / "journal").prune(2)
    assert begin(tmp_path).checkpoint.newest == 2
    (tmp_path / "checkpoints" / "iteration-000002" / "checkpoint.json").unlink()
    with pytest.raises(JobError, match="the journal lacks iterations \\[0, 1\\]"):
        begin(tmp_path)


def test_old_checkpoints_are_resumed_only_when_asked(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4)
    with pytest.raises(JobError, match="already holds checkpoints") as error:
        begin(tmp_path)
    message = error.value.failure.message
    assert error.value.failure.exit_code == ExitCode.USAGE
    assert "iteration-000004" in message
    assert "--resume" in message
    assert "spec.checkpoints.path" in message
    state = begin(tmp_path, resume=True)
    assert (state.ledger.iteration, state.checkpoint.newest, state.begun_ns) == (4, 4, None)
    assert begin(tmp_path).ledger.iteration == 4, "the journal remembers where it began"


def test_resuming_passes_over_a_damaged_checkpoint_and_says_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4)
    (make_checkpoint(tmp_path, 6).folder / "optimizer" / "stage-0.safetensors").write_bytes(b"")
    state = begin(tmp_path, resume=True)
    assert state.ledger.iteration == 4
    assert "iteration-000006 is passed over: optimizer/stage-0.safetensors has 0 bytes, not 7" in state.warnings[0]


def test_another_job_or_other_prompts_never_continue_a_journal(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(JobError, match=r"spec.prompts \(settings and contents\)") as error:
        begin(tmp_path, "other")
    assert error.value.failure.exit_code == ExitCode.USAGE
    with pytest.raises(JobError, match=r"spec.seed = 5, now it is 6; use a new run folder"):
        begin(tmp_path, seed=6)
    # More iterations are no other job.
    assert begin(tmp_path, training={"parallelism": {"pipeline": 1}, "microBatchSize": 4}).coordinator_epoch == 2


def test_the_journals_of_the_versions_before_and_after_are_continued(tmp_path: Path) -> None:
    begin(tmp_path)
    segment(tmp_path, 0, upto="half")
    journal = Journal(tmp_path / "journal")
    facts = journal.job()
    del facts["identity"]["spec.seed"]  # the version before did not write it down
    facts["identity"]["spec.next"] = facts["next"] = 1  # the next one writes this down
    journal.write_job(facts)
    with journal.path(0).open("ab") as file:
        file.write(frame(Record.FromString(b"\x9a\x06\x01x")))  # field 99: a kind of record that the next version has
    again = begin(tmp_path)
    assert again.ledger.counts()["scored"] == 3
    assert journal.job()["next"] == 1, "what the next version wrote is there when it comes back"
