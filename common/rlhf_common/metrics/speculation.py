"""Metrics of speculative decoding from the coordinator: drafts of all workers, and tokens shared for them.

Rule: counts come from the workers' reports of their steps: they are measurements, not plans. A job without speculation
has no series of drafts.
"""

from functools import partial
from typing import Final

from rlhf_common.metrics import labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge

_OFF: Final = "the job decodes token by token"
_of_steps = partial(coordinator_counter, source="steps, as workers report them")
_of_drafts = partial(_of_steps, labels=(labels.DRAFTER, labels.POSITION), absent=_OFF)
_last = partial(coordinator_gauge, absent=f"{_OFF}, or no iteration is finished")

DRAFTED: Final = _of_drafts(
    "rlhf_drafted_tokens_total",
    unit=Unit.TOKENS,
    meaning="Drafted tokens that were verified, by who drafted and by their position in the draft.",
    normal="many while few samples run, few at large batches; positions fall off as drafts get shorter",
)
ACCEPTED: Final = _of_drafts(
    "rlhf_accepted_tokens_total",
    unit=Unit.TOKENS,
    meaning="Drafted tokens that are what was drawn, by who drafted and by their position in the draft.",
    normal="half and more of rlhf_drafted_tokens_total at position 0",
)
STEPS: Final = _of_steps(
    "rlhf_speculation_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps of engines that speculate, plain ones among them.",
    normal="as rlhf_engine_steps_total of these workers",
)
DRAFTED_STEPS: Final = _of_steps(
    "rlhf_speculation_drafted_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps that verified drafts.",
    normal="most steps of the tail, few of a full batch",
)
PROBES: Final = _of_steps(
    "rlhf_speculation_probes_total",
    unit=Unit.NUMBER,
    meaning="Decode steps that measured a choice that was not in use.",
    normal="a few in a hundred steps",
)
SAMPLE_STEPS: Final = _of_steps(
    "rlhf_speculation_sample_steps_total",
    unit=Unit.NUMBER,
    meaning="Steps of each sample, added up: what would be tokens without drafts.",
    normal="below rlhf_speculation_tokens_total by what was accepted",
)
TOKENS: Final = _of_steps(
    "rlhf_speculation_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that were drawn in steps of engines that speculate.",
    normal="as rlhf_tokens_total",
)
STEP_SECONDS: Final = _of_steps(
    "rlhf_speculation_step_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of these steps, drafting included, of all workers.",
    normal="as rlhf_engine_decode_seconds_total of these workers",
)
DRAFT_SECONDS: Final = _of_steps(
    "rlhf_speculation_draft_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of it that choosing and drafting took.",
    normal="below a tenth of rlhf_speculation_step_seconds_total",
)
VERIFY_SECONDS: Final = _of_steps(
    "rlhf_speculation_verify_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of it that passes took which verified drafts.",
    normal="most of the tail",
)
REGRET_SECONDS: Final = _of_steps(
    "rlhf_speculation_regret_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of it beyond what the best alternative on record would have taken for the same tokens.",
    normal="a few hundredths of rlhf_speculation_step_seconds_total where equal steps take equal times; half of it and "
    "more on a machine that is shared, where it says little",
)
TOKENS_PER_STEP: Final = _last(
    "rlhf_iteration_tokens_per_step",
    unit=Unit.TOKENS,
    meaning="Tokens that a sample got of a step, the mean of the last iteration.",
    source="rlhf_speculation_tokens_total / rlhf_speculation_sample_steps_total of that iteration",
    normal="1 without drafts; 1.2 to 3 where drafts pay",
    run_metric="speculation/tokens_per_step",
)
ACCEPTANCE: Final = _last(
    "rlhf_draft_acceptance_ratio",
    unit=Unit.RATIO,
    meaning="Share of the drafted tokens of the last iteration that were accepted.",
    source="accepted over drafted tokens",
    normal="above 0.4 while drafts are made; no series in an iteration without any",
    run_metric="speculation/acceptance",
)
SIBLING_TOKENS: Final = coordinator_counter(
    "rlhf_sibling_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens of siblings and earlier epochs for workers to draft by, once for each worker: sent, or dropped as "
    "they were not sent before nothing more of the prompt was decoded there.",
    source="the coordinator's sharing",
    normal="dropped is a few of every response: its last tokens; more where links or bounds are too narrow",
    labels=(labels.SHARED,),
)
EARLIER_TOKENS: Final = coordinator_gauge(
    "rlhf_earlier_response_tokens",
    unit=Unit.TOKENS,
    meaning="Tokens of earlier epochs' responses that the coordinator keeps to draft by.",
    source="the coordinator's store",
    normal="0 in the first epoch and where no prompt comes again; at most 8 million",
)
