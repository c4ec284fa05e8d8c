"""Work of one pipeline's stages on one mini-batch: the executor's `PipelineWork` for real stages."""

from collections.abc import Callable, Mapping, Sequence

import torch

from rlhf_workers.models.precision import casting
from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.batches.training_batch import MicroBatch
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.stages.pipeline_stage import PipelineStage

Ending = Callable[[PipelineStage, torch.Tensor, MicroBatch], torch.Tensor]
"""Function of the last stage's normed states [b, L, hidden] and a micro-batch of tokens [b, L]; in training it returns
the loss."""
Note = Callable[[PipelineStage, torch.Tensor, MicroBatch], None]
"""Receives the last stage, its normed states [b, L, hidden] and their micro-batch; must not change them."""


class StageWork:
    """The stages of one pipeline on this rank, over the micro-batches of one replica.

    Hidden states cross stages in float32 for any compute type.
    """

    def __init__(
        self,
        stages: int,
        local_stages: Mapping[int, PipelineStage],
        microbatches: Sequence[MicroBatch],
        ending: Ending,
        compute: torch.dtype,
        notes: Sequence[Note] = (),
    ) -> None:
        """`notes` receive the outputs of the last stage."""
        self.stages, self._notes = stages, notes
        self.local_stages, self._microbatches, self._ending, self._compute = local_stages, microbatches, ending, compute
        self._any_stage = next(iter(local_stages.values()))
        self._hidden_size: int = self._any_stage.config.hidden_size

    def like_hidden(self, microbatch: int) -> torch.Tensor:
        tokens = self._microbatches[microbatch].tokens
        length = self._any_stage.own_positions(tokens.shape[1])
        return torch.empty(len(tokens), length, self._hidden_size, device=tokens.device)

    def embed(self, microbatch: int) -> torch.Tensor:
        return self.local_stages[0].embed(self._microbatches[microbatch].tokens)

    def forward(self, stage: int, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        module, of = self.local_stages[stage], self._microbatches[microbatch]
        with casting(hidden.device, self._compute):
            output: torch.Tensor = module(hidden, of.packed, of.cut)
            if stage == self.stages - 1:
                output = output[:, : of.tokens.shape[1]]
                for note in self._notes:
                    note(module, output, of)
                return self._ending(module, output, of)
        return output.float()

    def parameters(self, stage: int) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.local_stages[stage].parameters() if parameter.requires_grad]


def mini_batch_work(
    layout: RankLayout,
    stages: Mapping[tuple[str, int], PipelineStage],
    plan: MicroBatchPlan,
    endings: Mapping[str, Ending],
    cell: Callable[[list[int]], MicroBatch],
    compute: torch.dtype,
    notes: Mapping[str, Sequence[Note]],
) -> dict[int, StageWork]:
    """Return a rank's work on a mini-batch, by pipeline index, for the models with an ending.

    `cell` makes the micro-batch of some samples.
    """
    by_samples: dict[tuple[int, ...], MicroBatch] = {}
    work = {}
    for index, pipeline in enumerate(layout.table.pipelines):
        model = pipeline.model
        own_stages = {stage: stages[name, stage] for name, stage in stages if name == model}
        if not own_stages or model not in endings:
            continue
        microbatches = []
        for chosen in plan.splits[model][layout.replica(index)]:
            if tuple(chosen) not in by_samples:
                by_samples[tuple(chosen)] = cell(chosen)
            microbatches.append(by_samples[tuple(chosen)])
        seen_by = notes.get(model, ())
        work[index] = StageWork(len(pipeline.stage_ranks), own_stages, microbatches, endings[model], compute, seen_by)
    return work
