"""Chooses the sibling tokens that each worker gets as draft hints: responses of others to the prompts that it decodes.

Rule: pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rlhf_api.algorithms import samples_per_prompt
from rlhf_common.samples import FIRST_AHEAD_SAMPLE
from rlhf_coordinator.scheduling.decisions import Decision, Generate, SharedPart, ShareSiblings
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.sibling_state import TokenSource

SHARE_SECONDS: Final = 0.1
"""Least seconds between two full rounds."""
MAX_WORKER_TOKENS: Final = 8192
"""Most tokens per worker and round: 32 KiB."""
MAX_TOKENS: Final = 1 << 18
"""Most tokens per round for all workers: 1 MiB."""
MAX_LOOKS: Final = 4096
"""Number of compared samples and sources after which no other group is processed in a round."""


def is_enabled(context: JobContext) -> bool:
    """Return whether the job drafts from sibling samples."""
    settings = context.spec.generation.speculation
    return context.graph.generates and settings.mode != "Disabled" and "Siblings" in settings.drafters


def decide(context: JobContext, state: JobState, now: float, dispatched: Iterable[Decision] = ()) -> list[Decision]:
    """Return at most one decision, which may send nothing.

    `dispatched` was decided on the same state, and is carried out afterwards.
    """
    if not is_enabled(context):
        return []
    sharing, per_prompt = state.siblings, samples_per_prompt(context.spec)
    leases = _by_group(dispatched, per_prompt)
    due = now >= sharing.next_share and bool(leases or sharing.has or not state.ledger.all_generated)
    if not due and not leases:
        return []
    learners = frozenset(worker.name for worker in state.fleet if worker.connected and worker.heartbeat.learns_siblings)
    if not learners:
        return []
    share = _Share(state, per_prompt, learners, leases)
    return [share.decision(now)] if due else share.with_leases()


def _by_group(dispatched: Iterable[Decision], per_prompt: int) -> dict[int, dict[str, set[int]]]:
    """Return prompt group -> worker -> samples leased to it."""
    leases: dict[int, dict[str, set[int]]] = {}
    for decision in dispatched:
        if isinstance(decision, Generate):
            for index in decision.samples:
                leases.setdefault(index // per_prompt, {}).setdefault(decision.worker, set()).add(index)
    return leases


def unsent_tokens(state: JobState, group: int, has: dict[TokenSource, int], per_prompt: int) -> int:
    """Return the number of tokens of a group that a worker lacks; it `has` so many of each source."""
    return sum(tokens - has.get(source, 0) for source, tokens in sources(state, group, per_prompt))


def sources(state: JobState, group: int, per_prompt: int) -> Iterator[tuple[TokenSource, int]]:
    """Yield the token sources of a prompt group and their known lengths: live siblings first, then drafts ahead."""
    ledger = state.ledger
    for index in _members(state, group, per_prompt):
        yield TokenSource(ledger.iteration, index), len(ledger.samples[index].response)
    if state.ahead.current.drafts:
        for index in _members(state, group, per_prompt):
            if tokens := len(state.ahead.current.response(index)):
                yield TokenSource(ledger.iteration, FIRST_AHEAD_SAMPLE + index), tokens
    for response in state.siblings.earlier.for_line(state.prompt_lines[group * per_prompt]):
        yield TokenSource(response.iteration, response.sample), len(response)


def _members(state: JobState, group: int, per_prompt: int) -> range:
    return range(group * per_prompt, min((group + 1) * per_prompt, len(state.ledger.samples)))


@dataclass
class _Share:
    """One round of sharing under construction."""

    state: JobState
    per_prompt: int
    learners: frozenset[str]
    leases: dict[int, dict[str, set[int]]]
    """Prompt group -> worker -> samples leased to it right after this decision is carried out."""
    parts: list[SharedPart] = field(default_factory=list)
    forgotten: list[tuple[int, str]] = field(default_factory=list)
    room: dict[str, int] = field(default_factory=dict)
    """Worker -> tokens that still fit, for workers that were processed."""
    left: int = MAX_TOKENS
    looks: int = 0

    def decision(self, now: float) -> ShareSiblings:
        """Process one group after the other, until all had their turn or a limit is reached; return the decision."""
        sharing = self.state.siblings
        groups = -(-len(self.state.ledger.samples) // self.per_prompt)
        group = sharing.next_group % groups
        for _ in range(groups):
            self._group(group)
            group = (group + 1) % groups
            if self.left <= 0 or self.looks >= MAX_LOOKS:
                break
        return ShareSiblings(tuple(self.parts), tuple(self.forgotten), group, now + SHARE_SECONDS)

    def with_leases(self) -> list[Decision]:
        """Process the leased groups within the limits; return the decision, if it sends tokens.

        The time of the next full round does not change.
        """
        for group, workers in self.leases.items():
            if self.left <= 0 or self.looks >= MAX_LOOKS:
                break
            for worker, own in workers.items():
                if worker in self.learners:
                    self._worker(group, worker, own, self.state.siblings.has.get(group, {}).get(worker, {}))
        sharing = self.state.siblings
        if not any(part.sent for part in self.parts):
            return []
        return [ShareSiblings(tuple(self.parts), (), sharing.next_group, sharing.next_share)]

    def _group(self, group: int) -> None:
        samples, has = self.state.ledger.samples, self.state.siblings.has.get(group, {})
        members = _members(self.state, group, self.per_prompt)
        self.looks += len(members)
        holders = {worker: set(own) for worker, own in self.leases.get(group, {}).items() if worker in self.learners}
        for index in members:
            for lease in (samples[index].decoding, samples[index].arriving):
                if lease is not None and lease.worker in self.learners:
                    holders.setdefault(lease.worker, set()).add(index)
        waits = any(samples[index].state is SampleState.QUEUED for index in members)
        for worker, own in holders.items():
            self._worker(group, worker, own, has.get(worker, {}))
        for worker in has:
            if worker not in holders and worker in self.learners and not waits:
                self.forgotten.append((group, worker))

    def _worker(self, group: int, worker: str, own: set[int], has: dict[TokenSource, int]) -> None:
        room, iteration = self.room.get(worker, MAX_WORKER_TOKENS), self.state.iteration
        for source, tokens in sources(self.state, group, self.per_prompt):
            self.looks += 1
            start = has.get(source, 0)
            known_there = source.iteration == iteration and source.sample in own
            stop = tokens if known_there else min(tokens, start + min(room, self.left))
            if stop <= start:
                continue
            if not known_there:
                room -= stop - start
                self.left -= stop - start
            self.parts.append(SharedPart(group, worker, source, start, stop, sent=not known_there))
        self.room[worker] = room
