"""What the stages of one pipeline compute on one mini-batch: the executor's `PipelineWork`, made of real stages."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from rlhf_workers.algorithms.objectives import Objective
from rlhf_workers.training.model_stages import ModelStage
from rlhf_workers.training.training_batch import MicroBatch


class StageWork:
    """The stages of one pipeline that this rank holds, over the micro-batches of one replica.

    Hidden states cross stages in float32, whatever the compute type: a split changes no rounding.
    """

    def __init__(
        self,
        stages: int,
        held: Mapping[int, ModelStage],
        microbatches: Sequence[MicroBatch],
        objective: Objective,
        compute: torch.dtype,
    ) -> None:
        self.stages = stages
        self.held, self._microbatches, self._objective, self._compute = held, microbatches, objective, compute
        any_stage = next(iter(held.values()))
        self._hidden_size: int = any_stage.config.hidden_size

    def like_hidden(self, microbatch: int) -> torch.Tensor:
        tokens = self._microbatches[microbatch].tokens
        return torch.empty(*tokens.shape, self._hidden_size, device=tokens.device)

    def embed(self, microbatch: int) -> torch.Tensor:
        return self.held[0].embed(self._microbatches[microbatch].tokens)

    def forward(self, stage: int, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        module = self.held[stage]
        with self._precision(hidden.device):
            output: torch.Tensor = module(hidden)
            if stage == self.stages - 1:
                return self._objective.loss(module, output, self._microbatches[microbatch])
        return output.float()

    def parameters(self, stage: int) -> list[torch.nn.Parameter]:
        return list(self.held[stage].parameters())

    def _precision(self, device: torch.device) -> AbstractContextManager[None]:
        if self._compute == torch.float32:
            return nullcontext()
        autocast: AbstractContextManager[None] = torch.autocast(device.type, dtype=self._compute)
        return autocast
