"""A slow reward: every response is finished, and the iteration waits for a reward function, endpoint or judge.

The gain is that of more inference workers, each with the same number of concurrent calls. Rule: applies where samples
waited for a call; `few_inference_workers` covers the job's own models.
"""

from collections.abc import Sequence

from rlhf_planner.explain.finding import Finding, gained, spent
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.scoring_queue import awaited_task, more_workers


class SlowReward:
    """See the module."""

    name = "slow reward"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        task, more, last = awaited_task(facts[-1]), more_workers(facts), facts[-1]
        if task is None or not task.call or more is None:
            return None
        present = last.settings.inference_workers
        callers = "1 inference worker calls it" if present == 1 else f"{present} inference workers call it"
        summary = (
            f"{more.waits / last.total:.0%} of the iteration ({more.waits:.3g} s) waits for the reward {task.name!r} "
            f"after the last response; {callers}"
        )
        change = {"field": "spec.inference.replicas", "value": str(more.workers)}
        if more.saved is None:
            why = "a replay of its queue does not match the measurement"
            return spent(self.name, facts[-1:], more.waits, summary, why, **change)
        return gained(self.name, facts[-1:], more.saved, summary, "its queue replayed with as many callers", **change)
