"""Table of the uniforms of a batch's samples, drawn in blocks and looked up for all rows at once.

Rule: a lookup returns `sampling.uniforms` of (random key, response position), `marked` by the request's drawing. Must
never give a request the entry of another live one.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_common.samples import Drawing
from rlhf_workers.generation.sampling import marked, uniforms

Ints = npt.NDArray[np.int64]

BLOCK: Final = 64
"""Positions of a block; a multiple of the generator's block, and more than one step decides."""


class KeyedRequest(NamedTuple):
    """The inputs of a request's uniforms."""

    random_key: int
    prompt_tokens: int
    """Length of the sample's prompt; later tokens of a request are response."""
    drawing: Drawing = Drawing.ROLLOUT


class UniformTable:
    """Uniforms of requests by name, two blocks each, so that one step may cross a block boundary."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self._keys: list[int] = []
        self._drawings: list[Drawing] = []
        self._prompts: Ints = np.zeros(0, np.int64)
        self._starts: Ints = np.zeros(0, np.int64)
        """First position in each entry; negative if it is empty."""
        self._values: npt.NDArray[np.float64] = np.zeros((0, 2 * BLOCK))
        self._names: list[str] = []
        """Request names in the last step."""
        self._rows: Ints = np.zeros(0, np.int64)
        """Entries of the requests in `_names`."""

    def __len__(self) -> int:
        return len(self._places)

    def rows(
        self,
        names: Sequence[str],
        lengths: npt.NDArray[np.integer],
        counts: Ints,
        keyed_request: Callable[[str], KeyedRequest],
    ) -> npt.NDArray[np.float64]:
        """Return float64 [sum of counts]: uniforms of `counts` positions of each request, from its next one on.

        `lengths` int [n]: tokens of each request, prompt and response. `counts` int64 [n]: at most BLOCK.
        """
        if self._names != names:
            self._rows = np.fromiter((self._place(name, keyed_request) for name in names), np.int64, len(names))
            self._names = list(names)
        places = self._rows
        positions = lengths.astype(np.int64) - self._prompts[places]
        starts = self._starts[places]
        for row in np.flatnonzero((positions < starts) | (positions + counts > starts + 2 * BLOCK) | (starts < 0)):
            self._fill(int(places[row]), int(positions[row]))
        offsets = positions - self._starts[places]
        ahead = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        found: npt.NDArray[np.float64] = self._values[np.repeat(places, counts), np.repeat(offsets, counts) + ahead]
        return found

    def forget_others(self, names: Collection[str]) -> None:
        """Free the entries of requests not in `names`, once there are many."""
        if len(self._places) > 2 * len(names) + BLOCK:
            for name in [name for name in self._places if name not in names]:
                self._free.append(self._places.pop(name))
            self._names = []

    def _place(self, name: str, keyed_request: Callable[[str], KeyedRequest]) -> int:
        place = self._places.get(name)
        if place is None:
            request = keyed_request(name)
            place = self._places[name] = self._free.pop() if self._free else self._more()
            self._keys[place], self._prompts[place], self._drawings[place] = request
            self._starts[place] = -1
        return place

    def _more(self) -> int:
        """Double the table, to at least BLOCK entries; return one of the new ones."""
        old = len(self._keys)
        new = max(BLOCK, 2 * old)
        self._keys += [0] * (new - old)
        self._drawings += [Drawing.ROLLOUT] * (new - old)
        self._prompts = np.concatenate([self._prompts, np.zeros(new - old, np.int64)])
        self._starts = np.concatenate([self._starts, np.full(new - old, -1)])
        self._values = np.concatenate([self._values, np.zeros((new - old, 2 * BLOCK))])
        self._free += range(new - 1, old, -1)
        return old

    def _fill(self, place: int, position: int) -> None:
        start = position // BLOCK * BLOCK
        self._values[place] = marked(uniforms(self._keys[place], start, 2 * BLOCK), self._drawings[place])
        self._starts[place] = start
