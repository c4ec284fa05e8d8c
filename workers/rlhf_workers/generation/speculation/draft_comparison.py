"""Compares drafts of several drafters at the same position, once the drawn tokens show which was right for longer.

Rule: a note waits for the sample's next draft.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rlhf_common.samples import SampleKey
from rlhf_planner.speculation.rival_drafts import PairwiseCounts
from rlhf_workers.generation.speculation.drafter import MATCHES, Draft, DraftRequest, tokens_right


class _Note(NamedTuple):
    tokens: int
    """Number of prompt and response tokens before the drafts."""
    drafts: list[tuple[int, Draft]]
    """(drafter, its draft of at least one token)."""


class DraftComparison:
    """Draft comparisons for the samples of one engine. Not thread-safe."""

    def __init__(self) -> None:
        self._notes: dict[SampleKey, _Note] = {}

    def note(
        self, drafters: Sequence[int], drafts: Sequence[Sequence[Draft]], requests: Sequence[DraftRequest]
    ) -> None:
        """Note the drafts of each request that has several; `drafts` are per drafter, in the order of requests."""
        if len(drafters) < 2:
            return
        for at, request in enumerate(requests):
            nonempty = [
                (drafter, said[at]) for drafter, said in zip(drafters, drafts, strict=True) if len(said[at].tokens)
            ]
            if len(nonempty) > 1:
                self._notes[request.key] = _Note(len(request.tokens), nonempty)

    def compared(self, requests: Sequence[DraftRequest]) -> PairwiseCounts | None:
        """Remove and return the pairs of noted drafts of these samples, judged by their tokens since; None if none."""
        duels: list[tuple[int, int, int, int, int]] = []
        for request in requests if self._notes else ():
            note = self._notes.pop(request.key, None)
            if note is None:
                continue
            drawn = request.tokens[note.tokens :].tolist()
            judged = [
                (drafter, min(max(draft.match, 0), MATCHES - 1), tokens_right(draft.tokens.tolist(), drawn))
                for drafter, draft in note.drafts
            ]
            duels += [
                (first, match, second, other, right - wrong)
                for (first, match, right), (second, other, wrong) in combinations(judged, 2)
            ]
        return PairwiseCounts(*np.array(duels, np.int64).T) if duels else None

    def forget(self, key: SampleKey) -> None:
        """Drop the note of a sample that ended here."""
        self._notes.pop(key, None)
