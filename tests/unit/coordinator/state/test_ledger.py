"""The ledger under random deaths, duplicates, stale messages and coordinator restarts."""

import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_REWARD
from rlhf_api.samples import Lease, VersionSpan
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState, first_tokens, join_spans

TASKS = (
    SCORE_REFERENCE,
    SCORE_REWARD,
)
SIZE = 5
WORKERS = ("a", "b", "c")
indices = st.integers(0, SIZE - 1)
workers = st.sampled_from(WORKERS)


def truth(index: int, start: int, end: int) -> PackedResponse:
    """Tokens of a sample are a function of the sample and the position."""
    numbers = [index * 100 + position for position in range(start, end)]
    packed = struct.pack(f"<{len(numbers)}i", *numbers)
    return PackedResponse(packed, packed, (VersionSpan(3, len(numbers)),) if numbers else ())


def length(index: int) -> int:
    return 4 + index


class LedgerMachine(RuleBasedStateMachine):
    """Workers decode what they were given and say so, once, twice, late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt = 1
        self.ledger = Ledger(3, SIZE, TASKS, 1)
        self.said: list[tuple[object, ...]] = []
        """Everything any worker ever said; delivered at any time, any number of times."""
        self.holding: dict[tuple[str, int], int] = {}
        """(worker, sample) -> attempt of its lease, as the worker sees it."""
        self.journal: list[tuple[object, ...]] = []
        self.leases: set[tuple[int, int]] = set()
        self.transfers: list[tuple[int, Lease, Lease]] = []
        """(sample, source, destination) of Migrate commands that no source has answered."""
        self.known = [0] * SIZE
        """Tokens this coordinator knew of each sample before the last step."""

    def lease(self, index: int, attempt: int) -> None:
        assert (index, attempt) not in self.leases, "an attempt was used twice"
        self.leases.add((index, attempt))

    @rule(worker=workers, count=st.integers(1, 3))
    def assign(self, worker: str, count: int) -> None:
        for index in self.ledger.queued(count):
            attempt = self.ledger.assign(index, worker)
            self.lease(index, attempt)
            self.holding[worker, index] = attempt

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), portion=st.floats(0, 1))
    def decode(self, data: st.DataObject, portion: float) -> None:
        (worker, index), attempt = data.draw(st.sampled_from(sorted(self.holding.items())))
        end = int(portion * length(index))
        start = data.draw(st.integers(0, end))
        self.said.append(("progress", index, attempt, worker, start, truth(index, start, end)))
        if end == length(index):
            self.said.append(("finish", index, attempt, worker))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        kind, *rest = data.draw(st.sampled_from(self.said[-12:]))
        index, attempt, worker = rest[:3]
        assert isinstance(index, int)
        assert isinstance(attempt, int)
        assert isinstance(worker, str)
        known = self.ledger.samples[index].response
        if kind == "progress":
            new = self.ledger.progress(index, attempt, worker, rest[3], rest[4])  # type: ignore[arg-type]
            assert len(self.ledger.samples[index].response) == len(known) + new
        elif kind == "finish":
            if self.ledger.finish(index, attempt, worker, truth(index, 0, length(index)), "stop", "text"):
                assert ("finished", index) not in self.journal, "finished twice"
                self.journal.append(("finished", index))
        elif kind == "moved":
            self.ledger.moved(index, rest[3], rest[4], rest[5])  # type: ignore[arg-type]
        elif kind == "stayed":
            self.ledger.stayed(index, rest[3])  # type: ignore[arg-type]
        elif kind == "score":
            task, values = rest[3], rest[4]
            if self.ledger.score(index, attempt, worker, task, values):  # type: ignore[arg-type]
                assert not any(record[:3] == ("scored", index, task) for record in self.journal), "scored twice"
                self.journal.append(("scored", index, task, values))
        else:
            before = self.ledger.retried
            tries = self.ledger.fail_score(index, attempt, worker, rest[3], 0.0)  # type: ignore[arg-type]
            assert (self.ledger.retried > before) == (tries > 0)

    @rule(worker=workers, index=indices, abstains=st.booleans(), fails=st.booleans())
    def score(self, worker: str, index: int, abstains: bool, fails: bool) -> None:
        sample = self.ledger.samples[index]
        if sample.state is not SampleState.GENERATED or not sample.open_tasks:
            return
        tasks = sorted(sample.open_tasks)
        attempt = self.ledger.assign_scores(index, tasks, worker)
        self.lease(index, attempt)
        for task in tasks:
            value = None if abstains and task == "reward" else struct.pack("<f", index)
            self.said.append(("fail" if fails else "score", index, attempt, worker, task, value))

    @rule(index=indices)
    def migrate(self, index: int) -> None:
        if self.ledger.samples[index].state is SampleState.DECODING:
            worker, attempt = self.ledger.withdraw(index)
            assert self.ledger.withdrawn(index, attempt, worker, truth(index, 0, 2))
            assert not self.ledger.withdrawn(index, attempt, worker, truth(index, 0, 2)), "migration is idempotent"
            self.holding.pop((worker, index), None)

    @rule(index=indices, destination=workers)
    def migrate_with_cache(self, index: int, destination: str) -> None:
        sample = self.ledger.samples[index]
        if sample.state is not SampleState.DECODING:
            return
        if sample.decoding is not None and sample.decoding.worker == destination:
            with pytest.raises(ValueError, match="decoded on"):
                self.ledger.migrate(index, destination)
            return
        source, arriving = self.ledger.migrate(index, destination)
        self.lease(index, arriving.attempt)
        self.transfers.append((index, source, arriving))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), receipt=st.booleans(), accepted=st.booleans(), portion=st.floats(0, 1))
    def answer_migration(self, data: st.DataObject, receipt: bool, accepted: bool, portion: float) -> None:
        """The destination takes the sample or not, and its receipt reaches the source or not."""
        index, source, arriving = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        held = self.holding.get((source.worker, index)) == source.attempt
        tokens = truth(index, 0, int(portion * length(index)))
        if held and accepted:
            self.holding[arriving.worker, index] = arriving.attempt
        if held and accepted and receipt:
            del self.holding[source.worker, index]
            self.said.append(("moved", index, source.attempt, source.worker, source, arriving, tokens))
        else:
            self.said.append(("stayed", index, source.attempt, source.worker, source))

    @rule(worker=workers, gives_back=st.booleans())
    def lose(self, worker: str, gives_back: bool) -> None:
        held = {index: attempt for (owner, index), attempt in self.holding.items() if owner == worker}
        given = {index: (attempt, truth(index, 0, 3)) for index, attempt in held.items()} if gives_back else {}
        before = self.ledger.decoding_on(worker)
        released = self.ledger.reclaim(worker, given)
        assert len(released.queued) == before
        assert not self.ledger.decoding_on(worker)
        assert not self.ledger.arriving_on(worker)
        assert not self.ledger.scoring_on(worker)
        self.holding = {key: attempt for key, attempt in self.holding.items() if key[0] != worker}

    @rule()
    def restart(self) -> None:
        self.attempt += 1
        self.ledger = Ledger(3, SIZE, TASKS, self.attempt)
        self.known = [0] * SIZE
        for kind, index, *rest in self.journal:
            assert isinstance(index, int)
            if kind == "finished":
                self.ledger.restore_response(index, truth(index, 0, length(index)), "stop", "text")
            else:
                self.ledger.restore_score(index, *rest)  # type: ignore[arg-type]

    @invariant()
    def every_sample_is_in_exactly_one_state(self) -> None:
        ledger = self.ledger
        assert sum(ledger.counts().values()) == SIZE
        queued = ledger.queued(SIZE + 1)
        assert len(queued) == len(set(queued))
        for sample in ledger.samples:
            decoding = sample.state in (SampleState.DECODING, SampleState.MIGRATING)
            assert (sample.index in queued) == (sample.state is SampleState.QUEUED)
            assert (sample.decoding is not None) == decoding
            assert sample.arriving is None or sample.state is SampleState.MIGRATING
            assert sample.arriving is None or sample.arriving != sample.decoding
            assert (sample.index in list(ledger.unscored())) == bool(sample.open_tasks)
            done = sample.state in (SampleState.SCORED, SampleState.TRAINED)
            open_tasks = set(sample.open_tasks) | set(sample.scoring)
            assert done == (sample.finish_reason != "" and not open_tasks)
        assert sum(map(ledger.arriving_on, WORKERS)) == sum(s.arriving is not None for s in ledger.samples)
        assert sum(map(ledger.decoding_on, WORKERS)) == ledger.count(SampleState.DECODING, SampleState.MIGRATING)

    @invariant()
    def tokens_are_never_invented_or_lost(self) -> None:
        for sample in self.ledger.samples:
            assert sample.response == truth(sample.index, 0, len(sample.response))
            assert len(sample.response) >= self.known[sample.index], "tokens shrank"
            self.known[sample.index] = len(sample.response)
        assert self.ledger.tokens == sum(len(sample.response) for sample in self.ledger.samples)

    @invariant()
    def the_journal_says_what_the_ledger_says(self) -> None:
        for sample in self.ledger.samples:
            generated = sample.state not in (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)
            assert (("finished", sample.index) in self.journal) == generated
            if sample.state is SampleState.SCORED:
                given = {record[3] for record in self.journal if record[:3] == ("scored", sample.index, "reward")}
                assert given == ({None} if sample.abstained else {sample.fields["reward"]})

    @invariant()
    def training_needs_every_score(self) -> None:
        if self.ledger.all_scored:
            assert all(not sample.open_tasks for sample in self.ledger.samples)
        else:
            with pytest.raises(ValueError, match="cannot be trained"):
                self.ledger.train()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_batch_is_trained_once() -> None:
    ledger = Ledger(0, 1, (), 1)
    ledger.finish(0, ledger.assign(0, "a"), "a", truth(0, 0, 2), "stop", "")
    ledger.train()
    assert ledger.counts()["trained"] == 1
    with pytest.raises(ValueError, match="cannot be trained"):
        ledger.train()


def migrating(ledger: Ledger) -> tuple[Lease, Lease]:
    """Sample 0 on its way from a to b, three tokens known."""
    attempt = ledger.assign(0, "a")
    ledger.progress(0, attempt, "a", 0, truth(0, 0, 3))
    return ledger.migrate(0, "b")


def test_a_migrating_sample_is_its_sources_until_the_destination_has_it() -> None:
    ledger = Ledger(0, 1, TASKS, 1)
    source, arriving = migrating(ledger)
    assert ledger.progress(0, source.attempt, "a", 3, truth(0, 3, 4)) == 1, "it is decoded on while its cache travels"
    assert (ledger.decoding_on("a"), ledger.decoding_on("b"), ledger.arriving_on("b")) == (1, 0, 1)
    assert ledger.progress(0, arriving.attempt, "b", 4, truth(0, 4, 4)) == 0
    assert (ledger.decoding_on("a"), ledger.decoding_on("b"), ledger.arriving_on("b")) == (0, 1, 0)
    assert ledger.progress(0, source.attempt, "a", 0, truth(0, 0, 4)) == 0, "the source has it no more"
    assert ledger.moved(0, source, arriving, truth(0, 0, 4)), "and says so, later"
    assert (ledger.migrated, ledger.returned, ledger.counts()["decoding"]) == (1, 0, 1)


def test_a_sample_that_could_not_be_moved_goes_on_and_what_the_destination_says_is_stale() -> None:
    ledger = Ledger(0, 1, TASKS, 1)
    source, arriving = migrating(ledger)
    assert ledger.stayed(0, source)
    assert ledger.samples[0].immovable
    assert not ledger.finish(0, arriving.attempt, "b", truth(0, 0, 4), "stop", "")
    assert ledger.finish(0, source.attempt, "a", truth(0, 0, 4), "stop", "")
    assert not ledger.stayed(0, source)


def test_a_sample_survives_the_loss_of_either_side_of_its_migration() -> None:
    ledger = Ledger(0, 1, TASKS, 1)
    source, arriving = migrating(ledger)
    ledger.reclaim("b")
    assert ledger.counts()["migrating"] == 1, "the source has it until it says otherwise"
    assert ledger.moved(0, source, arriving, truth(0, 0, 4))
    assert (ledger.queued(1), len(ledger.samples[0].response)) == ([0], 4)
    source, arriving = migrating(ledger)
    assert ledger.reclaim("a").queued == (0,)
    assert not ledger.finish(0, arriving.attempt, "b", truth(0, 0, 4), "stop", ""), "given back means given back"
    assert not ledger.moved(0, source, arriving, truth(0, 0, 4))
    assert ledger.queued(1) == [0]


def test_samples_with_most_tokens_are_handed_out_first() -> None:
    ledger = Ledger(0, 3, TASKS, 1)
    attempt = ledger.assign(2, "a")
    ledger.progress(2, attempt, "a", 0, truth(2, 0, 3))
    ledger.reclaim("a")
    assert ledger.queued(9) == [2, 0, 1]


def test_tokens_a_worker_kept_survive_a_coordinator_restart() -> None:
    old = Ledger(0, 2, TASKS, 1)
    attempt = old.assign(1, "a")
    new = Ledger(0, 2, TASKS, 2)
    new.reclaim("a", {1: (attempt, truth(1, 0, 4))})
    assert new.samples[1].response == truth(1, 0, 4)
    # But not once this coordinator has handed the sample out itself.
    new.reclaim("b", {0: (new.assign(0, "b"), truth(0, 0, 1))})
    new.reclaim("a", {0: (old.samples[0].attempt + 1, truth(0, 0, 4))})
    assert new.samples[0].response == truth(0, 0, 1)


def test_spans_of_versions_are_cut_and_joined() -> None:
    spans = VersionSpan(1, 3), VersionSpan(2, 4)
    first = first_tokens(spans, 5)
    assert first == (VersionSpan(1, 3), VersionSpan(2, 2))
    more = VersionSpan(2, 1), VersionSpan(3, 1)
    assert join_spans(first, more) == (VersionSpan(1, 3), VersionSpan(2, 3), VersionSpan(3, 1))
