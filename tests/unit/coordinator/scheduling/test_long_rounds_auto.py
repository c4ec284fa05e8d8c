"""Long rounds in mode Auto: with any choices, kills and resumes, each prompt and random key is trained on once."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.workers.checkpoint_folders import part, source

from rlhf_api.algorithms.iteration_prompts import (
    MAX_PERIOD,
    PromptSchedule,
    PromptSchedules,
    most_surplus,
    possible_surpluses,
)
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey, VersionSpan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.fusion import long_rounds_choice
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.recovery import resume_iteration
from rlhf_coordinator.scheduling import oversampling
from rlhf_coordinator.state.sample import Sample
from rlhf_coordinator.storage import carried_file, checkpoint
from rlhf_coordinator.storage.batch import apply_record
from rlhf_coordinator.storage.journal_pb2 import Closed, Cut, Record, Trained
from rlhf_coordinator.storage.prompts import random_key
from rlhf_coordinator.storage.sample_codec import key_message, packed, schedule_messages, span_messages
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver
from rlhf_planner.inter_stage.long_rounds import RoundsChoice

BATCH, SIBLINGS = 3, 2
ITERATIONS = 12


def job(folder: Path) -> RLHFJob:
    size = BATCH * SIBLINGS
    plain = make_job(folder, algorithm="grpo", iterations=ITERATIONS, deterministic=False)
    manifest = plain.model_dump(by_alias=True, exclude_none=True, mode="json")
    spec = manifest["spec"]
    spec["algorithm"] = {"grpo": {"groupSize": SIBLINGS, "miniBatchSize": size}}
    spec["training"]["microBatchSize"] = SIBLINGS
    spec["fusion"]["interStage"] = {"mode": "Auto"}
    spec["rollout"] = {"batchSize": size, "longRounds": "Auto", "maxResponseTokens": 60}
    return RLHFJob.model_validate(manifest)


class JobLife:
    """A job whose coordinator may die between any two steps, and may resume from a checkpoint in a new run folder."""

    def __init__(self, folder: Path, rng: random.Random, died: Callable[[], bool]) -> None:
        self.folder, self.rng, self.died = folder, rng, died
        self.trained: Counter[tuple[int, int]] = Counter()
        """(place of the prompt in the job's order, random key) -> how often it was trained on."""
        self.schedules: dict[int, PromptSchedules] = {}
        """Iteration -> the schedules with which it began."""
        self.start()

    def start(self) -> None:
        self.run, restored = begin_in_process(self.folder, job(self.folder))
        self.actions = Actions(self.run, CheckpointSaver(self.run))
        resume_iteration(self.run, restored, self.actions)
        ledger = self.run.state.ledger
        schedules = self.run.prompts.schedules
        assert self.schedules.setdefault(ledger.iteration, schedules).all == schedules.all, "a restart chooses nothing"

    def may_die(self) -> None:
        if self.died():
            self.run.journal.close()
            self.start()

    def place(self, sample: Sample) -> tuple[int, int]:
        iteration, number = sample.origin
        first = self.run.prompts.schedules.at(iteration).first(iteration)
        return first + number // SIBLINGS, random_key(5, iteration, number)

    def iterate(self, choice: int | None) -> None:
        """Finish the iteration, with a choice for the next one, and begin that."""
        self.finish_and_cut()
        self.may_die()
        ledger = self.run.state.ledger
        self.end()
        self.trained.update(self.place(sample) for sample in ledger.uncut_samples)
        if self.died():
            self.run.journal.close()
            if self.rng.random() < 0.5:
                self.lose_the_run_folder()
            self.start()  # begins the next iteration
        else:
            self.choose(choice)
            self.actions.begin_iteration(ledger.iteration + 1, ledger.carry_over())
            self.schedules[ledger.iteration + 1] = self.run.prompts.schedules
        self.may_die()

    def choose(self, extra: int | None) -> None:
        if extra is not None:
            self.run.state.long_rounds.choice = RoundsChoice(extra, (), "drawn")

    def finish_and_cut(self) -> None:
        """Finish all samples in any order, and cut by counts."""
        self.finish(len(self.run.state.ledger.samples) // 2)
        self.may_die()
        self.finish(len(self.run.state.ledger.samples))
        for decision in oversampling.decide(self.run.state.ledger, "Counts").cuts:
            self.write(Record(cut=Cut(groups=decision.groups)))

    def finish(self, most: int) -> None:
        """Finish up to so many samples; their lengths follow from their keys."""
        ledger = self.run.state.ledger
        left = [sample for sample in ledger.samples if sample.unfinished]
        self.rng.shuffle(left)
        for sample in left[:most]:
            tokens = 1 + self.place(sample)[1] % 59
            key = key_message(SampleKey(ledger.iteration, sample.index, 1))
            spans = span_messages([VersionSpan(ledger.iteration, tokens)])
            values, numbers = packed("int32", bytes(4 * tokens)), packed("float32", bytes(4 * tokens))
            done = pb.FinishedSample(
                key=key, finish_reason="stop", tokens=values, log_probabilities=numbers, versions=spans
            )
            self.write(Record(finished=done))

    def end(self) -> None:
        """Score, train on and close everything left; the next iteration has not started."""
        ledger = self.run.state.ledger
        for sample in ledger.uncut_samples:
            for task in self.run.context.tasks:
                size = len(sample.response) if task.name != "reward" else 1
                key = pb.SampleKey(iteration=ledger.iteration, sample=sample.index)
                score = pb.ScoredSample(key=key, task=task.name, result=packed("float32", bytes(4 * size)))
                self.write(Record(scored=score))
        ledger.train()
        self.write(Record(trained=Trained(result=pb.TrainResult(iteration=ledger.iteration))))
        self.write(Record(closed=Closed(metrics={}, rewards=[0.5])))

    def lose_the_run_folder(self) -> None:
        """Write a checkpoint of the version that the iteration made, and lose all other files."""
        ledger, path = self.run.state.ledger, self.folder / "checkpoints"
        version = ledger.iteration + 1
        temporary = checkpoint.prepare(path, version)
        files = [part(temporary, "actor/model-stage-00000.safetensors", b"weights", "actor", ("p",))]
        waiting = [sample.without_response() for sample in ledger.carry_over()]
        schedules = schedule_messages(self.run.prompts.schedules, self.run.context.spec)
        carried_file.write(temporary, version, waiting, schedules)
        facts = {carried_file.FACT: self.run.journal.job()["identity"]}
        checkpoint.finish(temporary, path, version, [pb.CheckpointResult(files=files)], source(self.folder), facts)
        shutil.rmtree(self.folder / "run")

    def write(self, record: Record) -> None:
        self.run.journal.append(record)
        apply_record(self.run.state.ledger, record)


CHOICES = st.lists(st.none() | st.integers(0, BATCH), min_size=ITERATIONS - 1, max_size=ITERATIONS - 1)
"""For each next iteration, a surplus that was chosen, or no new choice."""


def live(folder: Path, choices: list[int | None], rng: random.Random) -> None:
    """Run a whole job; assert what it trains on."""
    life = JobLife(folder, rng, lambda: rng.random() < 0.2)
    for iteration, choice in enumerate(choices):
        schedule = life.run.prompts.schedules.at(iteration)
        ledger = life.run.state.ledger
        waiting = len(ledger.carried) + len(ledger.waiting)
        assert (ledger.iteration, waiting) == (iteration, schedule.waiting(iteration) * SIBLINGS)
        life.iterate(choice)
        assert set(life.trained.values()) == {1}
        assert sum(life.trained.values()) == (iteration + 1) * BATCH * SIBLINGS
    life.finish_and_cut()
    life.end()
    life.trained.update(life.place(sample) for sample in life.run.state.ledger.uncut_samples)
    assert not life.run.state.ledger.carry_over(), "no prompt waits when the job ends"
    places = Counter(place for place, _ in life.trained)
    assert places == dict.fromkeys(range(ITERATIONS * BATCH), SIBLINGS), "none is passed over"
    assert set(life.trained.values()) == {1}


@pytest.mark.parametrize("seed", range(2))
def test_with_choices_kills_and_resumes_every_prompt_and_key_is_trained_on_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    live(tmp_path, [rng.choice((None, *range(BATCH + 1))) for _ in range(ITERATIONS - 1)], rng)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(CHOICES, st.randoms(use_true_random=False))
def test_with_any_choices_kills_and_resumes_every_prompt_and_key_is_trained_on_once(
    tmp_path_factory: pytest.TempPathFactory, choices: list[int | None], rng: random.Random
) -> None:
    live(tmp_path_factory.mktemp("job"), choices, rng)


def test_a_choice_takes_effect_when_no_prompt_waits_and_its_period_fits(tmp_path: Path) -> None:
    life = JobLife(tmp_path, random.Random(0), lambda: False)
    extras = []
    for choice in (1, 3, None, None, 0, 3, None, 1, None, None, None):
        life.iterate(choice)
        now = life.run.prompts.schedules.at(life.run.state.iteration)
        extras.append(now.extra)
    # Periods of 4, 2 and 1 iterations: the choice 3 waits for the end of the first, and the last 1 does not fit.
    assert extras == [1, 1, 1, 1, 0, 3, 3, 1, 1, 1, 1]


def test_the_first_record_has_the_schedules_before_anything_follows_from_them(tmp_path: Path) -> None:
    life = JobLife(tmp_path, random.Random(0), lambda: False)
    life.iterate(1)
    begun = life.run.journal.read(1)[0].begun
    assert [(schedule.begins, schedule.extra) for schedule in begun.schedules] == [(0, 0), (1, 1)]
    assert life.run.state.long_rounds.reason == "drawn"
    life.start()
    assert life.run.state.long_rounds.reason == "drawn", "a restart still explains the schedule"


def test_a_checkpoint_whose_waiting_prompts_would_be_others_is_refused(tmp_path: Path) -> None:
    life = JobLife(tmp_path, random.Random(0), lambda: False)
    life.iterate(1)
    life.finish_and_cut()
    life.end()
    life.lose_the_run_folder()
    with pytest.raises(JobError, match=r"has 0 of the 1 prompts that wait for a long round") as error:
        begin_in_process(tmp_path, job(tmp_path), prompts_sha256="others")
    assert error.value.failure.field == "spec.rollout.longRounds"


def test_lengths_are_learned_by_whole_periods_and_again_after_a_restart(tmp_path: Path) -> None:
    life = JobLife(tmp_path, random.Random(0), lambda: False)
    for choice in (1, None, None, None, None):
        life.finish_and_cut()
        for _ in range(2):
            long_rounds_choice.iteration_scored(life.run)
        life.end()
        ledger = life.run.state.ledger
        life.choose(choice)
        life.actions.begin_iteration(ledger.iteration + 1, ledger.carry_over())
    learned = life.run.state.long_rounds
    assert learned.periods == 2
    assert [len(batch.responses) for batch in learned.lengths.window] == [6, 24]
    life.start()
    again = life.run.state.long_rounds
    assert [sorted(batch.responses) for batch in again.lengths.window] == [
        sorted(batch.responses) for batch in learned.lengths.window
    ]
    assert again.lengths.by_prompt.share == learned.lengths.by_prompt.share


@given(st.integers(1, 600), st.integers(0, 60))
def test_possible_surpluses_have_short_periods(batch: int, iterations: int) -> None:
    found = possible_surpluses(batch, iterations)
    assert list(found) == sorted(set(found))
    for extra in found:
        assert 1 <= extra <= most_surplus(batch)
        assert PromptSchedule(batch, extra, "Deferred").period <= min(MAX_PERIOD, iterations)


@pytest.mark.parametrize(("batch", "expected"), [(64, (4, 8, 16, 32)), (4, (1, 2)), (24, (1, 3, 6, 12)), (97, ())])
def test_surpluses_are_shares_of_a_batch(batch: int, expected: tuple[int, ...]) -> None:
    assert possible_surpluses(batch, 100) == expected


def test_a_schedule_cannot_change_while_prompts_wait() -> None:
    schedules = PromptSchedules((PromptSchedule(4, 2, "Deferred"),))
    with pytest.raises(ValueError, match="2 prompts wait when iteration 1 begins"):
        schedules.changed(1, 1)
    later = schedules.changed(3, 1)
    assert (later.at(2), later.at(3)) == (schedules.all[0], PromptSchedule(4, 1, "Deferred", 3))
    assert later.at(3).first(3) == 12
