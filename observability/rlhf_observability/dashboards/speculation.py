"""Speculation: the effect of drafts on decoding speed, the quality and cost of drafters, and shared tokens.

Questions, in the order of the rows:
- Researcher and engineer: do drafts pay, and when is drafting off?
- Which drafters are right, and how far?
- What do drafting and verification cost?
- Do workers get the tokens of siblings?
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

_PLAIN: Final = "where jobs decode token by token"


def _share(part: Metric, whole: Metric, *by: str) -> str:
    return f"{JOBS.rates(part, *by)} / {JOBS.rates(whole, *by)}"


PAYS: Final = Row(
    "Do drafts pay?",
    (
        stat(
            title="Tokens a step",
            empty=_PLAIN,
            unit=PanelUnit.TOKENS,
            decimals=2,
            thresholds=((None, YELLOW), (1.05, GREEN)),
            shows=speculation.TOKENS_PER_STEP.meaning,
            normal=speculation.TOKENS_PER_STEP.normal,
            cure="1 in mode Auto: plain steps were measured to be faster; status.plan.speculation has the numbers.",
            queries=(per_job(speculation.TOKENS_PER_STEP),),
        ),
        stat(
            title="Accepted",
            empty="where nothing was drafted",
            unit=PanelUnit.SHARE,
            thresholds=((None, RED), (0.1, ORANGE), (0.4, GREEN)),
            shows=speculation.ACCEPTANCE.meaning,
            normal=speculation.ACCEPTANCE.normal,
            cure="Low in mode Fixed: a smaller maxTokens, other drafters, or mode Auto.",
            queries=(per_job(speculation.ACCEPTANCE),),
        ),
        lines(
            title="Tokens of a sample in a step",
            empty=_PLAIN,
            unit=PanelUnit.TOKENS,
            shows="Tokens that a sample gets of a step, the mean of all steps.",
            normal="1 while batches are full, and above it in the tail of every iteration.",
            cure="Never above 1: see below whether drafts are wrong, or cost too much.",
            queries=(Query(_share(speculation.TOKENS, speculation.SAMPLE_STEPS), BY_JOB),),
        ),
        lines(
            title="Steps with drafts",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the decode steps that verified drafts, and that only measured what was not chosen.",
            normal=speculation.DRAFTED_STEPS.normal,
            cure="0 for hours in mode Auto: drafting is off, and the event SpeculationSwitched says why.",
            queries=(
                Query(_share(speculation.DRAFTED_STEPS, speculation.STEPS), f"drafts {BY_JOB}"),
                Query(_share(speculation.PROBES, speculation.STEPS), f"probes {BY_JOB}"),
            ),
        ),
        lines(
            title="Steps, by how far they drafted",
            empty=_PLAIN,
            unit=PanelUnit.PER_SECOND,
            shows=worker_drafts.BUDGETS.meaning,
            normal=worker_drafts.BUDGETS.normal + ".",
            cure="Always 8 in mode Fixed at full batches: mode Auto drafts less where passes are dear.",
            queries=(Query(JOBS.rates(worker_drafts.BUDGETS, "budget"), f"{{{{budget}}}} {BY_JOB}"),),
        ),
        lines(
            title="Steps, by why they drafted or not",
            empty=_PLAIN,
            unit=PanelUnit.PER_SECOND,
            shows=worker_drafts.REASONS.meaning,
            normal=worker_drafts.REASONS.normal + ".",
            cure="Slower for hours: drafts do not pay here, and mode Disabled is the same; Unmeasured: no step was "
            "timed, as they all replay or capture.",
            queries=(Query(JOBS.rates(worker_drafts.REASONS, "reason"), f"{{{{reason}}}} {BY_JOB}"),),
        ),
    ),
    columns=2,
)
RIGHT: Final = Row(
    "Whose drafts are right, and how far?",
    (
        lines(
            title="Accepted, by drafter",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the drafted tokens that were accepted, by who drafted.",
            normal="siblings above the sample itself where prompts have several samples; all fall as the policy moves.",
            cure="One near 0: take it out of spec.generation.speculation.drafters, as asking it costs time.",
            queries=(Query(_share(speculation.ACCEPTED, speculation.DRAFTED, "drafter"), f"{{{{drafter}}}} {BY_JOB}"),),
        ),
        lines(
            title="Drafted, by drafter",
            empty=_PLAIN,
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Drafted tokens that were verified a second, by who drafted.",
            normal="peaks in the tail of every iteration.",
            cure="None of Siblings: samples of a prompt run on workers that share nothing; see the last row.",
            queries=(Query(JOBS.rates(speculation.DRAFTED, "drafter"), f"{{{{drafter}}}} {BY_JOB}"),),
        ),
        lines(
            title="Accepted, by position",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the drafted tokens that were accepted, by their position in the draft.",
            normal="falls with the position, as a token counts only where all before it are right.",
            cure="Near 0 from some position on in mode Fixed: set maxTokens to it.",
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
            title="Where the time of steps goes",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the time of decode steps that drafting takes, and passes that verify drafts.",
            normal="drafting below a tenth; verifying most of the tail.",
            cure="Drafting above a fifth: a smaller draft model, or fewer drafters.",
            queries=(
                Query(_share(speculation.DRAFT_SECONDS, speculation.STEP_SECONDS), f"drafting {BY_JOB}"),
                Query(_share(speculation.VERIFY_SECONDS, speculation.STEP_SECONDS), f"verifying {BY_JOB}"),
            ),
        ),
        lines(
            title="Regret",
            empty=_PLAIN,
            unit=PanelUnit.SHARE,
            shows="Share of the time of decode steps beyond what the best alternative on record would have taken.",
            normal=speculation.REGRET_SECONDS.normal,
            cure="Above a tenth for long: mode Fixed drafts too far; in mode Auto, what a pass takes varies, as on a "
            "device that is shared.",
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
            shows="Tokens of siblings and of earlier epochs that go to workers a second, and those that came too late.",
            normal=speculation.SIBLING_TOKENS.normal,
            cure="Nothing sent: no worker drafts by siblings. Mostly dropped: responses are too short to be shared in "
            "time, which costs nothing.",
            queries=(Query(JOBS.rates(speculation.SIBLING_TOKENS, "outcome"), f"{{{{outcome}}}} {BY_JOB}"),),
        ),
        lines(
            title="Tokens of earlier epochs",
            unit=PanelUnit.TOKENS,
            shows=speculation.EARLIER_TOKENS.meaning,
            normal=speculation.EARLIER_TOKENS.normal,
            cure="At 8 million: prompts beyond are drafted by siblings alone.",
            queries=(Query(JOBS.latest(speculation.EARLIER_TOKENS), BY_JOB),),
        ),
    ),
)
SPECULATION_DASHBOARD: Final = Dashboard(
    "rlhf-speculation",
    "RLHF / Speculation",
    "Whether drafts make decoding faster, whose drafts are right, what they cost, and what workers share for them.",
    (PAYS, RIGHT, COSTS, SHARED),
)
