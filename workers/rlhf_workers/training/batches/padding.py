"""Statistics of an iteration's micro-batches: number, size, shares of padding and of shared prompts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.training_hooks import TrainingHook


@dataclass
class Padding(TrainingHook):
    """Counts the micro-batches of an iteration."""

    shares_prompts: bool = False
    """Whether samples may share prompts."""
    micro_batches: list[int] = field(default_factory=list)
    """Micro-batches per mini-batch, over all replicas of the model with the most."""
    largest: int = 0
    """Tokens of the largest micro-batch, with padding."""
    tokens: int = 0
    """Tokens of samples, counted once per model."""
    padded: int = 0
    """Tokens of samples with padding, counted once per model."""
    spared: int = 0
    """Tokens of samples that were not computed, as others have the same prompt, counted once per model."""

    def begin(self) -> None:
        """Reset the counts."""
        self.micro_batches, self.largest, self.tokens, self.padded, self.spared = [], 0, 0, 0, 0

    def add_mini_batch(self, plan: MicroBatchPlan, lengths: Sequence[int], *, continued: bool = False) -> None:
        """Count a mini-batch, or a part of one."""
        count = max(sum(map(len, replicas)) for replicas in plan.splits.values())
        if continued and self.micro_batches:
            self.micro_batches[-1] += count
        else:
            self.micro_batches.append(count)
        for replicas in plan.splits.values():
            sizes = [plan.tokens(cell, lengths) for replica in replicas for cell in replica]
            self.largest = max(self.largest, *sizes)
            tokens = sum(lengths[sample] for sample in plan.samples)
            spared = 0 if plan.prompts is None else tokens - sum(sizes)
            self.padded += sum(sizes) + spared
            self.tokens += tokens
            self.spared += spared

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return the metrics of an iteration; empty if no mini-batch was trained."""
        if not self.micro_batches:
            return {}
        shared = {"train/shared_prompt_ratio": 1.0 - self.spared / self.padded} if self.shares_prompts else {}
        return shared | {
            "train/padding": 1.0 - self.tokens / self.padded,
            "train/micro_batches": sum(self.micro_batches) / len(self.micro_batches),
            "train/largest_micro_batch_tokens": float(self.largest),
        }
