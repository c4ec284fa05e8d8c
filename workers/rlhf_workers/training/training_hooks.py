"""What takes part in training beside the trainer: draft models, experts, offload, padding; each one `TrainingHook`.

Rule: every rank calls the hooks in the same order, as some of them sum over ranks. A hook must never change a
parameter, gradient or statistic of a model that has an objective.
"""

from collections.abc import Collection, Sequence

from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.stages.stage_work import Note


class TrainingHook:
    """Calls at the points of an iteration. A subclass overrides those that it needs; the others do nothing."""

    def begin(self) -> None:
        """An iteration begins, also after one that failed."""

    def add_mini_batch(self, plan: MicroBatchPlan, lengths: Sequence[int]) -> None:
        """A mini-batch has been split; where the policy comes first, the second pass is not counted."""

    def policy_note(self) -> Note | None:
        """Return the function that sees the states of the policy's last stage, if one does."""
        return None

    def backward(self, tokens: int) -> None:
        """The policy's gradients of a mini-batch are there, not summed; `tokens`: trained ones on all ranks."""

    def forget(self) -> None:
        """The policy takes no step by this mini-batch, because a number is not finite."""

    def step(self) -> None:
        """The policy has taken its step by this mini-batch."""

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return what to show of the iteration, in which the models `trained` were trained."""
        return {}

    def offload(self) -> None:
        """Move everything between two trainings to host memory."""

    def onload(self) -> None:
        """Move everything back to the device, as it was."""
