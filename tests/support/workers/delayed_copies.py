"""A copy stream as slow as allowed: a copy happens only when its mark is waited for, and a wrong order fails.

Until then a target has garbage, and a source must not change, because a GPU may read it at any time in between.
"""

from dataclasses import dataclass, field

import torch

RUBBISH = 0xA5


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass
class _Queued:
    target: torch.Tensor
    source: torch.Tensor
    expected: torch.Tensor


@dataclass
class DelayedCopies:
    """Implements `CopyStream`."""

    queued: list[_Queued] = field(default_factory=list)
    each_computed: bool = False
    """Whether every source was just computed, so that each copy must follow the computation."""
    followed: bool = False
    waits: int = 0
    copied: int = 0

    def follow_compute(self) -> None:
        self.followed = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.followed, "the copy does not wait for what computes its source"
        self.followed = not self.each_computed
        self.queued.append(_Queued(target, source, source.detach().clone()))
        with torch.no_grad():
            raw_target = target.view(-1) if target.is_contiguous() else target
            raw_target.copy_(
                torch.full((target.numel() * target.element_size(),), RUBBISH, dtype=torch.uint8)
                .view(target.dtype)
                .view(raw_target.shape)
            )

    def mark(self) -> "DelayedMark":
        return DelayedMark(self, self.copied + len(self.queued))


@dataclass
class DelayedMark:
    """Implements `CopyMark`."""

    copies: DelayedCopies
    until: int

    def wait(self) -> None:
        self.copies.waits += 1
        self._run()

    def hold_compute(self) -> None:
        self._run()

    def _run(self) -> None:
        while self.copies.copied < self.until:
            queued = self.copies.queued.pop(0)
            assert torch.equal(raw(queued.source), raw(queued.expected)), "a source changed before it was copied"
            with torch.no_grad():
                queued.target.copy_(queued.source)
            self.copies.copied += 1
