"""Proves batch shapes for deterministic mode, in which a row gets the bits it has in a tile of 16.

Rule: the reference is a pass over 16 rows with any neighbours, whose key length depends on the row's own position (for
prompts: one prompt, padded by its own length). A wider pass is used after one run on random numbers gave the same bits.
Must never trust an untried width beyond the reference.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.kv_cache import KvPool

log = logging.getLogger(__name__)

MAX_ROWS: Final = 256
"""Maximum rows of one pass."""
MAX_PROMPTS: Final = 16
"""Maximum prompts of one prefill."""
ROUNDS: Final = 4
"""Number of trials of a tile."""
LONG_RUN: Final = 12
"""Least rows of one of the samples in a trial with several, where they fit."""
TRIAL_CAPACITY: Final = 64
"""Key length in trials of a tile."""


class Tiles:
    """Tried shapes and their results."""

    def __init__(self, forward: CausalForward) -> None:
        self._forward = forward
        self._decode: dict[tuple[int, int], bool] = {}
        self._several: dict[tuple[int, int], bool] = {}
        self._prefill: dict[tuple[int, int], bool] = {}
        self._random = torch.Generator().manual_seed(0)
        self._numbers = np.random.Generator(np.random.Philox(key=0))

    @torch.inference_mode()
    def require(self) -> None:
        """Raise WorkError NotReproducible if a row's bits may depend on its place or neighbours.

        That is so for some experts, for types other than float32, and if bits differ in a trial of a tile. On devices
        other than a CPU, this logs a warning instead.
        """
        if self._forward.experts_see_others:
            why = (
                "the model routes tokens to experts, whose kernels depend on the number of tokens; only Mixtral's and "
                f"Qwen3-MoE's experts are computed tile by tile, not those of this "
                f"{self._forward.model.config.model_type} model: set it to false"
            )
        elif self._forward.model.dtype is not torch.float32:
            why = (
                f"sums in another order mostly give the same number in {self._forward.model.dtype}, so a trial of a "
                "batch shape proves nothing: set spec.training.precision to Float32, and leave "
                "spec.generation.engineArgs.dtype out"
            )
        elif not all(self._try_tile() for _ in range(ROUNDS)):
            why = (
                f"a sample's results depend on the rest of its batch with {torch.get_num_threads()} threads on "
                f"{self._forward.device}: set cpuThreads to 1, 2 or 4; layer sizes must be multiples of 32"
            )
        else:
            return
        if self._forward.device.type == "cpu":
            field, code = "spec.deterministic", ExitCode.USAGE
            raise WorkError(
                "NotReproducible", f"{field}: true cannot be guaranteed: {why}", field=field, exit_code=code
            )
        log.warning("results are not reproducible: %s", why)

    def widths(self, rows: int, capacity: int, *, several: bool = False) -> Iterator[tuple[int, int]]:
        """Yield (first row, rows) of proven passes that together cover `rows` rows.

        `several`: a pass may have several rows of one sample, which `proven_several` must have allowed.
        """
        proven = self._proven_several if several else self._proven_decode
        first = 0
        while first < rows:
            left = -(-(rows - first) // TILE_ROWS) * TILE_ROWS
            width = min(left, MAX_ROWS)
            while width > TILE_ROWS and not proven(width, capacity):
                width -= TILE_ROWS
            yield first, width
            first += width

    def prompts(self, count: int, length: int) -> int:
        """Return how many of `count` prompts of padded length `length` may share one prefill."""
        size = min(count, MAX_PROMPTS)
        while not self._proven_prefill(size, length):
            size -= 1
        return size

    def proven_several(self, capacity: int) -> bool:
        """Return whether a tile with several rows of one sample gives the bits of as many single steps."""
        return self._proven_several(TILE_ROWS, capacity)

    def _proven_several(self, width: int, capacity: int) -> bool:
        if (width, capacity) not in self._several:
            proven = self._guarded(lambda: self._try_several(width, capacity))
            self._several[width, capacity] = proven
            if width == TILE_ROWS and not proven:
                why = "passes over several positions of a sample do not give the bits of single steps here"
                log.warning("samples of up to %d tokens are decoded token by token: %s", capacity, why)
        return self._several[width, capacity]

    def _proven_decode(self, width: int, capacity: int) -> bool:
        if width == TILE_ROWS:
            return True
        if (width, capacity) not in self._decode:
            self._decode[width, capacity] = self._guarded(lambda: self._try_decode(width, capacity))
        return self._decode[width, capacity]

    def _proven_prefill(self, count: int, length: int) -> bool:
        if count == 1:
            return True
        if (count, length) not in self._prefill:
            self._prefill[count, length] = self._guarded(lambda: self._try_prefill(count, length))
        return self._prefill[count, length]

    @staticmethod
    def _guarded(trial: Callable[[], bool]) -> bool:
        """Return the trial's result; out of memory counts as failure."""
        try:
            return trial()
        except torch.OutOfMemoryError:
            return False

    @torch.inference_mode()
    def _try_decode(self, width: int, capacity: int) -> bool:
        """Compare a pass over `width` random rows with tiles: logits, log-probabilities, written keys and values."""
        pool = self._random_pool(width, capacity)
        tokens, positions = self._random_inputs(width, capacity)
        wide = self._forward.decode(pool, 0, tokens, positions, capacity)
        written = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in pool.storage.items()}
        tiles = torch.cat(
            [
                self._forward.decode(pool, at, tokens[at : at + TILE_ROWS], positions[at : at + TILE_ROWS], capacity)
                for at in range(0, width, TILE_ROWS)
            ]
        )
        same = torch.equal(wide, tiles) and torch.equal(
            wide.float().log_softmax(-1),
            torch.cat([part.float().log_softmax(-1) for part in torch.split(tiles, TILE_ROWS)]),
        )
        return same and all(
            torch.equal(part, other)
            for layer, parts in pool.storage.items()
            for part, other in zip(parts, written[layer], strict=True)
        )

    @torch.inference_mode()
    def _try_several(self, width: int, capacity: int) -> bool:
        """Compare a pass with several rows of a sample with single steps: logits, and written keys and values."""
        pool, single = self._random_pool(TILE_ROWS, capacity), KvPool(TILE_ROWS, capacity)
        every = np.arange(TILE_ROWS)
        single.copy_rows(pool, self._placed(every), self._placed(every))
        counts = self._random_counts(width - 1, capacity)
        longest = int(counts.max())
        start = self._numbers.integers(capacity - longest + 1, size=TILE_ROWS)
        tokens = self._numbers.integers(self._forward.vocabulary, size=(TILE_ROWS, longest))
        rows = every.repeat(counts)
        ahead = np.arange(width - 1) - (counts.cumsum() - counts).repeat(counts)
        fed = (rows, tokens[rows, ahead], start[rows] + ahead)
        own, token, place = (self._placed(np.append(part, part[-1])) for part in fed)
        together = self._forward.decode_rows(pool, own, token, place, capacity)
        for step in range(longest):
            at = np.minimum(step, np.maximum(counts - 1, 0))
            logits = self._forward.decode(
                single, 0, self._placed(tokens[every, at]), self._placed(start + at), capacity
            )
            alone, among = self._placed(rows[ahead == step]), self._placed(np.flatnonzero(ahead == step))
            if not torch.equal(logits[alone], together[among]):
                return False
        there = self._placed(np.flatnonzero(counts))
        return all(
            torch.equal(part[there], other[there])
            for layer, parts in pool.storage.items()
            for part, other in zip(parts, single.storage[layer], strict=True)
        )

    def _random_counts(self, rows: int, most: int) -> npt.NDArray[np.int64]:
        """Return the rows of each sample of a tile, at most what fits into its cache.

        Their sum must fit into all caches.
        """
        long = min(rows, LONG_RUN)
        counts = np.bincount(self._numbers.integers(TILE_ROWS, size=rows - long), minlength=TILE_ROWS)
        counts[(rows - long) % TILE_ROWS] += long
        over = int(np.maximum(counts - most, 0).sum())
        counts = np.minimum(counts, most)
        for _ in range(over):
            counts[counts.argmin()] += 1
        return counts

    def _placed(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._forward.device)

    @torch.inference_mode()
    def _try_prefill(self, count: int, length: int) -> bool:
        """Compare one prefill of `count` random prompts with prefills of one."""
        tokens = torch.randint(self._forward.vocabulary, (count, length), generator=self._random)
        tokens = tokens.to(self._forward.device)
        together = self._forward.prefill(tokens).states
        for row in range(count):
            alone = self._forward.prefill(tokens[row : row + 1]).states
            for layer, parts in alone.items():
                if not all(torch.equal(part[0], both[row]) for part, both in zip(parts, together[layer], strict=True)):
                    return False
        return True

    def _try_tile(self) -> bool:
        """Compare half of a tile's rows with the same rows in other places among other neighbours."""
        pool, other = (self._random_pool(TILE_ROWS, TRIAL_CAPACITY) for _ in range(2))
        tokens, positions = self._random_inputs(TILE_ROWS, TRIAL_CAPACITY)
        other_tokens, other_positions = self._random_inputs(TILE_ROWS, TRIAL_CAPACITY)
        rows, places = (
            torch.randperm(TILE_ROWS, generator=self._random)[: TILE_ROWS // 2].to(self._forward.device)
            for _ in range(2)
        )
        other.copy_rows(pool, rows, places)
        other_tokens[places], other_positions[places] = tokens[rows], positions[rows]
        logits = self._forward.decode(pool, 0, tokens, positions, TRIAL_CAPACITY)[rows]
        moved = self._forward.decode(other, 0, other_tokens, other_positions, TRIAL_CAPACITY)[places]
        return torch.equal(logits, moved)

    def _random_pool(self, rows: int, capacity: int) -> KvPool:
        """Return a pool with random numbers in every layer."""
        pool = KvPool(rows, capacity)
        row = torch.zeros(1, dtype=torch.int64, device=self._forward.device)
        pool.write_prompts(self._forward.prefill(row[None].expand(1, TILE_ROWS)), row, row)
        for parts in pool.storage.values():
            for part in parts:
                part.copy_(torch.randn(part.shape, generator=self._random))
        return pool

    def _random_inputs(self, rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random tokens and positions [rows]."""
        tokens = torch.randint(self._forward.vocabulary, (rows,), generator=self._random)
        positions = torch.randint(capacity, (rows,), generator=self._random)
        return tokens.to(self._forward.device), positions.to(self._forward.device)
