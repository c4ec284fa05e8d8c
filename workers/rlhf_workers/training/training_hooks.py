"""Additional parts of training besides the trainer: draft models, experts, offload, padding; each is a `TrainingHook`.

Rule: every rank calls the hooks in the same order. A hook must never change the value of a parameter, a gradient or a
statistic of a model with an objective during an iteration.
"""

from collections.abc import Collection, Sequence

from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.stages.stage_work import Note


class TrainingHook:
    """Callbacks of training and offloading. A subclass overrides those that it needs; the others do nothing."""

    def begin(self) -> None:
        """Start an iteration, also after a failed one."""

    def add_mini_batch(self, plan: MicroBatchPlan, lengths: Sequence[int], *, continued: bool = False) -> None:
        """Count a split mini-batch. If the policy comes first, the pass of the critics does not call this.

        `continued`: it is another chunk of the mini-batch before it.
        """

    def policy_note(self) -> Note | None:
        """Return the function that receives the states of the policy's last stage, if there is one."""
        return None

    def backward(self, tokens: int) -> None:
        """Follow the policy's passes of a mini-batch, before its gradients are summed; `tokens`: trained tokens over
        all ranks."""

    def forget(self) -> None:
        """Drop a mini-batch that the policy skips because a number is not finite."""

    def step(self) -> None:
        """Follow the policy's step on this mini-batch."""

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return the metrics of an iteration that trained the models `trained`."""
        return {}

    def offload(self) -> None:
        """Move this hook's state to host memory, between two trainings."""

    def onload(self) -> None:
        """Move everything back to the device unchanged."""
