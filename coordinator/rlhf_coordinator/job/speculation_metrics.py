"""The metrics of an iteration about drafts and shared sibling tokens.

Rule: read only; a ratio without a denominator is absent.
"""

from rlhf_coordinator.job.job_run import JobRun


def speculation_metrics(run: JobRun) -> dict[str, float]:
    """Return the metrics of drafting and sibling tokens in the iteration; empty where speculation is disabled."""
    settings, state = run.context.spec.generation.speculation, run.state
    if settings.mode == "Disabled":
        return {}
    totals, siblings = state.speculation.iteration, state.siblings
    drafted = totals.drafted.total()
    metrics = {
        "speculation/drafted": float(drafted),
        "speculation/accepted": float(totals.accepted.total()),
        "speculation/draft_seconds": totals.draft_seconds,
        "speculation/verify_seconds": totals.verify_seconds,
        "siblings/sent": float(siblings.sent),
        "siblings/dropped": float(siblings.dropped),
        "siblings/earlier_tokens": float(siblings.earlier.tokens),
    }
    if totals.samples:
        metrics["speculation/tokens_per_step"] = totals.tokens_per_step
        metrics["speculation/drafted_step_share"] = totals.drafted_share
        metrics["speculation/probe_share"] = totals.probes / totals.steps
    if totals.seconds > 0:
        metrics["speculation/regret_share"] = totals.regret_seconds / totals.seconds
    if drafted:
        metrics["speculation/acceptance"] = totals.acceptance
    for drafter in settings.drafters:
        of_drafter, accepted = totals.of_drafter(drafter)
        if of_drafter:
            metrics[f"speculation/acceptance_{drafter.lower()}"] = accepted / of_drafter
    return metrics
