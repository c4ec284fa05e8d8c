"""Runs decode passes in a few shapes over fixed memory, so that a shape can be captured once and replayed.

Rule: graphs contain the addresses of weights, pool and buffers. Call `drop_graphs` before moving weights. Must never
replay a graph over freed memory.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import torch

from rlhf_workers.devices.host_copies import CopyToHost
from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.speculation.drafter import MAX_DRAFT
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS, padded, width_bucket
from rlhf_workers.generation.torch_engine.capture import Capture, CaptureError, Run
from rlhf_workers.generation.torch_engine.decode_pass import (
    INPUTS,
    OUTPUTS,
    REPLAY_ROWS,
    DrawnTokens,
    Inputs,
    PassForward,
    PassResult,
    drawn,
    pack,
)
from rlhf_workers.generation.torch_engine.kv_pools import DecodePass

log = logging.getLogger(__name__)

SEEN_BEFORE: Final = 2
"""Uncaptured passes of a shape before it is captured."""
MAX_GRAPHS: Final = 96
"""Maximum graphs; the least recently used is dropped."""


class GraphShape(NamedTuple):
    """Key of a graph."""

    serial: int
    """Serial number of the pool's storage."""
    width: int
    length: int
    several: bool
    """Whether pool rows are read from the inputs, so that a sample may have several."""


@dataclass
class GraphFigures:
    """Statistics of capturing."""

    passes: int = 0
    """Decode passes."""
    replayed: int = 0
    """Replayed decode passes."""
    captures: int = 0
    capture_ns: int = 0
    failures: int = 0
    """Failed captures; after the first no capture is tried."""


class StaticForward(PassForward, Protocol):
    """A model that decodes, and chooses the key lengths of shapes."""

    def keys_read(self, length: int, capacity: int) -> int:
        """Return the key length of a pass over `length` keys, at most `capacity`."""

    def release(self) -> None:
        """Drop the references to tensors that were built from the model's weights."""


class StaticDecoder:
    """Implements `PassDecoder`."""

    def __init__(
        self, forward: StaticForward, parameters: SamplingParameters, most_rows: int, capture: Capture
    ) -> None:
        """At most `most_rows` samples are decoded at once."""
        self.figures = GraphFigures()
        self._reported = GraphFigures()
        self._forward = forward
        self._parameters = parameters
        self._capture: Capture | None = capture
        self._rows = padded(most_rows * (1 + MAX_DRAFT) + REPLAY_ROWS, TILE_ROWS)
        self._graphs: OrderedDict[GraphShape, Run] = OrderedDict()
        self._seen: dict[GraphShape, int] = {}
        self._bytes = 0
        self._serial = -1
        self._last: CopyToHost | None = None
        self._buffers: _Buffers | None = None

    def launch(self, run: DecodePass, inputs: Inputs) -> PassResult:
        """See PassDecoder; read a result before the next launch, as passes share the buffers."""
        if self._last is not None:
            self._last.wait()
        if run.pool.serial != self._serial:
            self.drop_graphs()
            self._serial = run.pool.serial
        width = width_bucket(run.width)
        length = self._forward.keys_read(run.length, run.pool.capacity)
        shaped = run._replace(width=width, length=length)
        buffers = self._buffers = self._buffers or _Buffers(self._rows, self._forward.device)
        several = run.rows is not None
        buffers.write(inputs, width, repeated=several)
        self.figures.passes += 1
        self._run(GraphShape(self._serial, width, length, several), shaped, buffers)
        self._last = buffers.read(width)
        return DrawnTokens((self._last,))

    def drop_graphs(self) -> None:
        """Drop all graphs, their memory and the buffers."""
        if self._capture is not None:
            self._capture.clear()
        self._graphs.clear()
        self._seen.clear()
        self._buffers, self._bytes, self._serial, self._last = None, 0, -1, None

    def since(self) -> tuple[int, int]:
        """See PassDecoder."""
        reported, self._reported = self._reported, replace(self.figures)
        return self.figures.replayed - reported.replayed, self.figures.capture_ns - reported.capture_ns

    def bytes(self) -> int:
        """Return the device bytes of the buffers, and of captures since the last `drop_graphs`."""
        return self._bytes + (0 if self._buffers is None else self._buffers.bytes())

    def _run(self, shape: GraphShape, run: DecodePass, buffers: "_Buffers") -> None:
        replay = self._graphs.get(shape)
        if replay is not None:
            self._graphs.move_to_end(shape)
            self.figures.replayed += 1
            replay()
            return

        def work() -> None:
            placed = buffers.inputs(run.width)
            pack(buffers.outputs(run.width), *drawn(self._forward, self._parameters, run, placed, fixed=True))

        work()
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._capture is not None and self._seen[shape] >= SEEN_BEFORE:
            self._keep(shape, work, self._capture)

    def _keep(self, shape: GraphShape, work: Run, capture: Capture) -> None:
        """Capture a recurring shape after its pass has run."""
        started = time.perf_counter_ns()
        try:
            captured = capture.capture(work)
        except CaptureError as error:
            log.warning("decode passes are launched kernel by kernel, as they cannot be captured: %s", error)
            self.figures.failures += 1
            self._capture = None
            return
        self.figures.captures += 1
        self.figures.capture_ns += time.perf_counter_ns() - started
        self._graphs[shape] = captured.replay
        self._bytes += captured.bytes
        if len(self._graphs) > MAX_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            self._seen.pop(dropped, None)


class _Buffers:
    """Inputs and outputs of passes, on the device and on the host, where a GPU's are pinned.

    Each is one flat array, so that any width is contiguous.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda" and torch.cuda.is_initialized()
        self._in, self._out = (
            torch.zeros(lines * rows, dtype=torch.int64, device=device) for lines in (INPUTS, OUTPUTS)
        )
        self._host_in, self._host_out = (
            torch.zeros(lines * rows, dtype=torch.int64, pin_memory=pinned) for lines in (INPUTS, OUTPUTS)
        )

    def inputs(self, width: int) -> torch.Tensor:
        """Return [INPUTS, width] on the device."""
        return self._in[: INPUTS * width].view(INPUTS, width)

    def outputs(self, width: int) -> torch.Tensor:
        """Return [OUTPUTS, width] on the device."""
        return self._out[: OUTPUTS * width].view(OUTPUTS, width)

    def write(self, inputs: Inputs, width: int, *, repeated: bool) -> None:
        """Queue the copy of a pass's inputs to the device, padded with token 0 at position 0 or, if `repeated`, with
        the last row.
        """
        host = self._host_in[: INPUTS * width].view(INPUTS, width)
        count = inputs.shape[1]
        host[:, :count] = torch.from_numpy(inputs)
        host[:, count:] = host[:, count - 1 : count] if repeated else 0
        self.inputs(width).copy_(host, non_blocking=True)

    def read(self, width: int) -> CopyToHost:
        """Queue the copy of the outputs to the host."""
        return CopyToHost(self.outputs(width), self._host_out[: OUTPUTS * width].view(OUTPUTS, width))

    def bytes(self) -> int:
        """Return the device bytes."""
        return sum(part.numel() * part.element_size() for part in (self._in, self._out))
