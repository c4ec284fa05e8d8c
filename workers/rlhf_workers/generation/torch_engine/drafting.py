"""Interface between the torch engine and its speculator: requests drafts and reports their outcomes.

Rule: drafts are cut at the sample's limit, its pool and the vocabulary. Samples decoded ahead get
no draft, and the speculator does not learn of them or of steps that have any. Must never let a draft become a token:
`verification` decides.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray, is_ahead
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.speculation.drafter import MAX_DRAFT, DraftRequest
from rlhf_workers.generation.speculation.speculator import Verified
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.response_table import ResponseTable, Slots

Flags = npt.NDArray[np.bool_]

TELL_STEPS: Final = 32
"""Maximum steps before the speculator gets new tokens."""


class ProposesDrafts(Protocol):
    """`speculator.Speculator`: asks drafters, chooses among them, and limits drafts."""

    def begin(self, request: SampleRequest) -> None: ...
    def extend(self, key: SampleKey, tokens: TokenArray) -> None: ...
    def end(self, key: SampleKey) -> None: ...
    def wants(self, rows: int, keys: int) -> bool: ...
    def propose(self, requests: Sequence[DraftRequest], keys: int) -> Sequence[TokenArray]: ...
    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None: ...


class Drafting:
    """Drafts for the samples of one engine."""

    def __init__(self, speculator: ProposesDrafts | None, vocabulary: int) -> None:
        """`speculator` None disables drafts."""
        self.speculator = speculator
        self._vocabulary = vocabulary
        self._decoded: set[SampleKey] = set()
        self._ahead = False
        """Whether samples are decoded ahead."""
        self._followed: tuple[ResponseTable | None, int] = (None, 0)
        """The last table seen, and its number of changes then."""
        self._untold = 0
        """Steps since all tokens were passed on."""
        self._seconds = 0.0

    @property
    def enabled(self) -> bool:
        """Whether there is a speculator."""
        return self.speculator is not None

    def follow(self, state: EngineState) -> None:
        """Register samples that came, and remove samples that left."""
        if self.speculator is None:
            return
        table, changes = self._followed
        if table is state.table and changes == state.table.changes:
            return
        self._followed = (state.table, state.table.changes)
        requests = [request for request in state.table.requests if request is not None]
        found = {request.key: request for request in requests if not is_ahead(request.key.sample)}
        self._ahead = len(found) < len(requests)
        for key in self._decoded - found.keys():
            self.speculator.end(key)
        for key in found.keys() - self._decoded:
            self.speculator.begin(found[key])
        self._decoded = set(found)

    def wants(self, state: EngineState, slots: Slots) -> bool:
        """Return whether drafts are wanted for a step over these `slots` [n]; pass on their tokens if so, or if due."""
        self._seconds = 0.0
        if self.speculator is None or not len(slots) or self._ahead:
            return False
        started = time.perf_counter()
        wanted = self.speculator.wants(len(slots), self._keys(state, slots))
        self._untold += 1
        if wanted or self._untold >= TELL_STEPS:
            self._untold = 0
            self.tell(state, slots)
        self._seconds = time.perf_counter() - started
        return wanted

    def propose(self, state: EngineState, slots: Slots, proven: Flags, report: StepReport) -> Slots:
        """Request drafts and store them after the sequences of `slots` [n] whose passes are `proven` [n].

        Return the number of drafted tokens of each slot [n].
        """
        drafted = np.zeros(len(slots), np.int64)
        started = time.perf_counter()
        if self.speculator is not None:
            for at, draft in self._drafts(self.speculator, state, slots, proven, self._keys(state, slots)):
                state.table.draft(int(slots[at]), draft)
                drafted[at] = len(draft)
        self._seconds += time.perf_counter() - started
        report.drafted = int(drafted.sum())
        return drafted

    def tell(self, state: EngineState, slots: Slots) -> None:
        """Pass on the tokens of these slots drawn since the last call."""
        if self.speculator is not None:
            for slot in map(int, slots):
                tokens, key = state.table.untold(slot), state.table.key(slot)
                if len(tokens) and not is_ahead(key.sample):
                    self.speculator.extend(key, tokens)

    def verified(self, outcomes: Sequence[Verified], report: StepReport, seconds: float) -> None:
        """Report the outcomes of a step and its seconds, except for steps without rows, and untypical ones with replays
        or captures."""
        report.draft_ns = int(self._seconds * 1e9)
        typical = report.rows and not (report.replayed or report.capture_ns or self._ahead)
        if self.speculator is not None and typical:
            self.speculator.verified(outcomes, report.pass_rows, report.positions, self._seconds, seconds)

    def _keys(self, state: EngineState, slots: Slots) -> int:
        return int(state.table.position[slots].sum()) + len(slots)

    def _drafts(
        self, speculator: ProposesDrafts, state: EngineState, slots: Slots, proven: Flags, keys: int
    ) -> Iterator[tuple[int, TokenArray]]:
        """Yield an index into `slots` and its draft up to the first invalid token; drafters are not trusted."""
        table, position = state.table, state.table.position[slots]
        room = np.minimum(state.pools.reach(position) - position, table.limit[slots] - table.length[slots]) - 1
        asked = np.flatnonzero(proven & ~table.paused[slots] & (table.known_ahead(slots) == 0) & (room > 0))
        requests = [
            DraftRequest(
                table.key(int(slots[at])),
                table.sequence(int(slots[at])),
                int(table.prompt_length[slots[at]]),
                min(int(room[at]), MAX_DRAFT),
            )
            for at in asked
        ]
        drafts = speculator.propose(requests, keys) if requests else ()
        for at, request, draft in zip(asked, requests, drafts, strict=True):
            sound = draft[: request.longest]
            strange = np.flatnonzero((sound < 0) | (sound >= self._vocabulary))
            sound = sound[: strange[0]] if len(strange) else sound
            if len(sound):
                yield int(at), sound
