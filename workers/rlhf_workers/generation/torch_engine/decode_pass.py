"""Runs one decode pass over an array of inputs.

Must never know samples: rows and numbers only.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rlhf_workers.devices.host_copies import CopyToHost, to_device
from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.sampling import sample
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS
from rlhf_workers.generation.torch_engine.kv_cache import KvPool
from rlhf_workers.generation.torch_engine.kv_pools import DecodePass
from rlhf_workers.generation.torch_engine.sample_rows import SampleRows

TOKENS: Final = 0
POSITIONS: Final = 1
UNIFORMS: Final = 2
ROWS: Final = 3
INPUTS: Final = 4
"""Number of rows of the input, int64 [INPUTS, width]; UNIFORMS are bits of float64.

ROWS are pool rows, in passes with several rows of one sample.
"""
REPLAY_ROWS: Final = 2 * TILE_ROWS
"""Maximum rows of samples with known tokens per step; one for each sample if there are more samples."""
OUTPUTS: Final = 2
"""Number of rows of the output, int64 [OUTPUTS, width]: tokens, and log-probabilities as bits of float64."""

Inputs = npt.NDArray[np.int64]


class PassForward(Protocol):
    """A model that decodes: `CausalForward`, or one that computes the same in fewer kernels."""

    device: torch.device

    def decode(
        self, pool: KvPool, first: int, tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return logits [n, vocabulary] of tokens [n] at positions [n] in rows first .. of `pool`."""

    def decode_rows(
        self,
        pool: KvPool,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        shape: SampleRows | None = None,
    ) -> torch.Tensor:
        """Return logits likewise for rows [n] of `pool`, which may repeat; `shape` may describe them too."""


class PassResult(Protocol):
    """Result of a launched pass."""

    def wait(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return tokens [width] and their log-probabilities [width], which belong to the caller."""


class PassDecoder(Protocol):
    """Runs decode passes."""

    def launch(self, run: DecodePass, inputs: Inputs) -> PassResult:
        """Start a pass over INPUTS x run.width numbers."""

    def since(self) -> tuple[int, int]:
        """Return the passes replayed and the nanoseconds of capturing since the last call."""


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens and log-probabilities, in two copies or packed in one."""

    copies: tuple[CopyToHost, ...]

    def wait(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """See PassResult."""
        if len(self.copies) == OUTPUTS:
            tokens, log_probabilities = (copy.wait() for copy in self.copies)
            return tokens, log_probabilities
        packed = self.copies[0].wait()
        return packed[0].copy(), packed[1].view(np.float64).astype(np.float32)


class PlainDecoder:
    """Runs every pass in its own shape."""

    def __init__(self, forward: PassForward, parameters: SamplingParameters) -> None:
        self._forward = forward
        self._parameters = parameters

    def launch(self, run: DecodePass, inputs: Inputs) -> PassResult:
        """See PassDecoder."""
        placed = to_device(inputs, self._forward.device)
        tokens, log_probabilities = drawn(self._forward, self._parameters, run, placed)
        if self._forward.device.type == "cpu":
            return DrawnTokens((CopyToHost(tokens), CopyToHost(log_probabilities)))
        packed = torch.empty(OUTPUTS, run.width, dtype=torch.int64, device=self._forward.device)
        pack(packed, tokens, log_probabilities)
        return DrawnTokens((CopyToHost(packed),))

    def since(self) -> tuple[int, int]:
        """See PassDecoder; nothing is captured."""
        return 0, 0


def drawn(
    forward: PassForward,
    parameters: SamplingParameters,
    run: DecodePass,
    inputs: torch.Tensor,
    *,
    fixed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens int64 [width] and log-probabilities float32 [width] drawn from inputs [INPUTS, width].

    `fixed`: launches depend on width and length only, so they can be replayed for other rows.
    """
    fed, pool = (inputs[TOKENS], inputs[POSITIONS], run.length), run.pool
    if run.rows is None:
        logits = forward.decode(pool, run.first, *fed)
    else:
        shape = run.rows if not fixed and run.width == len(run.slots) else None
        logits = forward.decode_rows(pool, inputs[ROWS], *fed, shape)
    return sample(logits, inputs[UNIFORMS].view(torch.float64), parameters)


def pack(into: torch.Tensor, tokens: torch.Tensor, log_probabilities: torch.Tensor) -> None:
    """Write a pass's result to int64 [OUTPUTS, width]."""
    into[0].copy_(tokens)
    into[1].view(torch.float64).copy_(log_probabilities)
