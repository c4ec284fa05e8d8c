"""Runs one rank's row of a schedule table for one mini-batch, independent of schedule, model and algorithm.

Rule: actions run in row order; the computation that needs a RECV waits for it. Gradients accumulate in the parameters'
`.grad`; the executor never zeroes them, sums them over ranks, or steps.

The backward of a micro-batch is B, or I (gradient of the input) and later W (gradients of the weights).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from rlhf_common.schedule import Action
from rlhf_workers.training.communication.communicator import Communicator, Handle, PeerLostError
from rlhf_workers.training.schedule.device_timers import DeviceTimers, HostTimers
from rlhf_workers.training.schedule.progress_counter import count_unit

SENDS_UNDER_WAY: Final = 8
"""Maximum pending send tensors of a rank."""


class PipelineWork(Protocol):
    """Computations of this rank's stages of one pipeline."""

    stages: int

    def like_hidden(self, microbatch: int) -> torch.Tensor:
        """Return an empty tensor with the shape, type and device of this micro-batch's hidden states."""

    def embed(self, microbatch: int) -> torch.Tensor:
        """Return the input of the first stage's first layer."""

    def forward(self, stage: int, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states for the next stage. In the last stage, return the result of its ending: in training the
        loss.
        """

    def parameters(self, stage: int) -> list[torch.nn.Parameter]:
        """Return the trained parameters of a stage on this rank."""


@dataclass(frozen=True)
class TimedAction:
    """An action with its times; for a receive, the times of the wait, not of the posting."""

    action: Action
    start_ns: int
    end_ns: int


@dataclass
class _Saved:
    """Data of a forward step for its backward."""

    input: torch.Tensor
    output: torch.Tensor | None
    embedded: torch.Tensor | None
    groups: list[dict[str, Any]] | None = None


Key = tuple[int, int, int]
"""Key of a tensor: pipeline, stage, micro-batch."""


def execute(
    row: Sequence[Action],
    work: Mapping[int, PipelineWork],
    communicator: Communicator,
    first_rank: int,
    device_timers: DeviceTimers | None = None,
    *,
    apart: int = 1,
    forward_only: bool = False,
) -> list[TimedAction]:
    """Run `row` and return its computations and receives with their times.

    `work` is by pipeline index; the peer in row n of the table is global rank `first_rank` + n * `apart`.
    `forward_only`: no backward follows, so no data is kept for one. Raises PeerLostError, and ValueError for a row that
    lacks an input or leaves one unused.
    """
    run = _Run(work, communicator, (first_rank, apart), device_timers or HostTimers(), keep=not forward_only)
    with torch.no_grad() if forward_only else nullcontext():
        for number, action in enumerate(row):
            try:
                run.do(action)
            except PeerLostError as error:
                raise error.during(f"step {number} of its schedule row, {_named(action)}") from error
            count_unit()
    try:
        run.finish()
    except PeerLostError as error:
        raise error.during("the end of its schedule row, when its last sends leave") from error
    return run.times()


class _Run:
    """State of one mini-batch on one rank."""

    def __init__(
        self,
        work: Mapping[int, PipelineWork],
        communicator: Communicator,
        places: tuple[int, int],
        device_timers: DeviceTimers,
        keep: bool,
    ) -> None:
        self._device_timers, self._keep = device_timers, keep
        self._measured: list[tuple[Action, Any, Any]] = []
        self._begun: Any = None
        """Start of the current computation, after its input arrived."""
        self._work, self._communicator = work, communicator
        self._first_rank, self._apart = places
        self._saved: dict[Key, _Saved] = {}
        self._forward: dict[Key, torch.Tensor] = {}  # output of a stage, for the next one
        self._backward: dict[Key, torch.Tensor] = {}  # output of a stage, for the previous one
        self._coming: dict[tuple[str, Key], tuple[Action, Handle, torch.Tensor]] = {}
        self._leaving: deque[tuple[Handle, torch.Tensor]] = deque()
        self._steps: dict[str, Callable[[Action, Key], None]] = {
            "F": self._do_forward,
            "B": self._do_backward,
            "I": self._do_input_gradient,
            "W": self._do_weight_gradient,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
        }

    def do(self, action: Action) -> None:
        step, key = self._steps[action.kind], (action.pipeline, action.stage, action.microbatch)
        if action.peer is not None:
            step(action, key)
            return
        self._begun = self._device_timers.mark()
        step(action, key)
        self._measured.append((action, self._begun, self._device_timers.mark()))

    def times(self) -> list[TimedAction]:
        """Return computations and receives with their times."""
        marks = [mark for _, *between in self._measured for mark in between]
        times = iter(self._device_timers.read(marks))
        return [TimedAction(action, next(times), next(times)) for action, _, _ in self._measured]

    def finish(self) -> None:
        """Wait for pending sends, then check that every stored tensor was used."""
        for handle, _ in self._leaving:
            handle.wait()
        left = [*self._saved, *self._forward, *self._backward, *(key for _, key in self._coming)]
        if left:
            raise ValueError(f"schedule row leaves work unfinished, such as (pipeline, stage, micro-batch) {left[0]}")

    # ------------------------------------------------------------ transfers

    def _send(self, action: Action, key: Key) -> None:
        tensor = self._take(self._forward if action.kind == "SEND_F" else self._backward, key, action)
        tensor = tensor.contiguous()
        while self._leaving and (len(self._leaving) >= SENDS_UNDER_WAY or self._leaving[0][0].is_completed()):
            self._leaving.popleft()[0].wait()
        self._leaving.append((self._communicator.send(tensor, self._peer(action)), tensor))

    def _receive(self, action: Action, key: Key) -> None:
        buffer = self._work[action.pipeline].like_hidden(action.microbatch)
        handle = self._communicator.receive(buffer, self._peer(action))
        self._coming[action.kind, key] = action, handle, buffer

    def _peer(self, action: Action) -> int:
        assert action.peer is not None
        return self._first_rank + action.peer * self._apart

    def _arrived(self, kind: str, key: Key) -> torch.Tensor | None:
        """Return the tensor of a posted receive after waiting for it; None if there is none."""
        if (kind, key) not in self._coming:
            return None
        action, handle, buffer = self._coming.pop((kind, key))
        start = self._device_timers.mark()
        handle.wait()
        self._begun = self._device_timers.mark()
        self._measured.append((action, start, self._begun))
        return buffer

    # ------------------------------------------------------------ computation

    def _do_forward(self, action: Action, key: Key) -> None:
        pipeline, stage, microbatch = key
        work = self._work[pipeline]
        embedded = None
        if stage == 0:
            embedded = work.embed(microbatch)
            hidden = embedded.detach()
        else:
            received = self._arrived("RECV_F", key)
            source = (pipeline, stage - 1, microbatch)
            hidden = received if received is not None else self._take(self._forward, source, action)
        if self._keep:
            hidden.requires_grad_()
        output = work.forward(stage, microbatch, hidden)
        if self._keep:
            self._saved[key] = _Saved(hidden, output, embedded)
        if stage < work.stages - 1:
            self._forward[key] = output.detach()

    def _output_gradient(self, action: Action, key: Key) -> torch.Tensor | None:
        """Return the gradient of the stage's output: received, computed on this rank, or None for the loss."""
        pipeline, stage, microbatch = key
        if stage == self._work[pipeline].stages - 1:
            return None
        received = self._arrived("RECV_B", key)
        source = (pipeline, stage + 1, microbatch)
        return received if received is not None else self._take(self._backward, source, action)

    def _do_backward(self, action: Action, key: Key) -> None:
        saved = self._take(self._saved, key, action)
        torch.autograd.backward(saved.output, self._output_gradient(action, key))
        self._pass_back(key, saved)
        self._finish_embedding(saved)

    def _do_input_gradient(self, action: Action, key: Key) -> None:
        saved = self._saved.get(key)
        if saved is None or saved.output is None:
            raise _missing(action)
        gradient = self._output_gradient(action, key)
        parameters = iter(self._work[action.pipeline].parameters(action.stage))
        _, saved.groups = stage_backward_input(
            [saved.output], None if gradient is None else [gradient], [saved.input], parameters
        )
        saved.output = None
        self._pass_back(key, saved)

    def _do_weight_gradient(self, action: Action, key: Key) -> None:
        saved = self._take(self._saved, key, action)
        if saved.groups is None:
            raise _missing(action)
        stage_backward_weight(iter(self._work[action.pipeline].parameters(action.stage)), saved.groups)
        self._finish_embedding(saved)

    def _pass_back(self, key: Key, saved: _Saved) -> None:
        if key[1] > 0:
            assert saved.input.grad is not None
            self._backward[key] = saved.input.grad

    @staticmethod
    def _finish_embedding(saved: _Saved) -> None:
        if saved.embedded is not None and saved.embedded.requires_grad:
            torch.autograd.backward(saved.embedded, saved.input.grad)

    @staticmethod
    def _take(store: dict[Key, Any], key: Key, action: Action) -> Any:
        if key not in store:
            raise _missing(action)
        return store.pop(key)


def _missing(action: Action) -> ValueError:
    return ValueError(f"schedule row: {_named(action)} comes before what it needs")


def _named(action: Action) -> str:
    return f"{action.kind} of pipeline {action.pipeline}, stage {action.stage}, micro-batch {action.microbatch}"
