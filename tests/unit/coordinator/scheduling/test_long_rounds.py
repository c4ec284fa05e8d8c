"""Long rounds: prompts that were cut off are trained on later with the same random keys, each once."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job

from rlhf_api.algorithms import prompt_schedule, samples_begun, samples_per_prompt
from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_api.algorithms.iteration_prompts import PromptSchedule, PromptSchedules
from rlhf_api.job import RLHFJob
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.staleness_metrics import round_metrics, waiting_prompts
from rlhf_coordinator.scheduling import oversampling
from rlhf_coordinator.scheduling.first_samples import first_samples
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Origin, PackedResponse
from rlhf_coordinator.storage.batch import apply_record
from rlhf_coordinator.storage.journal_pb2 import Begun, Cut, Record
from rlhf_coordinator.storage.prompts import Prompt, PromptSet, random_key
from rlhf_coordinator.storage.sample_codec import carried_messages

SIBLINGS = 2
SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 12))
"""Prompts of a batch, and surplus prompts."""


@given(SHAPES, st.integers(0, 80))
def test_the_kind_and_place_of_an_iteration_follow_from_its_number(shape: tuple[int, int], iteration: int) -> None:
    batch, extra = shape
    schedule = PromptSchedule(batch, extra, "Deferred")
    waiting = begun = 0
    queue: list[int] = []
    for number in range(iteration):
        assert schedule.waiting(number) == waiting
        assert schedule.first(number) == begun
        if schedule.is_long(number):
            assert schedule.size(number) == batch
            assert waiting >= batch, "a long round is full"
            waiting -= batch
            assert all(number - since <= schedule.longest_wait for since in queue[:batch])
            queue = queue[batch:]
        else:
            queue += [number] * extra
            assert schedule.size(number) == batch + extra
            waiting, begun = waiting + extra, begun + batch + extra
        assert schedule.end(number) == begun
        assert waiting < batch + extra
        long = sum(map(schedule.is_long, range(number + 1)))
        assert long == extra * (number + 1) // (batch + extra)


@pytest.mark.parametrize("surplus", ["Dropped", "Carried"])
def test_without_long_rounds_the_places_are_those_of_before(surplus: Any) -> None:
    schedule = PromptSchedule(3, 2, surplus)
    apart = 5 if surplus == "Dropped" else 3
    assert [schedule.first(number) for number in range(4)] == [number * apart for number in range(4)]
    assert [schedule.end(number) for number in range(4)] == [number * apart + 5 for number in range(4)]
    assert {schedule.size(number) for number in range(40)} == {5}
    assert not any(map(schedule.is_long, range(40)))
    assert schedule.waiting(40) == 0


def job(folder: Path, batch: int, extra: int) -> RLHFJob:
    size = batch * SIBLINGS
    rollout = {"batchSize": size, "oversample": extra, "cutBy": "Counts", "longRounds": "Enabled"}
    manifest = make_job(folder, algorithm="grpo").model_dump(by_alias=True, exclude_none=True, mode="json")
    manifest["spec"]["algorithm"] = {"grpo": {"groupSize": SIBLINGS, "miniBatchSize": size}}
    manifest["spec"]["training"]["microBatchSize"] = SIBLINGS
    manifest["spec"] |= {"rollout": rollout, "deterministic": True}
    return RLHFJob.model_validate(manifest)


class Rounds:
    """The iterations of a job, whose response lengths follow from random keys; each survives a restart."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        lines = [Prompt(line, b"", "", "") for line in range(1, 4001)]
        schedule = prompt_schedule(spec)
        self.prompts = PromptSet(lines, seed=5, shuffle=False, schedule=schedule, samples_per_prompt=SIBLINGS)
        self.trained: Counter[tuple[int, int]] = Counter()
        """(line of the prompt file, random key) -> how often it was trained on."""
        self.begun_tokens: dict[tuple[int, int], int] = {}
        self.trained_tokens = 0
        self.records: list[Record] = []
        self.ledger = self.begin(0, ())

    def key(self, sample: Any) -> tuple[int, int]:
        return self.prompts.prompt(*sample.origin).line, random_key(5, *sample.origin)

    def length(self, sample: Any) -> int:
        return 1 + int(random.Random(self.key(sample)[1]).paretovariate(1.2)) % 60

    def begin(self, iteration: int, cut: tuple[CarriedSample, ...]) -> Ledger:
        carried, waiting = first_samples(cut, iteration, self.spec, self.prompts.schedules)
        begun = Begun(iteration=iteration, carried=carried_messages(carried), waiting=carried_messages(waiting))
        self.records = [Record(begun=begun)]
        return self.restored(iteration)

    def restored(self, iteration: int) -> Ledger:
        """Return the ledger that the journal gives."""
        per_prompt = samples_per_prompt(self.spec)
        size = samples_begun(self.spec, self.prompts.schedules, iteration)
        spare = size - self.spec.rollout.batch_size
        ledger = Ledger(iteration, size, (SCORE_REWARD,), 1, group_size=per_prompt, spare=spare)
        for record in self.records:
            apply_record(ledger, Record.FromString(record.SerializeToString()))
        return ledger

    def run(self, rng: random.Random) -> None:
        """Run an iteration whose responses are finished in any order."""
        ledger = self.ledger
        for sample in ledger.samples:
            self.begun_tokens[self.key(sample)] = self.length(sample)
        order = list(ledger.samples)
        rng.shuffle(order)
        for sample in order:
            tokens = self.length(sample)
            whole = PackedResponse(bytes(4 * tokens), bytes(4 * tokens), (VersionSpan(ledger.iteration, tokens),))
            ledger.finish(sample.index, ledger.assign(sample.index, "w"), "w", whole, "stop", "")
        for decision in oversampling.decide(ledger, "Counts").cuts:
            self.records.append(Record(cut=Cut(groups=decision.groups)))
            ledger.cut(decision.groups)
        for sample in ledger.uncut_samples:
            self.trained[self.key(sample)] += 1
            self.trained_tokens += len(sample.response)
        if rng.random() < 0.3:  # a coordinator that starts again reads what waits from the journal
            again = self.restored(ledger.iteration)
            assert again.waiting == ledger.waiting
            assert [sample.without_response() for sample in again.carry_over()] == [
                sample.without_response() for sample in ledger.carry_over()
            ]
        self.ledger = self.begin(ledger.iteration + 1, ledger.carry_over())


@settings(max_examples=25, deadline=None)
@given(st.tuples(st.integers(1, 5), st.integers(1, 5)), st.randoms(use_true_random=False))
def test_a_period_trains_on_every_prompt_and_key_once(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int], rng: random.Random
) -> None:
    batch, extra = shape
    rounds = Rounds(job(tmp_path_factory.mktemp("job"), batch, extra).spec)
    period = batch + extra
    for iteration in range(2 * period):
        waiting = prompt_schedule(rounds.spec).waiting(iteration)
        assert len(rounds.ledger.carried) + len(rounds.ledger.waiting) == waiting * SIBLINGS
        rounds.run(rng)
        assert set(rounds.trained.values()) == {1}
        assert sum(rounds.trained.values()) == (iteration + 1) * batch * SIBLINGS
    assert not rounds.ledger.carry_over(), "nothing waits after a whole period"
    assert set(rounds.trained) == set(rounds.begun_tokens), "none is passed over"
    assert rounds.trained_tokens == sum(rounds.begun_tokens.values()), "trained over begun length is 1"
    assert {line for line, _ in rounds.trained} == set(range(1, 2 * period * batch + 1))


def test_a_long_round_takes_the_prompts_that_waited_longest_without_tokens(tmp_path: Path) -> None:
    rounds = Rounds(job(tmp_path, 2, 1).spec)
    rng = random.Random(1)
    deferred = []
    for _ in range(2):
        rounds.run(rng)
        deferred += [sample.origin for sample in (*rounds.ledger.carried, *rounds.ledger.waiting)[-SIBLINGS:]]
    ledger = rounds.ledger
    assert [sample.origin for sample in ledger.samples] == deferred
    assert all(len(sample.response) == 0 and not sample.carried for sample in ledger.samples)
    assert ledger.groups_to_cut == 0
    assert ledger.waiting == ()


def test_a_failed_sample_is_not_tried_again_in_the_long_round(tmp_path: Path) -> None:
    spec = job(tmp_path, 1, 1).spec
    failed = CarriedSample(Origin(0, 2), failed=True)
    other = CarriedSample(Origin(0, 3), PackedResponse(b"\1\0\0\0", b"\0\0\0\0"), "stop", "text")
    carried, waiting = first_samples((failed, other), 1, spec, PromptSchedules((prompt_schedule(spec),)))
    assert carried == (failed, CarriedSample(Origin(0, 3)))
    assert waiting == ()


def test_the_report_says_which_round_it_was_and_what_waits(tmp_path: Path) -> None:
    rounds = Rounds(job(tmp_path, 2, 1).spec)
    seen = []
    for _ in range(3):
        ledger = rounds.ledger
        rounds.run(random.Random(3))
        context, state = SimpleNamespace(spec=rounds.spec), SimpleNamespace(ledger=ledger)
        run = SimpleNamespace(context=context, state=state, prompts=rounds.prompts)
        seen.append(round_metrics(cast(JobRun, run)))
        assert waiting_prompts(ledger) == seen[-1]["prompts/waiting"]
    assert [line["rollout/long_round"] for line in seen] == [0, 0, 1]
    assert [line["prompts/waiting"] for line in seen] == [1, 2, 0]
