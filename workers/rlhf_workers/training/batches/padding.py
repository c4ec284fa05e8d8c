"""What the micro-batches of an iteration were like: how many, how large, and how much of them is padding.

Rule: the same on all ranks, as each knows the lengths of all samples; so nothing is summed over ranks.
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
    """Of each mini-batch, all replicas together, of the model that has most."""
    largest: int = 0
    """Tokens of the largest micro-batch, with padding."""
    tokens: int = 0
    """Of samples, each model's counted."""
    padded: int = 0
    """The same with padding."""

    def begin(self) -> None:
        """Forget what was counted."""
        self.micro_batches, self.largest, self.tokens, self.padded = [], 0, 0, 0

    def add_mini_batch(self, plan: MicroBatchPlan, lengths: Sequence[int]) -> None:
        """Count a mini-batch."""
        self.micro_batches.append(max(sum(map(len, made)) for made in plan.splits.values()))
        for made in plan.splits.values():
            sizes = [plan.tokens(cell, lengths) for replica in made for cell in replica]
            self.largest = max(self.largest, *sizes)
            self.padded += sum(sizes)
            self.tokens += sum(lengths[sample] for sample in plan.samples)

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return what is shown of an iteration; nothing where no mini-batch was trained."""
        if not self.micro_batches:
            return {}
        return {
            "train/padding": 1.0 - self.tokens / self.padded,
            "train/micro_batches": sum(self.micro_batches) / len(self.micro_batches),
            "train/largest_micro_batch_tokens": float(self.largest),
        }
