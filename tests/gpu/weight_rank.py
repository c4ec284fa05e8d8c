"""A training rank for the step `weights`: float32 weights on a device, published in bfloat16 by the product's service.

`python -m tests.gpu.weight_rank cuda:0 CONFIG_AS_JSON` reads the commands of tests.support.workers.weight_lender. It
must never store a converted weight: like a rank, it converts each on request.
"""

import asyncio
import json
import sys
from collections.abc import Iterator

import torch
from tests.gpu.models import random_model
from tests.support.workers.weight_lender import serve
from transformers import LlamaConfig

from rlhf_workers.failures import WorkError


class RandomRank:
    """A WeightProvider with random weights, which every new version scales and shifts."""

    def __init__(self, device: torch.device, config: LlamaConfig) -> None:
        model = random_model(config, torch.float32, device)
        self.parameters: dict[str, torch.Tensor] = {name: value.detach() for name, value in model.named_parameters()}
        self._version = 0

    @property
    def version(self) -> int:
        """Return the present version; setting it changes the weights."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        for value in self.parameters.values():
            value.mul_(1.0 + 1 / 16).add_(version / 1024)
        self._version = version

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters in bfloat16."""
        for name, value in self.parameters.items():
            if version != self.version:
                raise WorkError("WrongVersion", f"{model} version {version} was asked for, {self.version} is here")
            yield name, value.to(torch.bfloat16)


if __name__ == "__main__":
    DEVICE = torch.device(sys.argv[1])
    asyncio.run(serve(RandomRank(DEVICE, LlamaConfig(**json.loads(sys.argv[2]))), DEVICE))
