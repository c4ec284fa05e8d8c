"""A training rank for the step `weights`: float32 weights on a device, published in bfloat16 by the product's service.

`python -m gpu_check.weight_rank cuda:0 SHAPE_AS_JSON` prints its port, then for every line `N` that it reads makes
the weights those of version N and says `held`. Ends with its input.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaForCausalLM

from gpu_check.random_models import LlamaShape, config_of
from rlhf_workers.failures import WorkError
from rlhf_workers.peer_server import start_server
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.weights.copies import WeightCopies
from rlhf_workers.weights.source import WeightSourceService


class RandomRank:
    """A WeightProvider: every version scales what was drawn."""

    def __init__(self, device: torch.device, shape: LlamaShape) -> None:
        torch.manual_seed(0)
        with device:
            model: Any = LlamaForCausalLM._from_config(config_of(shape), dtype=torch.float32)
        self.parameters: dict[str, torch.Tensor] = {name: value.detach() for name, value in model.named_parameters()}
        self.version = 0

    def become(self, version: int) -> None:
        """The weights of another version."""
        for value in self.parameters.values():
            value.mul_(1.0 + 1 / 16).add_(version / 1024)
        self.version = version

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters in bfloat16, as a rank does: each is converted when it is asked for."""
        for name, value in self.parameters.items():
            if version != self.version:
                raise WorkError("WrongVersion", f"{model} version {version} was asked for, {self.version} is here")
            yield name, value.to(torch.bfloat16)


async def main() -> None:
    """Serves until its input ends."""
    device = torch.device(sys.argv[1])
    rank = RandomRank(device, LlamaShape(**json.loads(sys.argv[2])))
    service = WeightSourceService(lambda: rank, WeightCopies(lent_by(device)))
    server = await start_server("127.0.0.1:0", None, service)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    while line := await asyncio.to_thread(sys.stdin.readline):
        rank.become(int(line))
        sys.stdout.write("held\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
