"""Sibling tokens for drafting arrive at most once and in order, or count as dropped; none is left over.

Uses the coordinator's own scheduler and actions. The test reads the sessions' messages as a worker does, without
sockets.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sessions import WorkerStream
from rlhf_coordinator.scheduling import sibling_sharing
from rlhf_coordinator.scheduling.decisions import Generate, ShareSiblings
from rlhf_coordinator.speculation import sharing
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.earlier_responses import MAX_RESPONSES, EarlierResponse, EarlierResponses
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Origin, PackedResponse, SampleState
from rlhf_coordinator.state.sibling_state import EARLIER_WEIGHT
from rlhf_coordinator.storage.journal_pb2 import Begun, Record

BATCH, GROUP = 8, 4
WORKERS = ("generation-0", "generation-1", "generation-2")

Source = tuple[int, int, int]
"""(prompt group, iteration, sample)."""


class Listener:
    """A worker that learns sibling tokens: its received tokens, combined as its drafters do."""

    def __init__(self, run: JobRun, name: str) -> None:
        self._run, self.name = run, name
        self.received = 0
        self.open_session()

    def open_session(self) -> None:
        """Open a session without known tokens."""
        run, number = self._run, self._run.sessions.number()
        worker = run.state.fleet.workers[self.name]
        state = pb.WorkerState(roles=[pb.WORKER_ROLE_GENERATION], versions={"actor": 0})
        register = pb.Register(worker=self.name, group="generation", index=worker.index, incarnation="1", state=state)
        run.state.fleet.register(register, number, 0.0)
        run.state.fleet.beat(self.name, pb.Heartbeat(learns_siblings=True), 0.0)
        sharing.worker_lost(run, self.name)
        self.stream: WorkerStream = run.sessions.open(self.name, number)
        self.has: dict[Source, list[int]] = {}

    def listen(self) -> None:
        """Receive all messages; a gap after the last token fails the test."""
        while not self.stream.outgoing.empty():
            message = self.stream.outgoing.get_nowait()
            assert message is not None
            assert message.siblings.iteration == self._run.state.iteration
            for delta in message.siblings.deltas:
                tokens = unpack(delta.tokens).tolist()
                assert tokens
                known_tokens = self.has.setdefault((delta.group, delta.iteration, delta.sample), [])
                if delta.offset > len(known_tokens):  # it decoded that itself
                    assert self.name in self._run.state.ledger.samples[delta.sample].decoded_by
                    known_tokens += tokens_of(self._run, delta.sample)[len(known_tokens) : delta.offset]
                assert delta.offset == len(known_tokens), "what it has does not come again"
                known_tokens += tokens
                self.received += len(tokens)
            for group in message.siblings.forgotten:
                self.has = {source: tokens for source, tokens in self.has.items() if source[0] != group}


def begin(folder: Path, **speculation: Any) -> tuple[JobRun, dict[str, Listener]]:
    generation = {"replicas": len(WORKERS), "maxBatchSize": BATCH, "speculation": speculation}
    job = make_job(folder, batch=BATCH, algorithm="grpo", generation=generation)
    run, _ = begin_in_process(folder, job)
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    return run, {name: Listener(run, name) for name in WORKERS}


def tokens_of(run: JobRun, index: int) -> list[int]:
    return [int(token) for token in np.frombuffer(run.state.ledger.samples[index].response.tokens, "<i4")]


def part(iteration: int, index: int, start: int, count: int) -> PackedResponse:
    tokens = np.arange(start, start + count, dtype="<i4") + 1000 * index
    spans = (VersionSpan(iteration, count),) if count else ()
    return PackedResponse(tokens.tobytes(), np.zeros(count, "<f4").tobytes(), spans)


def decode(run: JobRun, index: int, count: int) -> None:
    sample = run.state.ledger.samples[index]
    assert sample.decoding is not None
    offset, lease = len(sample.response), sample.decoding
    run.state.ledger.progress(
        index, lease.attempt, lease.worker, offset, part(run.state.iteration, index, offset, count)
    )


def finish(run: JobRun, index: int) -> None:
    sample = run.state.ledger.samples[index]
    assert sample.decoding is not None
    lease, whole = sample.decoding, part(run.state.iteration, index, 0, len(sample.response) + 1)
    run.state.ledger.finish(index, lease.attempt, lease.worker, whole, "stop", "")
    sharing.response_finished(run, index, lease.worker)


def share(run: JobRun, now: float) -> None:
    for decision in sibling_sharing.decide(run.context, run.state, now):
        assert isinstance(decision, ShareSiblings)
        sharing.share(run, decision)


def lease(run: JobRun, index: int, worker: str, now: float) -> None:
    """Lease a sample as a tick does, which decides both on the same state, and shares first."""
    for decision in sibling_sharing.decide(run.context, run.state, now, [Generate(worker, (index,))]):
        assert isinstance(decision, ShareSiblings)
        sharing.share(run, decision)
    run.state.ledger.assign(index, worker)


def carry_out(run: JobRun, workers: dict[str, Listener], now: float, kind: str, index: int | None, value: Any) -> None:
    """Apply the next event, if possible."""
    ledger, state = run.state.ledger, None if index is None else run.state.ledger.samples[index].state
    if kind == "share":
        share(run, now)
    elif index is None:
        ledger.reclaim(value)
        workers[value].open_session()
    elif kind == "lease" and state is SampleState.QUEUED:
        lease(run, index, value, now - 1)
    elif kind == "decode" and state is SampleState.DECODING:
        decode(run, index, value)
    elif kind == "finish" and state is SampleState.DECODING:
        finish(run, index)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.integers(0, BATCH - 1), st.sampled_from(WORKERS)),
        st.tuples(st.just("decode"), st.integers(0, BATCH - 1), st.integers(1, 40)),
        st.tuples(st.just("finish"), st.integers(0, BATCH - 1), st.none()),
        st.tuples(st.just("lose"), st.none(), st.sampled_from(WORKERS)),
        st.tuples(st.just("share"), st.none(), st.none()),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=30, deadline=None)
@given(steps, st.integers(1, 30))
def test_every_token_arrives_once_and_in_order_or_is_counted_as_dropped(
    story: list[tuple[str, Any, Any]], room: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sibling_sharing, "MAX_WORKER_TOKENS", room)
        run, workers = begin(Path(folder))
        ledger = run.state.ledger
        for number, step in enumerate(story):
            carry_out(run, workers, float(number), *step)
            for worker in workers.values():
                worker.listen()
        for worker in workers.values():
            for (_, iteration, sample), tokens in worker.has.items():
                assert iteration == 0
                assert tokens == tokens_of(run, sample)[: len(tokens)], "what came is what was decoded"
        assert run.state.siblings.sent == sum(worker.received for worker in workers.values())
        for index in range(BATCH):
            if ledger.samples[index].state is SampleState.QUEUED:
                ledger.assign(index, WORKERS[0])
            if ledger.samples[index].state is SampleState.DECODING:
                finish(run, index)
        missing = sum(
            sibling_sharing.unsent_tokens(run.state, group, has, GROUP)
            for group, of_worker in run.state.siblings.has.items()
            for has in of_worker.values()
        )
        before = run.state.siblings.dropped
        share(run, float(len(story)))
        for worker in workers.values():
            worker.listen()
            assert not worker.has, "nothing of a group that is over stays with a worker"
        assert run.state.siblings.has == {}
        assert run.state.siblings.dropped - before == missing


def test_a_worker_gets_what_others_decoded_of_its_prompts_and_of_no_other(tmp_path: Path) -> None:
    run, workers = begin(tmp_path)
    for index, worker in ((0, 0), (1, 1), (GROUP, 2), (GROUP + 1, 2)):
        run.state.ledger.assign(index, WORKERS[worker])
        decode(run, index, 5)
    share(run, 1.0)
    for listener in workers.values():
        listener.listen()
    assert workers["generation-0"].has == {(0, 0, 1): tokens_of(run, 1)}
    assert workers["generation-1"].has == {(0, 0, 0): tokens_of(run, 0)}
    assert workers["generation-2"].has == {}, "it decodes all that there is of its prompt itself"


def test_what_is_known_of_its_prompt_comes_before_a_lease(tmp_path: Path) -> None:
    """Independent of the last sharing: a short response is over before the next one."""
    run, workers = begin(tmp_path)
    for index, worker in ((0, 0), (GROUP, 0)):
        run.state.ledger.assign(index, WORKERS[worker])
        decode(run, index, 5)
    share(run, 1.0)
    next_share = run.state.siblings.next_share
    assert next_share > 1.0
    lease(run, 1, WORKERS[1], 1.0)
    lease(run, 2, WORKERS[0], 1.0)
    for listener in workers.values():
        listener.listen()
    assert workers["generation-1"].has == {(0, 0, 0): tokens_of(run, 0)}, "of its prompt, and of no other"
    assert workers["generation-0"].has == {}, "it decodes itself what there is"
    assert run.state.siblings.next_share == next_share, "others are not looked at sooner or later for it"
    lease(run, 3, WORKERS[1], 1.0)
    workers["generation-1"].listen()
    assert workers["generation-1"].received == 5, "what it has does not come again"


@pytest.mark.parametrize("keep_cut", ["Nothing", "Drafts"])
def test_what_was_cut_off_drafts_until_its_long_round(tmp_path: Path, keep_cut: str) -> None:
    """One iteration of two prompts cuts the second off; the next one is its long round."""
    rollout = {"batchSize": GROUP, "oversample": 1, "longRounds": "Enabled", "cutBy": "Counts", "keepCut": keep_cut}
    job = make_job(tmp_path, batch=GROUP, algorithm="grpo", iterations=2, rollout=rollout)
    run, _ = begin_in_process(tmp_path, job)
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    lines = run.state.prompt_lines
    for index in range(2 * GROUP):
        run.state.ledger.assign(index, WORKERS[0])
        decode(run, index, 2 + index)
    run.state.ledger.cut([1])
    sharing.iteration_ended(run)
    earlier = run.state.siblings.earlier
    expected = [] if keep_cut == "Nothing" else [tokens_of(run, GROUP + index) for index in range(GROUP)]
    stored = [np.frombuffer(item.tokens, "<i4").tolist() for item in earlier.for_line(lines[GROUP])]
    assert stored == expected
    assert earlier.for_line(lines[0]) == (), "it is trained on and does not come again"
    run.state.ledger = Ledger(1, GROUP, run.context.tasks, 1, group_size=GROUP)
    run.state.ledger.resume_partial([CarriedSample(Origin(0, GROUP + index)) for index in range(GROUP)], ())
    sharing.iteration_ended(run)
    assert earlier.tokens == 0, "nothing waits after the long round"


def test_nothing_is_sent_where_nobody_drafts_by_siblings(tmp_path: Path) -> None:
    for mode in ({"mode": "Disabled"}, {"drafters": ["Ngram"]}):
        run, _ = begin(tmp_path / str(len(mode)) / next(iter(mode)), **mode)
        run.state.ledger.assign(0, WORKERS[0])
        decode(run, 0, 5)
        run.state.ledger.assign(1, WORKERS[1])
        assert sibling_sharing.decide(run.context, run.state, 1.0) == []


def test_a_worker_that_does_not_say_that_it_learns_is_sent_nothing(tmp_path: Path) -> None:
    run, workers = begin(tmp_path)
    for index, name in enumerate(WORKERS):
        run.state.ledger.assign(index, name)
        decode(run, index, 5)
    run.state.fleet.beat(WORKERS[1], pb.Heartbeat(), 0.5)
    share(run, 1.0)
    assert workers[WORKERS[1]].stream.outgoing.empty()
    assert not workers[WORKERS[0]].stream.outgoing.empty()


def test_a_lease_brings_the_responses_of_earlier_epochs_and_a_restart_finds_them_in_the_journal(
    tmp_path: Path,
) -> None:
    run, workers = begin(tmp_path)
    epochs = run.prompts.epoch(run.context.spec.iterations - 1)
    assert epochs == 0, "of this job no prompt comes twice"
    sharing.iteration_ended(run)
    assert run.state.siblings.earlier.tokens == 0

    spec = run.context.spec.model_copy(update={"iterations": 30})
    run, workers = restarted(tmp_path / "long", RLHFJob(**(run.context.job.model_dump() | {"spec": spec})))
    for index in range(BATCH):
        run.state.ledger.assign(index, WORKERS[0])
        decode(run, index, 3 + index)
        finish(run, index)
        response = run.state.ledger.samples[index].response
        finished = pb.FinishedSample(key=pb.SampleKey(sample=index), tokens=pack(np.frombuffer(response.tokens, "<i4")))
        run.journal.append(Record(finished=finished))
    evaluated = pb.FinishedSample(key=pb.SampleKey(sample=FIRST_SAMPLE), tokens=pack(np.array([7, 7], "<i4")))
    run.journal.append(Record(finished=evaluated))
    sharing.iteration_ended(run)
    earlier_responses = run.state.siblings.earlier
    line = run.prompts.prompt(0, GROUP).line
    assert [(item.sample, len(item)) for item in earlier_responses.for_line(line)] == [
        (GROUP + n, 4 + GROUP + n) for n in range(GROUP)
    ]

    earlier = [tokens_of(run, GROUP + index) for index in range(GROUP)]
    run.state.ledger = Ledger(1, BATCH, run.context.tasks, 1)
    run.state.siblings.earlier = EarlierResponses()
    sharing.restore_earlier(run)
    assert run.state.siblings.earlier.for_line(line) == earlier_responses.for_line(line)

    run.state.prompt_lines = [line] * BATCH
    run.state.ledger.assign(0, WORKERS[0])
    share(run, 1.0)
    listener = workers[WORKERS[0]]
    message = listener.stream.outgoing.get_nowait()
    assert message is not None
    assert [delta.weight for delta in message.siblings.deltas] == [EARLIER_WEIGHT] * GROUP
    assert [unpack(delta.tokens).tolist() for delta in message.siblings.deltas] == earlier


def restarted(folder: Path, job: RLHFJob) -> tuple[JobRun, dict[str, Listener]]:
    run, _ = begin_in_process(folder, job)
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    return run, {worker.name: Listener(run, worker.name) for worker in run.state.fleet.in_group(Group.GENERATION)}


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 30), max_size=20)), max_size=30))
def test_the_store_of_earlier_responses_never_holds_more_than_its_bounds(added: list[tuple[int, list[int]]]) -> None:
    store = EarlierResponses(max_tokens=200)
    for iteration, (line, lengths) in enumerate(added):
        responses = [EarlierResponse(iteration, index, b"\1\0\0\0" * length) for index, length in enumerate(lengths)]
        before = store.for_line(line)
        store.add(line, responses)
        stored = [response for number in range(6) for response in store.for_line(number)]
        assert store.tokens == sum(len(response) for response in stored) <= 200
        assert len(store.for_line(line)) <= MAX_RESPONSES
        assert set(store.for_line(line)) <= {*responses, *before}
        order = [response.iteration for response in store.for_line(line)]
        assert order == sorted(order, reverse=True), "newest first"
