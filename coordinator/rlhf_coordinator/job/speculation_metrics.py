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
    for drafter in settings.loaded_drafters:
        of_drafter, accepted = totals.of_drafter(drafter)
        if of_drafter:
            metrics[f"speculation/acceptance_{drafter.lower()}"] = accepted / of_drafter
    return metrics | (_ahead(run) if settings.ahead != "Disabled" else {})


def _ahead(run: JobRun) -> dict[str, float]:
    """Return the metrics of drafts ahead: those decoded in the iteration, and those compared with its samples."""
    ahead = run.state.ahead
    metrics = {
        "ahead/drafted_tokens": float(ahead.drafted),
        "ahead/compared_tokens": float(ahead.compared.total()),
        "ahead/right_tokens": float(ahead.right.total()),
        "ahead/parted_samples": float(ahead.parted),
        "ahead/idle_seconds": ahead.seconds,
    }
    for age, compared in sorted(ahead.compared.items()):
        if compared:
            metrics[f"ahead/right_share_age_{age}"] = ahead.right[age] / compared
    return metrics
