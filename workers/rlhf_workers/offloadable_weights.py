"""A model's weights between host memory and the device that computes with them.

Rule: offloaded means that no weight is on the device, onloaded that all of them are. A frozen model is copied to host
memory once and from then on only dropped from the device; one whose weights are replaced is copied back. On a CPU
nothing ever moves. Must never leave a model half on each side.
"""

from collections.abc import Iterator

import torch
from torch import nn


class OffloadableWeights:
    """Weights and buffers of one model."""

    def __init__(self, model: nn.Module, device: torch.device, *, frozen: bool) -> None:
        """`model` may be loaded on `device` (onloaded) or on the CPU (offloaded)."""
        self._model = model
        self._device = device
        self._frozen = frozen
        self._host: dict[int, torch.Tensor] = {}
        self.offloaded = any(tensor.device.type != device.type for tensor in self._tensors())

    def offload(self) -> None:
        """Moves everything to host memory and frees the device."""
        if self.offloaded or self._device.type == "cpu":
            return
        for tensor in self._tensors():
            host = self._host.get(id(tensor))
            if host is None:
                host = self._host[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor)
            elif not self._frozen:
                host.copy_(tensor)
            tensor.data = host
        self.offloaded = True
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Brings everything to the device; returns when it is there."""
        if not self.offloaded:
            return
        for tensor in self._tensors():
            host = self._host.setdefault(id(tensor), tensor.data.pin_memory())
            tensor.data = host.to(self._device, non_blocking=True)
        torch.cuda.synchronize(self._device)
        self.offloaded = False

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
