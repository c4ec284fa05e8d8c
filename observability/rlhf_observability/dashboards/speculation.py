"""Speculation: the effect of drafts on decoding speed, the quality and cost of drafters, and shared tokens.

Questions, in the order of the rows:
- Researcher and engineer: do drafts pay, and when is drafting off?
- Which drafters are right, and how far?
- What do drafting and verification cost?
- Do workers get the tokens of siblings?
- Are tokens that idle workers decode ahead right?
"""

from typing import Final

from rlhf_common.metrics import speculation, worker_drafts
from rlhf_common.metrics.metric import Metric
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    lines,
    per_job,
    stat,
)
from rlhf_observability.promql import JOBS

_PLAIN: Final = "for jobs that decode token by token"


def _share(part: Metric, whole: Metric, *by: str) -> str:
    return f"{JOBS.rates(part, *by)} / {JOBS.rates(whole, *by)}"


PAYS: Final = Row(
    "Do drafts save time?",
    (
        stat(
            title="Tokens per step",
            empty=_PLAIN,
            unit=PanelUnit.TOKENS,
            decimals=2,
            thresholds=((None, YELLOW), (1.05, GREEN)),
            shows=speculation.TOKENS_PER_STEP.meaning,
            normal=speculation.TOKENS_PER_STEP.normal,
            cure="1 in mode Auto means that plain steps were measured to be faster. status.plan.speculation has the "
            "measurements.",
            queries=(per_job(speculation.TOKENS_PER_STEP),),
        ),
        stat(
            title="Accepted tokens",
            empty="if the engine drafted nothing",
            unit=PanelUnit.SHARE,
            thresholds=((None, RED), (0.1, ORANGE), (0.4, GREEN)),
            shows=speculation.ACCEPTANCE.meaning,
            normal=speculation.ACCEPTANCE.normal,
            cure="If it is low in mode Fixed, use a smaller maxTokens, other drafters, or mode Auto.",
            queries=(per_job(speculation.ACCEPTANCE),),
        ),
        lines(
            title="Tokens per sample and step",
            empty=_PLAIN,
            unit=PanelUnit.TOKENS,
            shows="Tokens per sample and decode step, as a mean over all steps.",
            normal="1 while batches are full, and higher in the tail of each iteration.",
            cure="If it never rises above 1, the rows below show whether drafts are wrong or too expensive.",
            queries=(Query(_share(speculation.TOKENS, speculation.SAMPLE_STEPS), BY_JOB),),
        ),
        lines(
            title="Steps with drafts",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of decode steps that verified drafts, and share of steps that measured an unused choice.",
            normal=speculation.DRAFTED_STEPS.normal,
            cure="If it is 0 for hours in mode Auto, drafting is off. The event SpeculationSwitched names the reason.",
            queries=(
                Query(_share(speculation.DRAFTED_STEPS, speculation.STEPS), f"drafts {BY_JOB}"),
                Query(_share(speculation.PROBES, speculation.STEPS), f"probes {BY_JOB}"),
            ),
        ),
        lines(
            title="Steps, by drafted tokens",
            empty=_PLAIN,
            unit=PanelUnit.PER_SECOND,
            shows=worker_drafts.BUDGETS.meaning,
            normal=worker_drafts.BUDGETS.normal + ".",
            cure="If it is always 8 in mode Fixed at full batches, use mode Auto, which drafts less where passes are "
            "expensive.",
            queries=(Query(JOBS.rates(worker_drafts.BUDGETS, "budget"), f"{{{{budget}}}} {BY_JOB}"),),
        ),
        lines(
            title="Steps, by reason for drafting",
            empty=_PLAIN,
            unit=PanelUnit.PER_SECOND,
            shows=worker_drafts.REASONS.meaning,
            normal=worker_drafts.REASONS.normal + ".",
            cure="If it is Slower for hours, drafts save no time, and mode Disabled is equivalent. Unmeasured means "
            "that no step was timed, because all steps replay or capture graphs.",
            queries=(Query(JOBS.rates(worker_drafts.REASONS, "reason"), f"{{{{reason}}}} {BY_JOB}"),),
        ),
    ),
    columns=2,
)
RIGHT: Final = Row(
    "Which drafts are accepted, and to which position?",
    (
        lines(
            title="Accepted, by drafter",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the drafted tokens that were accepted, by drafter.",
            normal="siblings are above the sample's own text if prompts have several samples; all fall as the policy "
            "changes.",
            cure="If a drafter is near 0, remove it from spec.generation.speculation.drafters, because each request "
            "to it costs time.",
            queries=(Query(_share(speculation.ACCEPTED, speculation.DRAFTED, "drafter"), f"{{{{drafter}}}} {BY_JOB}"),),
        ),
        lines(
            title="Drafted, by drafter",
            empty=_PLAIN,
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Verified drafted tokens per second, by drafter.",
            normal="peaks in the tail of each iteration.",
            cure="If Siblings is missing, the samples of a prompt run on workers that share no tokens: check the last "
            "row.",
            queries=(Query(JOBS.rates(speculation.DRAFTED, "drafter"), f"{{{{drafter}}}} {BY_JOB}"),),
        ),
        lines(
            title="Accepted, by position",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the drafted tokens that were accepted, by position in the draft.",
            normal="falls with the position, because a token counts if all tokens before it are right.",
            cure="If it is near 0 from some position in mode Fixed, set maxTokens to that position.",
            queries=(
                Query(_share(speculation.ACCEPTED, speculation.DRAFTED, "position"), f"{{{{position}}}} {BY_JOB}"),
            ),
        ),
    ),
)
COSTS: Final = Row(
    "What do drafting and verifying cost?",
    (
        lines(
            title="Step time, by part",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the time of decode steps that drafting takes, and share that passes with drafts take.",
            normal="drafting is below a tenth; passes with drafts take most of the tail.",
            cure="If drafting is above a fifth, use a smaller draft model or fewer drafters.",
            queries=(
                Query(_share(speculation.DRAFT_SECONDS, speculation.STEP_SECONDS), f"drafting {BY_JOB}"),
                Query(_share(speculation.VERIFY_SECONDS, speculation.STEP_SECONDS), f"verifying {BY_JOB}"),
            ),
        ),
        lines(
            title="Regret",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            shows="Share of the time of decode steps beyond the estimated time of the best alternative.",
            normal=speculation.REGRET_SECONDS.normal,
            cure="If it stays above a tenth in mode Fixed, drafts are too long. In mode Auto, the time of a pass "
            "varies, for example on a shared device.",
            queries=(Query(_share(speculation.REGRET_SECONDS, speculation.STEP_SECONDS), BY_JOB),),
        ),
    ),
)
SHARED: Final = Row(
    "Do workers get the tokens of siblings?",
    (
        lines(
            title="Tokens of siblings",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens of siblings and of earlier epochs that the coordinator sends to workers per second, and "
            "those that came too late.",
            normal=speculation.SIBLING_TOKENS.normal,
            cure="If none are sent, no worker uses sibling drafts. If most are dropped, responses are too short to "
            "share them in time, which costs nothing.",
            queries=(Query(JOBS.rates(speculation.SIBLING_TOKENS, "outcome"), f"{{{{outcome}}}} {BY_JOB}"),),
        ),
        lines(
            title="Tokens of earlier epochs",
            unit=PanelUnit.TOKENS,
            shows=speculation.EARLIER_TOKENS.meaning,
            normal=speculation.EARLIER_TOKENS.normal,
            cure="At 8 million tokens the store is full, and further prompts have drafts of siblings alone.",
            queries=(Query(JOBS.latest(speculation.EARLIER_TOKENS), BY_JOB),),
        ),
    ),
)
AHEAD: Final = Row(
    "Are tokens that idle workers decode ahead right?",
    (
        lines(
            title="Tokens decoded ahead",
            empty="for jobs that do not draft ahead",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens of the next iteration's samples that idle workers decode per second; those compared with "
            "finished samples, one iteration later; and those of them before the first difference.",
            normal=speculation.AHEAD_RIGHT.normal,
            cure="If few are right, the policy changes fast, and the job stops drafting ahead by itself. If none are "
            "drafted, no generation worker is idle.",
            queries=(
                Query(JOBS.rates(speculation.AHEAD_TOKENS), f"drafted {BY_JOB}"),
                Query(JOBS.rates(speculation.AHEAD_COMPARED), f"compared {BY_JOB}"),
                Query(JOBS.rates(speculation.AHEAD_RIGHT), f"right {BY_JOB}"),
            ),
        ),
        lines(
            title="Workers that decode ahead",
            empty="for jobs that do not draft ahead",
            unit=PanelUnit.NUMBER,
            shows="Number of generation workers that decode ahead, as a mean.",
            normal="up to the number of idle generation workers.",
            cure="These workers count as busy GPUs, but as idle workers.",
            queries=(Query(JOBS.rates(speculation.AHEAD_SECONDS), BY_JOB),),
        ),
    ),
)
SPECULATION_DASHBOARD: Final = Dashboard(
    "rlhf-speculation",
    "RLHF / Speculation",
    "Whether drafts save time, which drafts are accepted, what they cost, and what workers share or decode ahead.",
    (PAYS, RIGHT, COSTS, SHARED, AHEAD),
)
