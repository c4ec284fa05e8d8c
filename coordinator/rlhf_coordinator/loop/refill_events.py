"""The consequences of a growing iteration: the state gets the new prompts, and people are informed.

Must never change the ledger.
"""

import logging

from rlhf_coordinator.job.job_run import JobRun, load_iteration_prompts

log = logging.getLogger(__name__)


def follow(run: JobRun) -> None:
    """Process a possible growth or completion of the ledger; nothing where groups are not refilled."""
    ledger, refill = run.state.ledger, run.state.ledger.refill
    if not refill.rule.rounds:
        return
    run.totals.dropped += ledger.group_size * (len(refill.dropped) - run.state.groups_dropped)
    run.state.groups_dropped = len(refill.dropped)
    if len(run.state.prompt_tokens) < len(ledger.samples):
        run.totals.refilled += len(ledger.samples) - len(run.state.prompt_tokens)
        load_iteration_prompts(run.state, run.prompts)
    if refill.dropped and ledger.all_scored and not run.state.refill_told:
        run.state.refill_told = True
        text = summary(run)
        log.log(logging.WARNING if refill.missing else logging.INFO, "%s", text)
        run.event("batch-not-full" if refill.missing else "batch-refilled", text)


def summary(run: JobRun) -> str:
    """Describe the dropped, added and missing groups of a scored iteration in words."""
    refill = run.state.ledger.refill
    added, rounds = refill.groups - refill.first, refill.rounds
    text = (
        f"iteration {run.state.iteration}: {len(refill.dropped)} of {refill.groups} prompt groups are dropped, as "
        f"their rewards are all equal; {added} took their place in {rounds} round{'s' if rounds != 1 else ''}"
    )
    if not refill.missing:
        return text
    fates = {"Mask": "are masked out", "Train": "are trained on all the same", "Fail": "stay empty, and the job fails"}
    return f"{text}; {refill.missing} places of the batch {fates[refill.rule.used_up]}"
