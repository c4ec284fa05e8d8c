"""A device without numbers that refuses what a GPU would refuse: PyTorch's `meta` with the rules of CUDA.

On `meta` all of training runs, including backward and optimizer, and computes only shapes and devices. PyTorch lets
several operations mix it with CPU tensors; here only those are allowed that CUDA allows: copies, and scalars. Reads
from the device, which make the host wait for the GPU, are counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRETENDED = torch.device("meta")
COPIES = ("aten::_to_copy", "aten::copy_")


class WrongDeviceError(Exception):
    """An operation on tensors of two devices."""


class CudaRules(TorchDispatchMode):
    """Checks every operation inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read_back: Counter[str] = Counter()
        """Operation -> number of times the host read from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(_tensors((args, kwargs or {})))
        on_device = [tensor for tensor in tensors if tensor.device == PRETENDED]
        on_host = [tensor for tensor in tensors if tensor.device != PRETENDED]
        name = func._schema.name
        if on_device and (name == "aten::_local_scalar_dense" or _reads(name, args, kwargs or {})):
            self.read_back[name] += 1
            return 1.0 if name == "aten::_local_scalar_dense" else _ones(args, kwargs or {})
        if on_device and any(tensor.dim() for tensor in on_host) and name not in COPIES:
            shapes = [f"{tensor.device.type} {list(tensor.shape)}" for tensor in tensors]
            raise WrongDeviceError(f"{name} of tensors on two devices: {', '.join(shapes)}")
        return func(*args, **(kwargs or {}))


def _reads(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    if name == "aten::copy_":
        return bool(args[0].device != PRETENDED and args[1].device == PRETENDED)
    return name == "aten::_to_copy" and torch.device(kwargs.get("device") or PRETENDED).type == "cpu"


def _ones(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    if len(args) > 1:  # copy_
        target: torch.Tensor = args[0]
        return target.fill_(1.0)
    return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        yield from _tensors(list(item.values()))
    elif isinstance(item, list | tuple):
        for member in item:
            yield from _tensors(member)
