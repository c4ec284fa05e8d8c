"""Balance of tokens over the experts of every layer in an iteration: two numbers per model with experts.

Rule: rows are counted when a layer sends them to experts, including padding and recomputation, and training does not
read the counts. All ranks call `metrics` together. Skipped unless every rank holds a stage of every model.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from rlhf_workers.models.experts import has_experts, layers_of_experts
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.training_hooks import TrainingHook

Stages = Mapping[tuple[str, int], PipelineStage]


class LayerLoad:
    """Rows of one layer on this rank, by chosen expert."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, counts: Sequence[int]) -> None:
        """Add the counts of a forward, one per expert."""
        self.rows = [total + count for total, count in zip(self.rows or [0] * len(counts), counts, strict=True)]


class ExpertLoad(TrainingHook):
    """Row counts of the stages with experts on a rank."""

    def __init__(self, stages: Stages, layout: RankLayout, communicator: Communicator, device: torch.device) -> None:
        """Register with every layer of experts for its row counts."""
        self._communicator, self._device = communicator, device
        of_experts = {model for (model, _), stage in stages.items() if has_experts(stage.config)}
        self._models = [model for model in layout.models if layout.every_rank_has_all and model in of_experts]
        self._layers: dict[tuple[str, int], list[LayerLoad]] = {key: [] for key in stages}
        for key, stage in stages.items():
            for layer in layers_of_experts(stage):
                layer.tell_counts = use = LayerLoad()  # type: ignore[assignment]
                self._layers[key].append(use)

    def begin(self) -> None:
        """Reset the counts."""
        for layers in self._layers.values():
            for layer in layers:
                layer.rows = []

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return two numbers per trained model whose experts got tokens, each from its worst layer: the most rows of an
        expert as a multiple of an even share, and the share of experts without a row.
        """
        models = [model for model in self._models if model in trained]
        if not models:
            return {}
        communicator, device = self._communicator, self._device
        found = torch.full((len(models), 2), -1.0, dtype=torch.float64, device=device)
        for key in layout.local_stages:
            layers = [layer.rows for layer in self._layers[key] if layer.rows] if key[0] in models else []
            if layers:
                rows = torch.tensor(layers, dtype=torch.float64, device=device)
                communicator.all_reduce_sum(rows, layout.holders(*key))
                load = (rows.amax(dim=1) / rows.mean(dim=1).clamp(min=1.0 / rows.shape[1])).max()
                unused = (rows == 0).double().mean(dim=1).max()
                place = models.index(key[0])
                found[place] = torch.maximum(found[place], torch.stack((load, unused)))
        communicator.all_reduce_max(found, tuple(range(layout.world)))
        metrics: dict[str, float] = {}
        for model, (load_of, unused_of) in zip(models, found.tolist(), strict=True):
            if load_of >= 0:
                metrics |= {f"train/expert_load/{model}": load_of, f"train/experts_unused/{model}": unused_of}
        return metrics
