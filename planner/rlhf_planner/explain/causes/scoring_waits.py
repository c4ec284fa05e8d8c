"""Too few inference workers, or a slow reward: every response is finished, and the iteration waits for scores.

The gain is that of the scoring rate of more inference workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_planner.explain.finding import Finding, gained, spent
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.scoring_queue import awaited_task, more_workers


@dataclass
class ScoringWaits:
    """See the module."""

    name: str
    call: bool
    """Whether the cause is about the calls of a reward. Otherwise it is about the models of the job."""

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        task, more, last = awaited_task(facts[-1]), more_workers(facts), facts[-1]
        if task is None or task.call != self.call or more is None:
            return None
        present = last.settings.inference_workers
        workers = "1 inference worker" if present == 1 else f"{present} inference workers"
        verb = ("calls it" if self.call else "scores") if present == 1 else ("call it" if self.call else "score")
        waits = f"{more.waits / last.total:.0%} of the iteration ({more.waits:.3g} s) waits for the"
        scorer = f"reward {task.name!r}" if self.call else f"task {task.name!r}"
        summary = f"{waits} {scorer} after the last response; {workers} {verb}"
        change = {"field": "spec.inference.replicas", "value": str(more.workers)}
        if more.saved is None:
            why = "a replay of its queue does not match the measurement"
            return spent(self.name, facts[-1:], more.waits, summary, why, **change)
        how = f"its queue replayed with as many {'callers' if self.call else 'workers'}"
        return gained(self.name, facts[-1:], more.saved, summary, how, **change)
