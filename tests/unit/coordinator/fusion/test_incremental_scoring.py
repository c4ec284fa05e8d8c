"""Incremental scoring while processes die at any moment: every score is made once, and the batch does not change.

Uses the coordinator's own scheduler, event handlers, actions and journal, and simulated workers. The test delivers
their messages in session order, without sockets or clocks.
"""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job, make_prompts
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_results import response, response_length, score
from tests.support.coordinator.simulated_worker import SimulatedWorker

from rlhf_api.score_blocks import BLOCK
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.fusion import fusion_planning
from rlhf_coordinator.job.iteration_metrics import incremental_metrics
from rlhf_coordinator.job.sessions import WorkerStream
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.loop.loop import Loop
from rlhf_coordinator.scheduling.incremental_dispatch import IN_FLIGHT, UNFINISHED
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.fleet import GRACE_SECONDS, Joined
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.storage.batch import batch_parts, replayed
from rlhf_coordinator.storage.prompts import random_key
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

NAMES = ("generation-0", "generation-1", "inference-0", "inference-1")
BATCH, MAX_TOKENS = 8, 12 * BLOCK
HOUR = 3600
STEPS = ("decide", "hear", "work", "say one", "say")
FAULTS = ("dies", "its session breaks", "is lost", "refuses", "coordinator dies")
Event = tuple[int, int, str, str]
"""(steps without fault, steps of the worker after them, the worker, the fault)"""
stories = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, len(STEPS)), st.sampled_from(NAMES), st.sampled_from(FAULTS)),
    min_size=2,
    max_size=12,
)


class Hand(SimulatedWorker):
    """A worker under manual control: it receives a command or sends a message only when the test lets it."""

    session = 0
    stream: WorkerStream | None = None
    refuses = False
    """Whether the worker has no memory to start anything."""

    def die(self) -> None:
        """End the process; a new one takes its place."""
        self._fresh_process()

    def register(self) -> pb.Register:
        """Send the first message of a session."""
        message = self._register()
        self._give_back()
        return message

    def hear(self) -> None:
        """Obey all commands in transit."""
        while self.stream is not None and not self.stream.outgoing.empty():
            message = self.stream.outgoing.get_nowait()
            if message is not None:
                self._obey(message.command)

    def work(self, tokens: int) -> None:
        """Decode this many tokens of all samples, and score the assigned tasks."""
        self.pace = replace(self.pace, tokens_per_tick=tokens)
        self._decode(report=True)
        self._score()

    def said(self, count: int) -> list[pb.WorkerMessage]:
        """Return the next messages."""
        messages, self._outbox = self._outbox[:count], self._outbox[count:]
        return messages

    def has(self, index: int) -> bool:
        """Return whether the worker has started a sample, as far as an observer can know."""
        unheard = [message.prefix.dropped for message in self._outbox if message.HasField("prefix")]
        return (0, index) in self._begun or any(index in dropped for dropped in unheard)

    def _on_score_prefix(self, order: pb.ScorePrefix, done: pb.CommandDone) -> None:
        if self.refuses:
            done.failure.CopyFrom(pb.Failure(reason="OutOfMemory", message="no room"))
        else:
            super()._on_score_prefix(order, done)


class Iteration:
    """One iteration of a job without training: its successive coordinators, and its workers."""

    def __init__(self, folder: Path, room: int) -> None:
        """Create workers with room for this many prefixes."""
        patient = {"workerTimeoutSeconds": HOUR, "startTimeoutSeconds": HOUR}
        self.folder = folder
        self.job = make_job(
            folder, batch=BATCH, rollout={"batchSize": BATCH, "maxResponseTokens": MAX_TOKENS},
            inference={"replicas": 2, "incremental": "Enabled"}, runPolicy=patient,
        )  # fmt: skip
        self.plan = job_context(self.job, schedule_json(self.job.spec))
        self.prompts = make_prompts(self.job)
        self.workers = {
            name: Hand(Group(name[:-2]), int(name[-1]), str(folder), pace=Pace(most_prefixes=room)) for name in NAMES
        }
        self.begin_coordinator()

    def begin_coordinator(self) -> None:
        """Start a coordinator from the journal, and connect all workers."""
        self.run, restored = begin_in_process(self.folder, self.job)
        saving = CheckpointSaver(self.run)
        self.event_handlers, actions = EventHandlers(self.run, saving), Actions(self.run, saving)
        self.loop = Loop(self.run, self.event_handlers, actions)
        if restored.begun_ns is None:
            actions.begin_iteration(0, ())
        else:
            self.run.journal.resume(0)
            fusion_planning.begin_iteration(self.run)
        for worker in self.workers.values():
            worker.session = 0
            self.connect(worker)

    def connect(self, worker: Hand) -> None:
        """Open a new session; an older one ends."""
        if worker.session:
            self.event_handlers.closed(worker.name, worker.session)
        worker.session = self.run.sessions.number()
        assert isinstance(self.event_handlers.register(worker.register(), worker.session), Joined)
        worker.stream = self.run.sessions.open(worker.name, worker.session)

    def deliver(self, worker: Hand, count: int) -> None:
        """Deliver the next `count` messages of a worker, in order."""
        if worker.session:
            for message in worker.said(count):
                self.event_handlers.message(worker.name, message)

    def go_on(self, moments: int) -> None:
        """Run all without faults."""
        for worker in [*self.workers.values()] * moments:
            for step in STEPS:
                self.step(worker, step)

    def step(self, worker: Hand, step: str) -> None:
        """Take one of the regular steps; any may be the last before a fault."""
        if step == "decide":
            self.loop.tick()
        elif step == "hear":
            worker.hear()
        elif step == "work":
            worker.work(BLOCK // 2)
        else:
            self.deliver(worker, 1 if step == "say one" else 1000)
        self.check_beliefs()

    def strike(self, worker: Hand, fault: str) -> None:
        """Apply a fault to a worker, or to the coordinator."""
        if fault == "coordinator dies":
            self.run.journal.close()
            self.begin_coordinator()
        elif fault == "refuses":
            worker.refuses = not worker.refuses
        elif fault == "is lost" and worker.session:
            worker.die()
            self.event_handlers.closed(worker.name, worker.session)
            worker.session, worker.stream = 0, None
            self.run.state.fleet.workers[worker.name].since -= 2 * GRACE_SECONDS
            self.loop.tick()
        else:
            if fault == "dies":
                worker.die()
            self.connect(worker)
        self.check_beliefs()

    def finish(self) -> None:
        """Run without faults until the end."""
        for worker in self.workers.values():
            worker.refuses = False
            if not worker.session:
                self.connect(worker)
        for _ in range(8 * MAX_TOKENS // BLOCK):
            if not self.run.state.ledger.all_scored:
                self.go_on(1)
        assert self.run.state.ledger.all_scored, self.run.state.ledger.counts()

    # ---------------------------------------------------------------- what must hold

    def check_beliefs(self) -> None:
        """Check that restarted workers have no tasks, and that no worker has too many tasks or finished ones."""
        state, samples = self.run.state.incremental, self.run.state.ledger.samples
        assert all(self.workers[item.worker].session for item in state.asked.values())
        assert all(self.workers[item.worker].has(index) for index, item in state.prefixes.items())
        assert all(count <= IN_FLIGHT for count in Counter(item.worker for item in state.asked.values()).values())
        assert all(samples[index].state in UNFINISHED for index in state.asked)
        for index, item in (*state.prefixes.items(), *state.asked.items()):
            known_tokens = self.run.state.prompt_tokens[index] + len(samples[index].response)
            assert 0 < item.tokens <= known_tokens or samples[index].state in UNFINISHED
            assert item.tokens % BLOCK == 0
        assert 0 <= state.early_tokens <= state.tokens
        assert self.run.state.failure is None

    def check_batch(self) -> None:
        """Check that every score exists once, and equals that without prefixes, faults, or a coordinator."""
        journal, size = self.run.journal, self.plan.spec.rollout.batch_size
        records = list(journal.read(0))
        scored = [(record.scored.key.sample, record.scored.task) for record in records if record.HasField("scored")]
        assert len(scored) == len(set(scored)) == size * len(self.plan.tasks)
        parts = list(batch_parts(self.run.state.ledger, self.prompts))
        assert parts == list(batch_parts(replayed(0, size, self.plan.tasks, records, self.prompts), self.prompts))
        for sample in (sample for part in parts for sample in part.samples):
            key = random_key(self.plan.spec.seed, 0, sample.sample)
            tokens, _ = response(key, 0, response_length(key, MAX_TOKENS))
            assert sample.response.data == tokens
            for task in self.plan.tasks:
                assert sample.fields[task.produces[0]].data == score(task.name, tokens)
        figures = incremental_metrics(self.run)
        assert 0 <= figures["incremental/early_share"] <= 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(room=st.sampled_from([0, 2, 1000]), story=stories)
def test_whoever_dies_every_score_is_made_once(room: int, story: list[Event]) -> None:
    with tempfile.TemporaryDirectory(prefix="rlhf-early-") as folder:
        iteration = Iteration(Path(folder), room)
        iteration.go_on(3)
        for moments, steps, name, fault in story:
            iteration.go_on(moments)
            for step in STEPS[:steps]:
                iteration.step(iteration.workers[name], step)
            iteration.strike(iteration.workers[name], fault)
        iteration.finish()
        iteration.check_batch()
        iteration.run.journal.close()
