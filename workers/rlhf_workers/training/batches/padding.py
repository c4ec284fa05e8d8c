"""Statistics of an iteration's micro-batches: number, size, and share of padding.

Rule: all ranks compute the same values, because each knows the lengths of all samples; no sum over ranks is needed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.training_hooks import TrainingHook


@dataclass
class Padding(TrainingHook):
    """Counts the micro-batches of an iteration."""

    micro_batches: list[int] = field(default_factory=list)
    """Micro-batches per mini-batch, over all replicas of the model with the most."""
    largest: int = 0
    """Tokens of the largest micro-batch, with padding."""
    tokens: int = 0
    """Tokens of samples, counted once per model."""
    padded: int = 0
    """The same, including padding."""

    def begin(self) -> None:
        """Reset the counts."""
        self.micro_batches, self.largest, self.tokens, self.padded = [], 0, 0, 0

    def add_mini_batch(self, plan: MicroBatchPlan, lengths: Sequence[int]) -> None:
        """Count a mini-batch."""
        self.micro_batches.append(max(sum(map(len, replicas)) for replicas in plan.splits.values()))
        for replicas in plan.splits.values():
            sizes = [plan.tokens(cell, lengths) for replica in replicas for cell in replica]
            self.largest = max(self.largest, *sizes)
            self.padded += sum(sizes)
            self.tokens += sum(lengths[sample] for sample in plan.samples)

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return the metrics of an iteration; empty if no mini-batch was trained."""
        if not self.micro_batches:
            return {}
        return {
            "train/padding": 1.0 - self.tokens / self.padded,
            "train/micro_batches": sum(self.micro_batches) / len(self.micro_batches),
            "train/largest_micro_batch_tokens": float(self.largest),
        }
