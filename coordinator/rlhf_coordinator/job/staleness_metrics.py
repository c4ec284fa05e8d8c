"""The metrics of an iteration about the prompts that share its batch, and the age of the weights that drew its tokens.

Rule: read only.
"""

import statistics

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.ledger import Ledger


def carried_tokens(ledger: Ledger) -> int:
    """Return the number of tokens that earlier iterations drew for the iteration's samples."""
    return sum(len(sample.carried) for sample in ledger.samples)


def staleness_metrics(run: JobRun) -> dict[str, float]:
    """Return the numbers of carried and restarted samples, and the staleness of the trained tokens.

    Staleness is the number of versions between the weights that drew a token and those in training.
    """
    ledger = run.state.ledger
    if not run.context.spec.rollout.may_be_stale:
        return {}
    trained = [sample for sample in ledger.trainable if not sample.failed and not sample.abstained]
    ages = [(ledger.iteration - span.version, span.tokens) for sample in trained for span in sample.response.versions]
    tokens = sum(count for _, count in ages)
    return _carried(run) | {
        "staleness/mean": sum(age * count for age, count in ages) / max(1, tokens),
        "staleness/max": float(max((age for age, _ in ages), default=0)),
    }


def _carried(run: JobRun) -> dict[str, float]:
    ledger = run.state.ledger
    if not run.context.spec.rollout.max_staleness:
        return {}
    restarted = sum(sample.restarted for sample in ledger.carried)
    return {
        "samples/carried": float(len(ledger.carried) - restarted),
        "samples/restarted": float(restarted),
        "tokens_carried": float(carried_tokens(ledger)),
    }


def waiting_prompts(ledger: Ledger) -> int:
    """Return the number of prompts that are cut off or wait after the iteration."""
    return len(ledger.carry_over()) // ledger.group_size


def round_metrics(run: JobRun) -> dict[str, float]:
    """Return whether the iteration is a long round (1 or 0), and how many prompts wait after it; empty without long
    rounds."""
    spec, ledger = run.context.spec, run.state.ledger
    if spec.rollout.long_rounds == "Disabled":
        return {}
    schedule = run.prompts.schedules.at(ledger.iteration)
    chosen = {"rollout/surplus_prompts": float(schedule.extra)} if spec.rollout.long_rounds == "Auto" else {}
    if spec.rollout.keep_cut == "Drafts":
        chosen["rollout/draft_tokens_kept"] = float(run.state.siblings.earlier.tokens)
    return chosen | {
        "rollout/long_round": float(schedule.is_long(ledger.iteration)),
        "prompts/waiting": float(waiting_prompts(ledger)),
    }


def window_metrics(run: JobRun) -> dict[str, float]:
    """Return whether the batch is one of a sorted window (1 or 0), and the expected mean length of the responses to its
    prompts of known length; the latter is absent without any, and the result is empty without sorted windows."""
    if run.context.spec.prompts.length_window < 2:
        return {}
    state, ledger = run.state, run.state.ledger
    lines = [state.prompt_lines[sample.index] for sample in ledger.uncut_samples]
    expected = [state.expected_lengths[line] for line in lines if line in state.expected_lengths]
    mean = {"rollout/expected_tokens_mean": statistics.fmean(expected)} if expected else {}
    return {"rollout/sorted_batch": float(bool(ledger.carried))} | mean
