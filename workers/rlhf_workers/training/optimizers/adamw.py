"""Holds AdamW's two moments for a set of parameters and steps them: on the device, or from host memory.

Offloaded moments come to the device in pieces, are stepped there, and go back. A piece ends within a parameter only at
a multiple of UNIT. A step with offloaded moments that fails half-way leaves moments of two steps.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.optim.adamw import adamw

from rlhf_api.job.groups import Optimizer
from rlhf_planner.device_memory import OFFLOADED_PIECE_BYTES
from rlhf_workers.devices.copy_stream import CopyMark, CopyStream
from rlhf_workers.weights.offload import DeviceOffload, OffloadMemory

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
UNIT: Final = 16
"""float32 elements per cache line of 64 bytes."""


class AdamW(Protocol):
    """Steps parameters, by name, with their `.grad`."""

    host_bytes: int
    """Bytes of moments in host memory."""

    def step(self, rate: float) -> None:
        """Take one step; moments start at zero."""

    def moments(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return MOMENTS -> float32 values in the parameter's shape; the next step may change them."""

    def take(self, name: str, read: Callable[[str], torch.Tensor], steps: int) -> None:
        """Load copies of a parameter's moments after `steps` steps, one after the other; all parameters have the same
        step count."""

    def on_device(self) -> Iterator[torch.Tensor]:
        """Yield the moments on the device, if they are stored there; none before the first step or `take`."""


class DeviceAdamW:
    """Implements `AdamW` with moments beside the parameters."""

    host_bytes = 0

    def __init__(self, parameters: Mapping[str, torch.Tensor], fields: Optimizer) -> None:
        self._parameters = parameters
        groups = [
            {"params": [parameters[name] for name in names], "weight_decay": decay}
            for names, decay in _decays(parameters, fields)
        ]
        self._adamw = torch.optim.AdamW(
            groups or [{"params": [torch.empty(0)]}], betas=(fields.beta1, fields.beta2), eps=fields.epsilon, fused=True
        )

    def step(self, rate: float) -> None:
        """See AdamW."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    def moments(self, name: str) -> Mapping[str, torch.Tensor]:
        """See AdamW."""
        parameter = self._parameters[name]
        state = self._adamw.state.get(parameter, {})
        return {moment: state[moment] if state else torch.zeros_like(parameter) for moment in MOMENTS}

    def take(self, name: str, read: Callable[[str], torch.Tensor], steps: int) -> None:
        """See AdamW."""
        parameter = self._parameters[name]
        own = {moment: read(moment).to(parameter.device, copy=True) for moment in MOMENTS}
        self._adamw.state[parameter] = {"step": torch.tensor(float(steps), device=parameter.device), **own}

    def on_device(self) -> Iterator[torch.Tensor]:
        """See AdamW."""
        for parameter in self._parameters.values():
            state = self._adamw.state.get(parameter, {})
            yield from (state[moment] for moment in MOMENTS if state)


class _Slice(NamedTuple):
    """The part of one parameter in a piece."""

    name: str
    own: slice
    """Range of the flattened parameter's elements."""
    in_piece: slice
    """Range of the piece's elements."""


@dataclass(frozen=True)
class _Piece:
    """Elements with one weight decay that are transferred together."""

    decay: float
    place: slice
    """Range in host memory."""
    slices: tuple[_Slice, ...]


class HostAdamW:
    """Implements `AdamW` with moments in host memory, from `OffloadMemory`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        fields: Optimizer,
        memory: OffloadMemory,
        piece_bytes: int,
    ) -> None:
        """`parameters` are contiguous, and on the device of `memory`. `piece_bytes`: bytes of both moments of a
        piece."""
        self._parameters, self._fields, self._memory = parameters, fields, memory
        most = max(1, piece_bytes // (len(MOMENTS) * torch.float32.itemsize * UNIT)) * UNIT
        self._starts: dict[str, int] = {}
        self._pieces: list[_Piece] = []
        end = 0
        for names, decay in _decays(parameters, fields):
            sizes = {name: parameters[name].numel() for name in names}
            for piece in _pieces(sizes, end, most, decay):
                self._pieces.append(piece)
                self._starts |= {
                    part.name: piece.place.start + part.in_piece.start for part in piece.slices if not part.own.start
                }
                end = piece.place.stop
        self.host_bytes = len(MOMENTS) * end * torch.float32.itemsize
        self._host = memory.host(self.host_bytes)[: self.host_bytes].view(torch.float32).view(len(MOMENTS), end)
        self._host.zero_()
        self._steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """See AdamW; returns when the moments are back in host memory."""
        if not self._pieces:
            return
        copies = self._memory.copies()
        longest = max(piece.place.stop - piece.place.start for piece in self._pieces)
        buffers = [self._memory.on_device(self._host[:, :longest]) for _ in self._pieces[:2]]
        copies.follow_compute()  # earlier work may have used the buffers' memory
        coming = self._bring(copies, self._pieces[0], buffers[0])
        for number, piece in enumerate(self._pieces):
            buffer, brought = buffers[number % 2], coming
            if number + 1 < len(self._pieces):  # arrives after the buffer's content left: copies run in order
                coming = self._bring(copies, self._pieces[number + 1], buffers[(number + 1) % 2])
            brought.hold_compute()
            self._step_piece(piece, buffer, rate)
            copies.follow_compute()
            for host_moment, moment in zip(self._host, buffer, strict=True):
                copies.copy(host_moment[piece.place], moment[: piece.place.stop - piece.place.start])
        copies.mark().wait()
        self._steps += 1

    def _bring(self, copies: CopyStream, piece: _Piece, buffer: torch.Tensor) -> CopyMark:
        for host_moment, moment in zip(self._host, buffer, strict=True):
            copies.copy(moment[: piece.place.stop - piece.place.start], host_moment[piece.place])
        return copies.mark()

    def _step_piece(self, piece: _Piece, buffer: torch.Tensor, rate: float) -> None:
        values, gradients = [], []
        for part in piece.slices:
            parameter = self._parameters[part.name]
            assert parameter.grad is not None, "gradients are made with the optimizer"
            values.append(parameter.detach().view(-1)[part.own])
            gradients.append(parameter.grad.view(-1)[part.own])
        first, second = ([moment[part.in_piece] for part in piece.slices] for moment in buffer)
        counts = torch.full((len(values),), float(self._steps), device=buffer.device)
        adamw(
            values, gradients, first, second, [], list(counts.unbind()), fused=True, amsgrad=False, maximize=False,
            beta1=self._fields.beta1, beta2=self._fields.beta2, eps=self._fields.epsilon, lr=rate,
            weight_decay=piece.decay,
        )  # fmt: skip

    def moments(self, name: str) -> Mapping[str, torch.Tensor]:
        """See AdamW: views of host memory."""
        parameter, start = self._parameters[name], self._starts[name]
        values = self._host[:, start : start + parameter.numel()]
        return {moment: value.view(parameter.shape) for moment, value in zip(MOMENTS, values, strict=True)}

    def take(self, name: str, read: Callable[[str], torch.Tensor], steps: int) -> None:
        """See AdamW."""
        for moment, value in self.moments(name).items():
            value.copy_(read(moment))
        self._steps = steps

    def on_device(self) -> Iterator[torch.Tensor]:
        """See AdamW: there are none between two steps."""
        return iter(())


def adamw_of(parameters: Mapping[str, torch.Tensor], fields: Optimizer, device: torch.device, offload: bool) -> AdamW:
    """Return the optimizer of parameters on `device`."""
    if offload:
        return HostAdamW(parameters, fields, DeviceOffload(device), OFFLOADED_PIECE_BYTES)
    return DeviceAdamW(parameters, fields)


def _decays(parameters: Mapping[str, torch.Tensor], fields: Optimizer) -> list[tuple[list[str], float]]:
    """Return names with their weight decay: the job's for matrices, none for norms and biases."""
    matrices = [name for name, value in parameters.items() if value.ndim >= 2]
    others = [name for name, value in parameters.items() if value.ndim < 2]
    return [(names, decay) for names, decay in ((matrices, fields.weight_decay), (others, 0.0)) if names]


def _pieces(sizes: Mapping[str, int], start: int, most: int, decay: float) -> Iterator[_Piece]:
    """Cut parameters into pieces of at most `most` elements, consecutive from `start` on."""
    parts: list[_Slice] = []
    filled = 0
    for name, size in sizes.items():
        done = 0
        while done < size:
            taken = min(size - done, most - filled)
            parts.append(_Slice(name, slice(done, done + taken), slice(filled, filled + taken)))
            done, filled = done + taken, filled + -(-taken // UNIT) * UNIT
            if filled == most:
                yield _Piece(decay, slice(start, start + filled), tuple(parts))
                start, filled, parts = start + filled, 0, []
    if parts:
        yield _Piece(decay, slice(start, start + filled), tuple(parts))
