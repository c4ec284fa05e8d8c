"""The ledger under random deaths, duplicates, stale messages and coordinator restarts."""

import struct
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.coordinator.numbered_tokens import tokens_at

from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_REWARD, SampleField, Scope, Task
from rlhf_api.algorithms.roles import ModelRole
from rlhf_common.names import Group
from rlhf_common.samples import Lease
from rlhf_coordinator.scheduling import oversampling
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Sample, SampleState

TASKS = (SCORE_REFERENCE, SCORE_REWARD)
SIZE = 5
GROUP_SIZE = 2
COMPARE, RANK = (
    Task(name, Group.INFERENCE, ModelRole.REWARD, needs, (output,), Scope.GROUP)
    for name, needs, output in (
        ("compare", (SampleField.REWARD,), SampleField.VALUES),
        ("rank", (SampleField.TOKENS, SampleField.VALUES), SampleField.REFERENCE_LOG_PROBABILITIES),
    )
)
"""Tasks on whole groups; the names of their fields are placeholders."""
RETRIES = 1
WORKERS = ("a", "b", "c")
indices = st.integers(0, SIZE - 1)
workers = st.sampled_from(WORKERS)


def length(index: int) -> int:
    return 4 + index


class LedgerMachine(RuleBasedStateMachine):
    """Workers decode their leased samples and report them once, twice, late, or never."""

    tasks: ClassVar[tuple[Task, ...]] = TASKS
    spare: ClassVar[int] = 0
    """Number of samples to cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt = 1
        self.ledger = Ledger(3, SIZE, self.tasks, 1, group_size=GROUP_SIZE, spare=self.spare)
        self.said: list[tuple[object, ...]] = []
        """All messages of any worker, delivered at any time, any number of times."""
        self.holding: dict[tuple[str, int], int] = {}
        """(worker, sample) -> attempt of its lease, as the worker knows it."""
        self.journal: list[tuple[object, ...]] = []
        self.leases: set[tuple[int, int]] = set()
        self.transfers: list[tuple[int, Lease, Lease]] = []
        """(sample, source, destination) of Migrate commands without an answer of the source."""
        self.known = [0] * SIZE
        """Tokens of each sample that this coordinator knew before the last step."""

    def lease(self, index: int, attempt: int) -> None:
        assert (index, attempt) not in self.leases, "an attempt was used twice"
        self.leases.add((index, attempt))

    @rule(worker=workers, count=st.integers(1, 3))
    def assign(self, worker: str, count: int) -> None:
        for index in self.ledger.queued(count) or self.ledger.isolated()[:1]:
            attempt = self.ledger.assign(index, worker)
            self.lease(index, attempt)
            self.holding[worker, index] = attempt

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), portion=st.floats(0, 1))
    def decode(self, data: st.DataObject, portion: float) -> None:
        (worker, index), attempt = data.draw(st.sampled_from(sorted(self.holding.items())))
        end = int(portion * length(index))
        start = data.draw(st.integers(0, end))
        self.said.append(("progress", index, attempt, worker, start, tokens_at(index, start, end)))
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
        earlier = self.ledger.samples[index].response
        if kind == "progress":
            new = self.ledger.progress(index, attempt, worker, rest[3], rest[4])  # type: ignore[arg-type]
            assert len(self.ledger.samples[index].response) == len(earlier) + new
        elif kind == "finish":
            if self.ledger.finish(index, attempt, worker, tokens_at(index, 0, length(index)), "stop", "text"):
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
        elif kind == "group":
            self.hear_of_group(index, attempt, worker, rest[3], rest[4])  # type: ignore[arg-type]
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

    def hear_of_group(self, index: int, attempt: int, worker: str, task: str, values: bytes | None) -> None:
        taken, results = self.ledger.score_in_group(index, attempt, worker, task, values)
        assert taken or not results
        if results:
            assert not any(record[0] == "group" and record[1] == task and index in record[2] for record in self.journal)  # type: ignore[operator]
            self.journal.append(("group", task, results))

    @rule(index=indices)
    def migrate(self, index: int) -> None:
        if self.ledger.samples[index].state is SampleState.DECODING:
            worker, attempt = self.ledger.withdraw(index)
            assert self.ledger.withdrawn(index, attempt, worker, tokens_at(index, 0, 2))
            assert not self.ledger.withdrawn(index, attempt, worker, tokens_at(index, 0, 2)), "migration is idempotent"
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
        """The destination accepts the sample or not, and its receipt reaches the source or not."""
        index, source, arriving = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        still_leased = self.holding.get((source.worker, index)) == source.attempt
        tokens = tokens_at(index, 0, int(portion * length(index)))
        if still_leased and accepted:
            self.holding[arriving.worker, index] = arriving.attempt
        if still_leased and accepted and receipt:
            del self.holding[source.worker, index]
            self.said.append(("moved", index, source.attempt, source.worker, source, arriving, tokens))
        else:
            self.said.append(("stayed", index, source.attempt, source.worker, source))

    @rule(worker=workers)
    def fail(self, worker: str) -> None:
        """End a worker with a failure, which counts against all its samples, and all are returned."""
        leased, faults = self.ledger.held_by(worker), {s.index: s.faults for s in self.ledger.samples}
        self.ledger.record_failure(worker, "it broke", RETRIES)
        for sample in self.ledger.samples:
            before = faults[sample.index]
            assert sample.faults.count == before.count + (sample.index in leased)
            assert sample.faults == before or sample.faults.proven == (len(leased) == 1)

    @rule(index=indices, tokens=st.integers(0, 3))
    def fail_one(self, index: int, tokens: int) -> None:
        """A worker returns one sample with a failure, and reports it twice."""
        sample = self.ledger.samples[index]
        if sample.decoding is None:
            return
        worker, attempt = sample.decoding.worker, sample.decoding.attempt
        before = sample.faults.count
        assert self.ledger.failed_on(index, attempt, worker, tokens_at(index, 0, tokens), "it broke", RETRIES)
        assert not self.ledger.failed_on(index, attempt, worker, tokens_at(index, 0, tokens), "it broke", RETRIES)
        assert (sample.faults.count, sample.faults.proven) == (before + 1, True)
        self.holding.pop((worker, index), None)

    @rule()
    def give_up(self) -> None:
        """Leave out the failed samples, and check that no other can be left out."""
        for index in list(self.ledger.faulted):
            sample = self.ledger.samples[index]
            if sample.state is SampleState.QUEUED and sample.faults.is_final(RETRIES):
                assert sample.faults.count > RETRIES
                self.ledger.give_up(index)
                self.known[index] = 0
                self.journal.append(("failed", index))

    @rule(worker=workers, gives_back=st.booleans())
    def lose(self, worker: str, gives_back: bool) -> None:
        leased = {index: attempt for (owner, index), attempt in self.holding.items() if owner == worker}
        returned = {index: (attempt, tokens_at(index, 0, 3)) for index, attempt in leased.items()} if gives_back else {}
        before = self.ledger.decoding_on(worker)
        released = self.ledger.reclaim(worker, returned)
        assert len(released.queued) == before
        assert not self.ledger.decoding_on(worker)
        assert not self.ledger.arriving_on(worker)
        assert not self.ledger.scoring_on(worker)
        self.holding = {key: attempt for key, attempt in self.holding.items() if key[0] != worker}

    @rule()
    def restart(self) -> None:
        self.attempt += 1
        self.ledger = Ledger(3, SIZE, self.tasks, self.attempt, group_size=GROUP_SIZE, spare=self.spare)
        self.known = [0] * SIZE
        for kind, index, *rest in self.journal:
            if kind == "group":
                self.ledger.restore_group(index, rest[0])  # type: ignore[arg-type]
                continue
            if kind == "cut":
                self.ledger.cut(index)  # type: ignore[arg-type]
                continue
            assert isinstance(index, int)
            if kind == "failed":
                self.ledger.give_up(index)
            elif kind == "finished":
                self.ledger.restore_response(index, tokens_at(index, 0, length(index)), "stop", "text")
            else:
                self.ledger.restore_score(index, *rest)  # type: ignore[arg-type]

    @invariant()
    def every_sample_is_in_exactly_one_state(self) -> None:
        ledger = self.ledger
        assert sum(ledger.counts().values()) == SIZE
        queued = [*ledger.queued(SIZE + 1), *ledger.isolated()]
        assert len(queued) == len(set(queued))
        for sample in ledger.samples:
            decoding = sample.state in (SampleState.DECODING, SampleState.MIGRATING)
            assert (sample.index in queued) == (sample.state is SampleState.QUEUED)
            assert (sample.decoding is not None) == decoding
            assert sample.arriving is None or sample.state is SampleState.MIGRATING
            assert sample.arriving is None or sample.arriving != sample.decoding
            assert (sample.index in list(ledger.unscored())) == bool(sample.open_tasks)
            assert sample.index in ledger.faulted or not (sample.failed or sample.isolated or sample.faults.count)
            assert not sample.failed or not len(sample.response), "a failed sample has no response"
            if sample.state is SampleState.CUT:
                assert {*sample.open_tasks, *sample.scoring, *sample.group_tasks} == set()
                continue
            done = sample.state in (SampleState.SCORED, SampleState.TRAINED)
            open_tasks = set(sample.open_tasks) | set(sample.scoring) | sample.group_tasks
            assert done == (sample.finish_reason != "" and not open_tasks)
        assert sum(map(ledger.arriving_on, WORKERS)) == sum(s.arriving is not None for s in ledger.samples)
        assert sum(map(ledger.decoding_on, WORKERS)) == ledger.count(SampleState.DECODING, SampleState.MIGRATING)

    @invariant()
    def tokens_are_never_invented_or_lost(self) -> None:
        for sample in self.ledger.samples:
            assert sample.response == tokens_at(sample.index, 0, len(sample.response))
            assert len(sample.response) >= self.known[sample.index], "tokens shrank"
            self.known[sample.index] = len(sample.response)
        assert self.ledger.tokens == sum(len(sample.response) for sample in self.ledger.samples)

    @invariant()
    def the_journal_says_what_the_ledger_says(self) -> None:
        for sample in self.ledger.uncut_samples:
            generated = sample.state not in (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)
            assert (("failed", sample.index) in self.journal) == sample.failed
            assert (("finished", sample.index) in self.journal) == (generated and not sample.failed)
            if sample.state is SampleState.SCORED:
                rewards = {record[3] for record in self.journal if record[:3] == ("scored", sample.index, "reward")}
                assert rewards == ({None} if sample.abstained else {sample.fields["reward"]})

    @invariant()
    def training_needs_every_score(self) -> None:
        if self.ledger.all_scored:
            assert all(not sample.open_tasks for sample in self.ledger.samples)
        else:
            with pytest.raises(ValueError, match="cannot be trained"):
                self.ledger.train()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class OversampledLedgerMachine(LedgerMachine):
    """One prompt more than the batch is started, and cut off when another is finished."""

    spare: ClassVar = GROUP_SIZE

    @precondition(lambda self: bool(oversampling.decide(self.ledger, "Clock").cuts))
    @rule()
    def cut(self) -> None:
        (decision,) = oversampling.decide(self.ledger, "Clock").cuts
        before = {sample.index: (sample.decoding, sample.arriving) for sample in self.ledger.samples}
        released = self.ledger.cut(decision.groups)
        cut = {sample.index for sample in self.ledger.samples} - {sample.index for sample in self.ledger.uncut_samples}
        assert len(cut) == self.spare
        assert released == [(index, lease) for index in sorted(cut) for lease in before[index] if lease is not None]
        assert not oversampling.decide(self.ledger, "Clock").cuts
        with pytest.raises(ValueError, match="the batch needs it"):
            self.ledger.cut([0])
        self.journal.append(("cut", decision.groups))

    @invariant()
    def a_batch_is_complete_without_what_was_cut_off_and_not_before(self) -> None:
        if self.ledger.all_scored:
            assert len(self.ledger.uncut_samples) == SIZE - self.spare
            assert all(sample.state in (SampleState.SCORED, SampleState.FAILED) for sample in self.ledger.uncut_samples)


TestOversampledLedgerMachine = OversampledLedgerMachine.TestCase
TestOversampledLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class GroupLedgerMachine(LedgerMachine):
    """Some tasks judge all responses to a prompt together; one of them needs another's result."""

    tasks: ClassVar = (SCORE_REWARD, COMPARE, RANK)

    @precondition(lambda self: self.ledger.open_groups())
    @rule(data=st.data(), worker=workers, fails=st.booleans())
    def score_group(self, data: st.DataObject, worker: str, fails: bool) -> None:
        group, task = data.draw(st.sampled_from(sorted(self.ledger.open_groups())))
        attempts = self.ledger.assign_group(group, task, worker)
        assert list(attempts) == [sample.index for sample in self.ledger.members(group)], "a lease is a whole group"
        for index, attempt in attempts.items():
            self.lease(index, attempt)
            kind = "fail" if fails and index == min(attempts) else "group"
            self.said.append((kind, index, attempt, worker, task, struct.pack("<f", index)))

    @invariant()
    def a_group_is_open_leased_or_done_as_a_whole(self) -> None:
        ledger = self.ledger
        assert sorted(ledger.open_groups()) == sorted(set(ledger.open_groups()))
        for group in range(-(-SIZE // GROUP_SIZE)):
            members = ledger.members(group)
            for task in (COMPARE, RANK):
                done = [task.produces[0] in sample.fields for sample in members]
                assert len(set(done)) <= 1, "results of a group are taken together"
                holders = {sample.scoring[task.name].worker for sample in members if task.name in sample.scoring}
                leased = [task.name in sample.scoring for sample in members]
                assert len(set(leased)) <= 1
                assert len(holders) <= 1, "one worker has all of it"
                ready = bool(members) and all(self.has_needs(sample, task) for sample in members)
                waits = ready and not any(done) and not any(leased)
                assert ((group, task.name) in ledger.open_groups()) == waits

    @staticmethod
    def has_needs(sample: Sample, task: Task) -> bool:
        """An abstained reward is a result too."""
        others = {"reward"} if task is COMPARE else {COMPARE.name}
        return sample.finish_reason != "" and not others & {*sample.open_tasks, *sample.scoring, *sample.group_tasks}


TestGroupLedgerMachine = GroupLedgerMachine.TestCase
TestGroupLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
