"""The metrics of an iteration about samples that were carried into it, and the age of the weights that drew its tokens.

Rule: as in `iteration_metrics`; all of it follows from the ledger, so a coordinator that came back says the same.
"""

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.ledger import Ledger


def carried_tokens(ledger: Ledger) -> int:
    """Return how many tokens of the iteration's samples an earlier one drew."""
    return sum(len(sample.carried) for sample in ledger.samples)


def staleness_metrics(run: JobRun) -> dict[str, float]:
    """Return what was carried into the iteration and what of that is begun anew, and how many versions the weights that
    drew a token are older than those that are trained, over the tokens that are trained on; empty where none can be."""
    ledger = run.state.ledger
    if not run.context.spec.rollout.may_be_stale:
        return {}
    trained = [sample for sample in ledger.trainable if not sample.failed and not sample.abstained]
    ages = [(ledger.iteration - span.version, span.tokens) for one in trained for span in one.response.versions]
    tokens = sum(count for _, count in ages)
    return _carried(run) | {
        "staleness/mean": sum(age * count for age, count in ages) / max(1, tokens),
        "staleness/max": float(max((age for age, _ in ages), default=0)),
    }


def _carried(run: JobRun) -> dict[str, float]:
    ledger = run.state.ledger
    if not run.context.spec.rollout.max_staleness:
        return {}
    restarted = sum(one.restarted for one in ledger.carried)
    return {
        "samples/carried": float(len(ledger.carried) - restarted),
        "samples/restarted": float(restarted),
        "tokens_carried": float(carried_tokens(ledger)),
    }
