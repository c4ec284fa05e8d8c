"""Metrics of speculative decoding from the coordinator: drafts of all workers, and tokens shared for them."""

from functools import partial
from typing import Final

from rlhf_common.metrics import labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge

_OFF: Final = "the job decodes token by token"
_of_steps = partial(coordinator_counter, source="reports of workers about their steps")
_of_drafts = partial(_of_steps, labels=(labels.DRAFTER, labels.POSITION), absent=_OFF)
_last = partial(coordinator_gauge, absent=f"{_OFF}, or no iteration is finished")

DRAFTED: Final = _of_drafts(
    "rlhf_drafted_tokens_total",
    unit=Unit.TOKENS,
    meaning="Drafted tokens that the engine verified, by drafter and by position in the draft.",
    normal="many while few samples run, few at large batches; later positions have fewer as drafts get shorter",
)
ACCEPTED: Final = _of_drafts(
    "rlhf_accepted_tokens_total",
    unit=Unit.TOKENS,
    meaning="Drafted tokens that equal the sampled token, by drafter and by position in the draft.",
    normal="at position 0, at least half of rlhf_drafted_tokens_total",
)
STEPS: Final = _of_steps(
    "rlhf_speculation_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps of engines that speculate, including plain steps.",
    normal="equal to rlhf_engine_steps_total of these workers",
)
DRAFTED_STEPS: Final = _of_steps(
    "rlhf_speculation_drafted_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps that verified drafts.",
    normal="most steps of the tail, few steps of a full batch",
)
PROBES: Final = _of_steps(
    "rlhf_speculation_probes_total",
    unit=Unit.NUMBER,
    meaning="Decode steps that measured a choice that was not in use.",
    normal="a few percent of the steps",
)
SAMPLE_STEPS: Final = _of_steps(
    "rlhf_speculation_sample_steps_total",
    unit=Unit.NUMBER,
    meaning="Sum over decode steps of the samples in each step. Without drafts it equals the number of tokens.",
    normal="below rlhf_speculation_tokens_total by the number of accepted tokens",
)
TOKENS: Final = _of_steps(
    "rlhf_speculation_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens sampled in steps of engines that speculate.",
    normal="equal to rlhf_tokens_total",
)
STEP_SECONDS: Final = _of_steps(
    "rlhf_speculation_step_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of the steps of engines that speculate, including drafting, summed over workers.",
    normal="equal to rlhf_engine_decode_seconds_total of these workers",
)
DRAFT_SECONDS: Final = _of_steps(
    "rlhf_speculation_draft_seconds_total",
    unit=Unit.SECONDS,
    meaning="Part of the step time that the choice of drafts and drafting took.",
    normal="below a tenth of rlhf_speculation_step_seconds_total",
)
VERIFY_SECONDS: Final = _of_steps(
    "rlhf_speculation_verify_seconds_total",
    unit=Unit.SECONDS,
    meaning="Part of the step time that passes with drafts took.",
    normal="most of the time of the tail",
)
REGRET_SECONDS: Final = _of_steps(
    "rlhf_speculation_regret_seconds_total",
    unit=Unit.SECONDS,
    meaning="Step time beyond the estimated time of the best alternative for the same tokens.",
    normal="a few percent of rlhf_speculation_step_seconds_total if equal steps take equal times; half or more "
    "on a shared machine, where the value means little",
)
TOKENS_PER_STEP: Final = _last(
    "rlhf_iteration_tokens_per_step",
    unit=Unit.TOKENS,
    meaning="Tokens per sample and decode step, as a mean over the last iteration.",
    source="rlhf_speculation_tokens_total / rlhf_speculation_sample_steps_total of that iteration",
    normal="1 without drafts; 1.2 to 3 where drafts save time",
    run_metric="speculation/tokens_per_step",
)
ACCEPTANCE: Final = _last(
    "rlhf_draft_acceptance_ratio",
    unit=Unit.RATIO,
    meaning="Share of the drafted tokens of the last iteration that the policy accepted.",
    source="accepted tokens / drafted tokens",
    normal="above 0.4 while the engine drafts; no series for an iteration without drafts",
    run_metric="speculation/acceptance",
)
SIBLING_TOKENS: Final = coordinator_counter(
    "rlhf_sibling_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens of siblings and of earlier epochs that the coordinator shares as draft hints, counted once "
    "per worker. They are sent, or dropped because the worker stopped decoding the prompt first.",
    source="the coordinator's sharing",
    normal="a few dropped tokens per response, the last ones; more if links or limits are too narrow",
    labels=(labels.SHARED,),
)
EARLIER_TOKENS: Final = coordinator_gauge(
    "rlhf_earlier_response_tokens",
    unit=Unit.TOKENS,
    meaning="Tokens of responses of earlier epochs that the coordinator stores as draft hints.",
    source="the coordinator's store",
    normal="0 in the first epoch, and if no prompt is repeated; at most 8 million",
)
_ahead = partial(coordinator_counter, absent=f"{_OFF}, or generation.speculation.ahead is Disabled")
AHEAD_TOKENS: Final = _ahead(
    "rlhf_ahead_drafted_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens of the next iteration's samples that idle generation workers decoded ahead.",
    source="reports of workers",
    normal="up to the tokens of an iteration, each iteration; 0 without idle workers",
)
AHEAD_COMPARED: Final = _ahead(
    "rlhf_ahead_compared_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens decoded ahead in whose place a finished sample has a token.",
    source="the coordinator, when a sample finishes",
    normal="a little below rlhf_ahead_drafted_tokens_total, one iteration later",
)
AHEAD_RIGHT: Final = _ahead(
    "rlhf_ahead_right_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens decoded ahead that equal their sample's tokens, up to the first difference.",
    source="the coordinator, when a sample finishes",
    normal="most of rlhf_ahead_compared_tokens_total while weights change little; below a tenth of it nothing is "
    "drafted ahead for some iterations",
)
AHEAD_SECONDS: Final = _ahead(
    "rlhf_ahead_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of generation workers that decoded ahead and were otherwise idle. It is part of their busy time.",
    source="the coordinator's leases of drafts",
    normal="up to the time in which generation workers have neither samples nor scores",
)
