"""Scoring that waits for the whole batch.

The gain is that of a replay in which each response is scored as soon as it is finished. The rate and latency of that
replay come from the first and the last score, so a replay of the unchanged iteration ends when the last score came: a
check of this replay against the measurement could not fail.
"""

from collections.abc import Sequence

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts
from rlhf_planner.explain.replays import scoring_end
from rlhf_planner.explain.scoring_queue import FILLED


class ScoringOverlap:
    """See the module."""

    name = "scoring waits for the whole batch"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        samples = last.samples
        if samples is None or not samples.scored or last.settings.overlap != "Disabled":
            return None
        if not last.settings.inference_workers:
            return None
        generated, scored = max(samples.finished), max(samples.scored)
        apart, latency = _pace(last, samples)
        saved = scored - max(generated, scoring_end(samples.finished, apart, latency))
        summary = (
            f"{scored - generated:.3g} s ({(scored - generated) / last.total:.0%} of the iteration) of scoring begin "
            "when the last response is finished; overlap is Disabled"
        )
        how = "its queue replayed with each response scored when it is finished"
        field = "spec.inference.overlap"
        return gained(self.name, facts[-1:], saved, summary, how, field=field, value="Enabled")


def _pace(last: IterationProfile, samples: SampleFacts) -> tuple[float, float]:
    """Return estimates for a replay: (mean seconds between two scores, least seconds from a response to its score)."""
    generated, count = max(samples.finished), len(samples.scored)
    first, scored = max(generated, min(samples.scored)), max(generated, *samples.scored)
    passes = sum(task.busy for task in last.tasks if not task.call)
    if passes and passes >= FILLED * (scored - generated) * last.settings.inference_workers:
        apart = (scored - generated) / count
        return apart, apart
    return (scored - first) / max(1, count - 1), first - generated
