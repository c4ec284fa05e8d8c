"""A model's weights between host memory and the device that computes with them.

Rule: parked means no weight on the device; awake means all of them. A frozen model is copied to host memory once and
from then on only dropped from the device; one whose weights are replaced is copied back. On a CPU nothing ever moves.
Must never leave a model half on each side.
"""

from collections.abc import Iterator

import torch
from torch import nn


class HostCopy:
    """Weights and buffers of one model."""

    def __init__(self, model: nn.Module, device: torch.device, *, frozen: bool) -> None:
        """`model` may be loaded on `device` (awake) or on the CPU (parked)."""
        self._model = model
        self._device = device
        self._frozen = frozen
        self._host: dict[int, torch.Tensor] = {}
        self.parked = any(tensor.device.type != device.type for tensor in self._tensors())

    def park(self) -> None:
        """Frees the device."""
        if self.parked or self._device.type == "cpu":
            return
        for tensor in self._tensors():
            host = self._host.get(id(tensor))
            if host is None:
                host = self._host[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor)
            elif not self._frozen:
                host.copy_(tensor)
            tensor.data = host
        self.parked = True
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Brings everything to the device; returns when it is there."""
        if not self.parked:
            return
        for tensor in self._tensors():
            host = self._host.setdefault(id(tensor), tensor.data.pin_memory())
            tensor.data = host.to(self._device, non_blocking=True)
        torch.cuda.synchronize(self._device)
        self.parked = False

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
