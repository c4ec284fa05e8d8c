"""Moments in host memory: bitwise those of the device, at most two chunks on the device, and copies as late as
allowed."""

from collections.abc import Callable

import pytest
import torch

from rlhf_api.job.groups import Optimizer
from rlhf_workers.devices.copy_stream import CopyMark, HostCopyStream
from rlhf_workers.training.optimizers.adamw import MOMENTS, UNIT, AdamW, DeviceAdamW, HostAdamW

FIELDS = Optimizer(weight_decay=0.1)
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (37, 24), "matrix": (24, 31), "norm": (24,), "bias": (5,), "large": (61, 67), "one": (1,),
}  # fmt: skip
STEPS = 6
BEGUN = 4
ALL = 2**30
PIECES = [2 * 4 * UNIT, 2 * 4 * UNIT * 5, 2 * 4 * 1024, ALL]
"""Bytes of both moments of a chunk."""


class LateCopies(HostCopyStream):
    """Delays each copy until the first wait for it, as a device may; then copies in order, as a device does."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host.untyped_storage().data_ptr()
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = 0
        self.followed = False

    def follow_compute(self) -> None:
        self.followed = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        comes = source.untyped_storage().data_ptr() == self._host
        assert comes or self.followed, "what is computed goes before it is there"
        self._queued.append((target, source))

    def mark(self) -> CopyMark:
        return _LateMark(self, len(self._queued))

    def made_until(self, end: int) -> None:
        for target, source in self._queued[self._made : end]:
            target.copy_(source)
        self._made = max(self._made, end)


class _LateMark:
    def __init__(self, copies: LateCopies, end: int) -> None:
        self._copies, self._end = copies, end

    def wait(self) -> None:
        self._copies.made_until(self._end)

    def hold_compute(self) -> None:
        self._copies.made_until(self._end)
        self._copies.followed = False


class CountedMemory:
    """Implements `OffloadMemory`, and counts device memory. No value is zero by chance."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Bytes of device memory, by step."""

    def host(self, size: int) -> torch.Tensor:
        self._host = torch.full((size,), 255, dtype=torch.uint8)
        return self._host

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        self.steps[-1] += like.nbytes
        return torch.full_like(like, torch.nan)

    def copies(self) -> LateCopies:
        self.steps.append(0)
        return LateCopies(self._host)

    def free(self) -> int:
        return 0


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    result = {}
    for name, shape in SHAPES.items():
        result[name] = torch.randn(shape, generator=generator).requires_grad_()
        result[name].grad = torch.zeros(shape)
    return result


Trained = tuple[AdamW, dict[str, torch.Tensor]]


def on_device(values: dict[str, torch.Tensor]) -> AdamW:
    return DeviceAdamW(values, FIELDS)


def on_host(values: dict[str, torch.Tensor]) -> AdamW:
    return HostAdamW(values, FIELDS, CountedMemory(), PIECES[1])


def stepped(
    build: Callable[[dict[str, torch.Tensor]], AdamW], last: int = STEPS, begun: Trained | None = None
) -> Trained:
    """Return parameters after `last` steps, with gradients that depend only on the step; `begun` has taken some of
    them."""
    values, first = parameters(), 0
    adamw = build(values)
    if begun is not None:
        first = BEGUN
        for name, value in values.items():
            value.detach().copy_(begun[1][name].detach())
            adamw.take(name, dict(begun[0].moments(name)).__getitem__, first)
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        for value in values.values():
            assert value.grad is not None
            value.grad.copy_(torch.randn(value.shape, generator=generator))
        adamw.step(1e-2 / (number + 1))
    return adamw, values


def assert_same(ours: Trained, theirs: Trained) -> None:
    for name in SHAPES:
        assert torch.equal(ours[1][name], theirs[1][name]), name
        left, right = ours[0].moments(name), theirs[0].moments(name)
        for moment in MOMENTS:
            assert left[moment].shape == right[moment].shape
            assert torch.equal(left[moment], right[moment]), (name, moment)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece", PIECES)
def test_weights_and_moments_are_the_bits_of_moments_on_the_device(piece: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        memory = CountedMemory()
        host = stepped(lambda values: HostAdamW(values, FIELDS, memory, piece))
        assert_same(host, stepped(on_device))
    finally:
        torch.set_num_threads(before)
    assert list(host[0].on_device()) == []


@pytest.mark.parametrize("piece", PIECES)
def test_the_device_has_no_more_than_two_pieces_of_them(piece: int) -> None:
    memory = CountedMemory()
    host, _ = stepped(lambda values: HostAdamW(values, FIELDS, memory, piece))
    assert len(memory.steps) == STEPS
    assert 0 < max(memory.steps) <= min(2 * piece, host.host_bytes * 2)
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert elements <= host.host_bytes / 8 < elements + UNIT * len(SHAPES), (
        "no more of the host than to begin at a line"
    )


@pytest.mark.parametrize(("first", "second"), [(on_device, on_host), (on_host, on_device), (on_host, on_host)])
def test_moments_go_on_from_one_to_the_other(
    first: Callable[[dict[str, torch.Tensor]], AdamW], second: Callable[[dict[str, torch.Tensor]], AdamW]
) -> None:
    assert_same(stepped(second, begun=stepped(first, BEGUN)), stepped(on_device))


def test_before_the_first_step_moments_are_zero() -> None:
    host = HostAdamW(parameters(), FIELDS, CountedMemory(), ALL)
    for name, shape in SHAPES.items():
        for moment in MOMENTS:
            assert torch.equal(host.moments(name)[moment], torch.zeros(shape))


def test_a_rank_that_steps_nothing_holds_nothing() -> None:
    memory = CountedMemory()
    host = HostAdamW({}, FIELDS, memory, ALL)
    host.step(1e-3)
    assert (host.host_bytes, memory.steps) == (0, [])
