"""A sorted window is the same after any restart of the coordinator, and after the loss of its run folder."""

import itertools
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.workers.checkpoint_folders import part, source

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey, VersionSpan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.next_samples import expected_lengths
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.recovery import resume_iteration
from rlhf_coordinator.scheduling import oversampling
from rlhf_coordinator.state.sample import PackedResponse, Sample
from rlhf_coordinator.storage import carried_file, checkpoint
from rlhf_coordinator.storage.batch import apply_record
from rlhf_coordinator.storage.journal_pb2 import Closed, Cut, Record, Trained
from rlhf_coordinator.storage.prompts import random_key
from rlhf_coordinator.storage.sample_codec import key_message, packed, span_messages
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

SIBLINGS, PROMPTS, WINDOW, ITERATIONS = 4, 3, 3, 11
"""The prompt file has eleven prompts, a window nine; the last window has two iterations."""
Trained_ = tuple[int, int]
"""(line of the prompt file, random key) of a trained sample."""


class Job:
    """A coordinator whose samples end at once with a length that follows from their random key."""

    def __init__(self, folder: Path, *, window: int = WINDOW, oversample: int = 0) -> None:
        self.folder = folder
        size = SIBLINGS * PROMPTS
        self.job = make_job(
            folder,
            algorithm="grpo",
            iterations=ITERATIONS,
            batch=size,
            deterministic=True,
            prompts={"path": str(folder / "prompts.jsonl"), "lengthWindow": window},
            rollout={"batchSize": size, "oversample": oversample, "cutBy": "Counts" if oversample else "Clock"},
        )
        self.trained: list[list[Trained_]] = []
        self.start()

    def start(self) -> None:
        """Start a coordinator process in the run folder."""
        self.run, restored = begin_in_process(self.folder, self.job)
        self.actions = Actions(self.run, CheckpointSaver(self.run))
        resume_iteration(self.run, restored, self.actions)

    def sample(self, sample: Sample) -> Trained_:
        return self.run.prompts.prompt(*sample.origin).line, random_key(self.job.spec.seed, *sample.origin)

    def write(self, record: Record) -> None:
        self.run.journal.append(record)
        apply_record(self.run.state.ledger, record)

    def decode(self, indices: range) -> None:
        ledger = self.run.state.ledger
        for index in indices:
            line, key = self.sample(ledger.samples[index])
            tokens = 1 + (7 * line) % 30 + key % 5
            response = PackedResponse(bytes(4 * tokens), bytes(4 * tokens), (VersionSpan(ledger.iteration, tokens),))
            message = pb.FinishedSample(
                key=key_message(SampleKey(ledger.iteration, index, 0)),
                tokens=packed("int32", response.tokens),
                log_probabilities=packed("float32", response.log_probabilities),
                versions=span_messages(response.versions),
                finish_reason="stop",
            )
            self.write(Record(finished=message))

    def close(self) -> None:
        """Cut, score, train on and close the iteration."""
        ledger = self.run.state.ledger
        for decision in oversampling.decide(ledger, "Counts").cuts:
            self.write(Record(cut=Cut(groups=decision.groups)))
        for sample in ledger.uncut_samples:
            for task in self.run.context.tasks:
                size = len(sample.response) if task.name != "reward" else 1
                key = pb.SampleKey(iteration=ledger.iteration, sample=sample.index)
                self.write(
                    Record(scored=pb.ScoredSample(key=key, task=task.name, result=packed("float32", bytes(4 * size))))
                )
        self.trained.append([self.sample(sample) for sample in ledger.uncut_samples])
        ledger.train()
        self.write(Record(trained=Trained(result=pb.TrainResult(iteration=ledger.iteration))))
        self.write(Record(closed=Closed(metrics={}, rewards=[0.5])))

    def save(self) -> None:
        """Write a checkpoint of the next version as the saver does, and forget the journal."""
        ledger, version = self.run.state.ledger, self.run.state.ledger.iteration + 1
        temporary = checkpoint.prepare(self.folder / "checkpoints", version)
        files = [part(temporary, "actor/model-stage-00000.safetensors", b"weights", "actor", ("p",))]
        carried = [sample.without_response() for sample in ledger.carry_over()]
        carried_file.write(temporary, version, carried, (), expected_lengths(self.run, version))
        facts = {carried_file.FACT: self.run.journal.job()["identity"]}
        results = [pb.CheckpointResult(files=files)]
        checkpoint.finish(temporary, self.folder / "checkpoints", version, results, source(self.folder), facts)
        shutil.rmtree(self.folder / "run" / "journal")


def undisturbed(folder: Path, oversample: int = 0, window: int = WINDOW) -> list[list[Trained_]]:
    """Return what each iteration of a job trains on."""
    running = Job(folder, oversample=oversample, window=window)
    for iteration in range(ITERATIONS):
        running.decode(range(len(running.run.state.ledger.samples)))
        running.close()
        if iteration < ITERATIONS - 1:
            running.actions.begin_iteration(iteration + 1, running.run.state.ledger.carry_over())
    return running.trained


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([0, 1]), st.randoms(use_true_random=False))
def test_kills_and_lost_folders_change_no_batch(
    tmp_path_factory: pytest.TempPathFactory, oversample: int, rng: random.Random
) -> None:
    expected = undisturbed(tmp_path_factory.mktemp("undisturbed"), oversample)
    running = Job(tmp_path_factory.mktemp("disturbed"), oversample=oversample)
    for iteration in range(ITERATIONS):
        size = len(running.run.state.ledger.samples)
        middle = rng.randint(0, size)
        running.decode(range(middle))
        if rng.random() < 0.4:
            running.start()
            assert sum(not sample.unfinished for sample in running.run.state.ledger.samples) == middle
        running.decode(range(middle, size))
        running.close()
        if iteration == ITERATIONS - 1:
            break
        after = rng.choice(("continue", "restart", "lose the folder"))
        if after == "lose the folder":
            running.save()
        if after == "continue":
            running.actions.begin_iteration(iteration + 1, running.run.state.ledger.carry_over())
        else:
            running.start()
    assert running.trained == expected


def test_each_window_trains_on_its_prompts_and_keys_once_and_is_sorted_later(tmp_path: Path) -> None:
    plain, windows = undisturbed(tmp_path / "plain", window=0), undisturbed(tmp_path / "windows")
    for first in range(0, ITERATIONS, WINDOW):
        part = slice(first, first + WINDOW)
        assert sorted(itertools.chain(*windows[part])) == sorted(itertools.chain(*plain[part])), (
            "the same prompts with the same keys"
        )
    assert windows[:WINDOW] == plain[:WINDOW], "no length is known yet"
    assert windows[WINDOW:] != plain[WINDOW:]
    assert all(len(batch) == SIBLINGS * PROMPTS for batch in windows)


def test_the_first_record_of_a_window_has_its_whole_order_and_the_lengths_behind_it(tmp_path: Path) -> None:
    running = Job(tmp_path)
    for iteration in range(WINDOW + 1):
        running.decode(range(len(running.run.state.ledger.samples)))
        running.close()
        running.actions.begin_iteration(iteration + 1, running.run.state.ledger.carry_over())
    first, second = (running.run.journal.read(iteration)[0].begun for iteration in (WINDOW, WINDOW + 1))
    size = SIBLINGS * PROMPTS
    assert (len(first.carried), len(first.waiting)) == (size, 2 * size)
    assert list(second.carried) == list(first.waiting)[:size]
    assert list(second.waiting) == list(first.waiting)[size:]
    assert len(first.lengths.lines) == WINDOW * PROMPTS
    assert not any(sample.response.tokens.data for sample in first.carried)


def test_a_journal_is_not_continued_with_another_window(tmp_path: Path) -> None:
    Job(tmp_path)
    with pytest.raises(JobError, match=r"lengthWindow = 3, now it is 2"):
        Job(tmp_path, window=2)


def test_another_window_at_a_resume_leaves_the_rest_out_and_says_so(tmp_path: Path) -> None:
    running = Job(tmp_path)
    for iteration in range(WINDOW + 1):
        running.decode(range(len(running.run.state.ledger.samples)))
        running.close()
        if iteration < WINDOW:
            running.actions.begin_iteration(iteration + 1, running.run.state.ledger.carry_over())
    running.save()
    other = Job(tmp_path, window=2)
    assert other.run.state.ledger.iteration == WINDOW + 1
    assert other.run.state.expected_lengths, "the prompts are the same, so their lengths stay known"
