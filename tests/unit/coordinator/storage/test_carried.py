"""Carried samples survive a coordinator restart, a replay and a new run folder unchanged."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job, make_prompts
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.workers.checkpoint_folders import part, source

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_common.samples import SampleKey, VersionSpan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.staleness_metrics import staleness_metrics
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.loop.leases import generation_message
from rlhf_coordinator.loop.recovery import resume_iteration
from rlhf_coordinator.loop.sample_sets import BatchSamples
from rlhf_coordinator.scheduling.decisions import CutGroups
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.service.batches import Batches
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.state.sample import PackedResponse, Sample
from rlhf_coordinator.storage import carried_file, checkpoint
from rlhf_coordinator.storage.batch import apply_record, batch_parts
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_pb2 import Closed, Record, Trained
from rlhf_coordinator.storage.restore import Restored, restore
from rlhf_coordinator.storage.sample_codec import key_message, packed, span_messages
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

WORKER = "generation-0"
BATCH, MORE = 3, 2
KEPT, CUT = (0, 2, 4), (1, 3)


def job(folder: Path, **rollout: Any) -> Any:
    sizes = {"batchSize": BATCH, "oversample": MORE, "maxStaleness": 1, "maxResponseTokens": 48}
    return make_job(folder, batch=BATCH, deterministic=False, rollout=sizes | rollout)


class Process:
    """A coordinator that continues from the run folder, and its workers' messages."""

    def __init__(self, folder: Path, **rollout: Any) -> None:
        self.run, restored = begin_in_process(folder, job(folder, **rollout))
        saver = CheckpointSaver(self.run)
        self.actions, self.handlers = Actions(self.run, saver), EventHandlers(self.run, saver)
        resume_iteration(self.run, restored, self.actions)

    def decode(self, index: int, tokens: int, *, ends: bool) -> None:
        """Continue to decode a sample, and report it."""
        ledger = self.run.state.ledger
        earlier, attempt = ledger.samples[index].response, ledger.assign(index, WORKER)
        key = key_message(SampleKey(ledger.iteration, index, attempt))
        values, numbers = bytes([100 + index, ledger.iteration, 0, 0]) * tokens, bytes([tokens, 0, 0, 0]) * tokens
        more = PackedResponse(values, numbers, (VersionSpan(ledger.iteration, tokens),))
        if not ends:
            message = pb.SampleProgress(key=key, offset=len(earlier), **arrays(more))
            self.handlers.message(WORKER, pb.WorkerMessage(progress=message))
            return
        whole = arrays(earlier.with_tokens(len(earlier), more))
        done = pb.FinishedSample(key=key, finish_reason="stop", text=f"t{index}", **whole)
        self.handlers.message(WORKER, pb.WorkerMessage(finished=done))

    def cut(self) -> None:
        """Cut two of the prompts."""
        self.actions.carry_out(CutGroups(CUT))

    def end(self) -> None:
        """Score, train on and close everything left; the next iteration has not started."""
        ledger = self.run.state.ledger
        for sample in ledger.uncut_samples:
            for task in self.run.context.tasks:
                size = len(sample.response) if task.name != "reward" else 1
                score = packed("float32", bytes([sample.index, 0, 0, 0]) * size)
                key = pb.SampleKey(iteration=ledger.iteration, sample=sample.index)
                self.write(Record(scored=pb.ScoredSample(key=key, task=task.name, result=score)))
        ledger.train()
        self.write(Record(trained=Trained(result=pb.TrainResult(iteration=ledger.iteration))))
        self.write(Record(closed=Closed(metrics={}, rewards=[0.5])))

    def write(self, record: Record) -> None:
        self.run.journal.append(record)
        apply_record(self.run.state.ledger, record)


def arrays(response: PackedResponse) -> dict[str, Any]:
    return {
        "tokens": packed("int32", response.tokens),
        "log_probabilities": packed("float32", response.log_probabilities),
        "versions": span_messages(response.versions),
    }


def known_of(run: JobRun) -> list[tuple[object, ...]]:
    def fields_of(sample: Sample) -> tuple[object, ...]:
        state = "queued" if sample.unfinished else sample.state.value
        return (
            sample.index,
            sample.origin,
            state,
            sample.response,
            sample.carried,
            sample.finish_reason,
            sample.text,
            sample.fields,
        )

    return [fields_of(sample) for sample in run.state.ledger.samples]


def first_iteration(folder: Path, **rollout: Any) -> Process:
    """Finish three prompts; of the two that are cut off one is unfinished, one not started."""
    process = Process(folder, **rollout)
    for index in KEPT:
        process.decode(index, 2, ends=True)
    process.decode(1, 5, ends=False)
    return process


def test_a_coordinator_that_comes_back_carries_the_same(tmp_path: Path) -> None:
    live = first_iteration(tmp_path)
    live.cut()
    after_cut = known_of(Process(tmp_path).run)
    assert after_cut == known_of(live.run)
    live.run.journal.resume(0)
    live.end()
    handed_on = live.run.state.ledger.carry_over()
    assert [(sample.origin, len(sample.response)) for sample in handed_on] == [((0, 1), 5), ((0, 3), 0)]
    back = Process(tmp_path)
    assert back.run.state.iteration == 1
    assert back.run.state.ledger.carried == handed_on
    again = Process(tmp_path)
    assert (again.run.coordinator_epoch, known_of(again.run)) == (4, known_of(back.run))
    assert [back.run.state.prompt_lines[place] for place in (0, 1)] == [
        back.run.prompts.prompt(0, 1).line,
        back.run.prompts.prompt(0, 3).line,
    ]


def test_a_carried_sample_goes_on_with_its_tokens_key_and_prompt_and_is_trained_on_with_both_versions(
    tmp_path: Path,
) -> None:
    first = first_iteration(tmp_path)
    first.cut()
    first.end()
    process = Process(tmp_path)
    run, ledger = process.run, process.run.state.ledger
    mine = generation_message(run, BatchSamples(run), 0, WORKER)
    original = make_prompts(run.context.job).prompt(0, 1)
    assert (mine.key.iteration, mine.key.sample) == (1, 0)
    assert (mine.prompt.data, mine.tokens.data) == (original.tokens, ledger.samples[0].carried.tokens)
    assert [(span.version, span.tokens) for span in mine.versions] == [(0, 5)]
    ledger.reclaim(WORKER)
    for index in (0, 1, 4):
        process.decode(index, 3, ends=True)
    process.decode(3, 1, ends=False)
    process.actions.carry_out(CutGroups((2, 3)))
    process.end()
    batch = [sample for stored in batch_parts(ledger, run.prompts) for sample in stored.samples]
    assert [[(span.version, span.tokens) for span in sample.versions] for sample in batch] == [
        [(0, 5), (1, 3)],
        [(1, 3)],
        [(1, 3)],
    ]
    assert batch[0].prompt.data == original.tokens
    fields = dict(batch[0].fields)
    assert fields["log_probabilities"].data == bytes([5, 0, 0, 0]) * 5 + bytes([3, 0, 0, 0]) * 3, "each by who drew it"
    assert staleness_metrics(run) == {
        "samples/carried": 2, "samples/restarted": 0, "tokens_carried": 5,
        "staleness/mean": pytest.approx(5 / 14), "staleness/max": 1,
    }  # fmt: skip
    live = [stored.SerializeToString() for stored in batch_parts(ledger, run.prompts)]
    later = Process(tmp_path)
    assert later.run.state.iteration == 2
    replay = [stored.SerializeToString() for stored in Batches(later.run).parts(1)]
    assert replay == live, "a training group that starts again trains on the same bytes"
    assert [(sample.origin, sample.restarted) for sample in later.run.state.ledger.carried] == [
        ((1, 2), False),
        ((1, 3), False),
    ]


def test_a_worker_that_goes_on_from_other_tokens_ends_its_session(tmp_path: Path) -> None:
    first = first_iteration(tmp_path)
    first.cut()
    first.end()
    process = Process(tmp_path)
    attempt = process.run.state.ledger.assign(0, WORKER)
    key = key_message(SampleKey(1, 0, attempt))
    nothing = PackedResponse(bytes(24), bytes(24), (VersionSpan(1, 6),))
    anew = pb.FinishedSample(key=key, finish_reason="stop", **arrays(nothing))
    with pytest.raises(ValueError, match="weight versions"):
        process.handlers.message(WORKER, pb.WorkerMessage(finished=anew))


def test_with_staleness_0_the_journal_and_the_prompts_are_those_of_before(tmp_path: Path) -> None:
    process = first_iteration(tmp_path, maxStaleness=0)
    process.cut()
    process.end()
    cut = next(record.cut for record in process.run.journal.read(0) if record.HasField("cut"))
    assert (list(cut.groups), len(cut.known)) == (list(CUT), 0)
    after = Process(tmp_path, maxStaleness=0)
    assert not after.run.journal.read(1)[0].begun.carried
    assert staleness_metrics(after.run) == {}
    count = BATCH + MORE
    positions = [after.run.prompts._entry(1, group) for group in range(count)]
    plain = make_prompts(make_job(tmp_path, batch=count))
    assert positions == [plain._entry(1, group) for group in range(count)]


def test_a_journal_is_not_gone_on_with_under_another_staleness(tmp_path: Path) -> None:
    first_iteration(tmp_path)
    with pytest.raises(JobError, match=r"maxStaleness = 1, now it is 2") as error:
        Process(tmp_path, maxStaleness=2)
    assert error.value.failure.exit_code == ExitCode.USAGE


def saved(folder: Path, **rollout: Any) -> Process:
    """Run an iteration with a checkpoint of its result."""
    process = first_iteration(folder, **rollout)
    process.cut()
    process.end()
    path = folder / "checkpoints"
    temporary = checkpoint.prepare(path, 1)
    files = [part(temporary, "actor/model-stage-00000.safetensors", b"weights", "actor", ("p",))]
    carried_file.write(temporary, 1, process.run.state.ledger.carry_over())
    facts = {carried_file.FACT: process.run.journal.job()["identity"]}
    checkpoint.finish(temporary, path, 1, [pb.CheckpointResult(files=files)], source(folder), facts)
    return process


def resumed(folder: Path, digest: str = "prompts", **rollout: Any) -> Restored:
    """Continue from the checkpoint in a new run folder."""
    of_job = job(folder, **rollout)
    context = job_context(of_job, schedule_json(of_job.spec))
    return restore(context, Journal(folder / "new"), make_prompts(of_job), digest, 7, resume=True)


def test_a_new_run_folder_goes_on_with_what_its_checkpoint_carries(tmp_path: Path) -> None:
    process = saved(tmp_path)
    for _ in range(2):  # the first process dies before it begins the iteration
        restored = resumed(tmp_path)
        assert (restored.ledger.iteration, restored.warnings) == (1, [])
        assert restored.handed_on == process.run.state.ledger.carry_over()


@pytest.mark.parametrize(
    ("digest", "rollout", "named"),
    [
        ("others", {}, "spec.prompts"),
        ("prompts", {"oversample": 3}, "spec.rollout.oversample"),
        ("prompts", {"maxStaleness": 0}, "spec.rollout.maxStaleness"),
    ],
)
def test_what_would_get_another_prompt_is_left_out_and_said(
    tmp_path: Path, digest: str, rollout: dict[str, int], named: str
) -> None:
    saved(tmp_path)
    restored = resumed(tmp_path, digest, **rollout)
    assert restored.handed_on == ()
    (warning,) = restored.warnings
    assert warning.startswith("2 samples that ")
    assert named in warning


def test_another_bound_of_staleness_takes_them_all_the_same(tmp_path: Path) -> None:
    process = saved(tmp_path)
    assert resumed(tmp_path, maxStaleness=3).handed_on == process.run.state.ledger.carry_over()


def test_a_checkpoint_whose_carried_samples_are_damaged_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "checkpoints" / "iteration-000001" / carried_file.FILE
    path.write_bytes(path.read_bytes()[:-1])
    restored = resumed(tmp_path)
    assert restored.ledger.iteration == 0
    assert carried_file.FILE in restored.warnings[0]


@pytest.mark.parametrize("read", ["samples", "schedules", "facts"])
def test_a_carried_file_that_cannot_be_read_is_named(tmp_path: Path, read: str) -> None:
    """Its error once ended the coordinator without a failure of the job."""
    process = saved(tmp_path)
    whole = checkpoint.Checkpoint(1, tmp_path / "checkpoints" / "iteration-000001")
    file = whole.folder / ("checkpoint.json" if read == "facts" else carried_file.FILE)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # a file whose read fails, as on a broken disk
    schedules = partial(carried_file.read_schedules, whole, process.run.context.spec)
    read_file: Callable[[], object] = schedules if read == "schedules" else partial(carried_file.read, whole, {})
    with pytest.raises(JobError, match=r"cannot be read at .*: Input/output error") as error:
        read_file()
    assert (error.value.failure.field, error.value.failure.exit_code) == ("spec.checkpoints.path", ExitCode.STORAGE)


def test_a_checkpoint_without_the_prompts_that_wait_for_a_long_round_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(JobError, match=r"has 0 of the 2 prompts that wait for a long round") as error:
        resumed(tmp_path, maxStaleness=0, longRounds="Enabled")
    assert error.value.failure.field == "spec.rollout.longRounds"
    assert error.value.failure.exit_code == ExitCode.USAGE


def test_a_new_run_folder_takes_up_the_prompts_that_wait_without_tokens(tmp_path: Path) -> None:
    rounds: dict[str, Any] = {"maxStaleness": 0, "longRounds": "Enabled"}
    process = saved(tmp_path, **rounds)
    restored = resumed(tmp_path, **rounds)
    assert (restored.ledger.iteration, restored.warnings) == (1, [])
    cut = process.run.state.ledger.carry_over()
    assert [sample.origin for sample in restored.handed_on] == [sample.origin for sample in cut] == [(0, 1), (0, 3)]
    back = Process(tmp_path, **rounds)
    assert back.run.state.ledger.carried == ()
    assert back.run.state.ledger.waiting == tuple(sample.without_response() for sample in cut)
    again = Process(tmp_path, **rounds)
    assert again.run.state.ledger.waiting == back.run.state.ledger.waiting, "the journal has them"


def test_an_older_checkpoint_does_not_name_long_rounds_and_is_taken_all_the_same(tmp_path: Path) -> None:
    process = saved(tmp_path)
    facts_file = tmp_path / "checkpoints" / "iteration-000001" / "checkpoint.json"
    facts = json.loads(facts_file.read_text())
    del facts[carried_file.FACT]["spec.rollout.longRounds"]
    facts_file.write_text(json.dumps(facts))
    assert resumed(tmp_path).handed_on == process.run.state.ledger.carry_over()
