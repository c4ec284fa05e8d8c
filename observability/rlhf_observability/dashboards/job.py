"""One job, or several side by side: progress, learning, and the use of time and GPUs.

Questions, in the order of the rows:
- On call: does it progress, how long will it take, which phase is it in?
- Researcher: does the reward rise, and at what cost in divergence and length? Several jobs share a panel, by name.
- Both: where does the time of an iteration go, and what do GPUs wait for?
- On call: were processes lost, did scores fail, are workers missing?
"""

from typing import Final

from rlhf_common.metrics import job, run, samples, training
from rlhf_common.names import PHASES
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    GREY,
    MAX_SERIES,
    ORANGE,
    RED,
    YELLOW,
    Annotation,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    lines,
    per_job,
    stacked,
    stat,
    states,
)
from rlhf_observability.promql import JOB, JOBS, average, bottom, highest, total

_COLOURS: Final = {
    "Starting": YELLOW,
    "Generating": "blue",
    "Scoring": "purple",
    "Training": GREEN,
    "Publishing": "light-blue",
    "Checkpointing": "super-light-purple",
    "Recovering": ORANGE,
    "Complete": "dark-green",
    "Failed": RED,
    "Stopped": GREY,
}
_LATE: Final = ((None, GREEN), (300, ORANGE), (900, RED))  # seconds without a result of any worker

RESTARTED: Final = Annotation(
    "Restarts of the coordinator",
    f"changes({JOBS.latest(job.COORDINATOR_EPOCH)}[1m:]) > 0",
    "Coordinator of {{rlhf_job}} restarted",
    ORANGE,
)
RECOVERED: Final = Annotation(
    "Recoveries",
    f"{JOBS.increases(job.RECOVERIES)} > 0",
    "{{rlhf_job}} recovers",
    RED,
)


def _phase() -> str:
    """Return the phase of each job as its number in PHASES, from 1, so that a job is one line of colours."""
    numbered = (f"({JOBS.value(job.PHASE, phase=phase)} == 1) * {index}" for index, phase in enumerate(PHASES, 1))
    return highest(" or ".join(numbered), *JOB)


MOVES: Final = Row(
    "Does it move?",
    (
        stat(
            title="Progress",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            shows="Iterations that are trained, of those to train.",
            normal="rises; the graph behind it is straight.",
            cure="Flat: see the time since the last progress, and the phase below.",
            queries=(
                Query(bottom(MAX_SERIES, f"{JOBS.latest(job.ITERATION)} / {JOBS.latest(job.ITERATIONS)}"), BY_JOB),
            ),
        ),
        stat(
            title="Time left",
            unit=PanelUnit.SECONDS,
            shows="Iterations that are left times the length of the last one.",
            normal="falls as fast as the clock runs.",
            cure="It grows with the responses: see their length, and the tail on the dashboard of fusion.",
            queries=(
                Query(
                    f"({JOBS.latest(job.ITERATIONS)} - {JOBS.latest(job.ITERATION)})"
                    f" * {JOBS.latest(run.ITERATION_LAST)}",
                    BY_JOB,
                ),
            ),
        ),
        stat(
            title="Since the last progress",
            unit=PanelUnit.SECONDS,
            thresholds=_LATE,
            shows="Time since a token, score, finished optimizer batch, loaded version or checkpoint last came.",
            normal=job.LAST_PROGRESS.normal,
            cure="The phase below says who is waited for: `rlhf describe NAME`, then the worker's own log.",
            queries=(Query(f"time() - {JOBS.latest(job.LAST_PROGRESS)}", BY_JOB),),
        ),
        stat(
            title="GPUs computing",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=((None, RED), (0.3, ORANGE), (0.6, GREEN)),
            shows="Share of the job's GPU time in which something was computed.",
            normal="above 60%; of separate groups, one waits while the other works.",
            cure="The row on GPUs names the cause.",
            queries=(
                Query(
                    f"{JOBS.rates(job.GPU_BUSY)} / {total(JOBS.latest(job.GPUS, 'group'), *JOB)}",
                    BY_JOB,
                ),
            ),
        ),
        states(
            title="Phase",
            unit=PanelUnit.NUMBER,
            texts={str(index): (phase, _COLOURS[phase]) for index, phase in enumerate(PHASES, 1)},
            shows="The phase that the coordinator is in, a line a job.",
            normal=job.PHASE.normal,
            cure="Orange again and again is a worker that comes back and fails again: `rlhf describe NAME`.",
            queries=(Query(_phase(), BY_JOB),),
        ),
    ),
)
LEARNS: Final = Row(
    "Does it learn?",
    (
        lines(
            title="Reward",
            unit=PanelUnit.REWARD,
            shows=run.REWARD.meaning,
            normal=run.REWARD.normal,
            cure="A fall to a constant: a broken reward or a collapsed policy. Log what the reward function scores.",
            queries=(per_job(run.REWARD),),
            low=None,
        ),
        lines(
            title="Divergence from the reference",
            unit=PanelUnit.NATS,
            shows=run.KL_PER_TOKEN.meaning,
            normal=run.KL_PER_TOKEN.normal,
            cure="A steep rise: raise klCoefficient or set klTarget; a rising reward is then worth nothing.",
            queries=(per_job(run.KL_PER_TOKEN),),
            low=None,
        ),
        lines(
            title="Length of responses",
            unit=PanelUnit.TOKENS,
            shows="Mean and longest response of the last iteration.",
            normal="changes slowly, and the longest is below rollout.maxResponseTokens.",
            cure="At the limit samples are cut off: see beside. Longer with more reward may be reward hacking.",
            queries=(per_job(run.RESPONSE_MEAN, "mean"), per_job(run.RESPONSE_MAX, "longest")),
        ),
    ),
)
TIME: Final = Row(
    "Where do time and GPUs go?",
    (
        stacked(
            title="An iteration, by stage",
            unit=PanelUnit.SECONDS,
            shows="Where the time of the last finished iteration went; the mean of the jobs chosen.",
            normal=job.STAGE_LAST.normal,
            cure="Generation grows: lengths, or fewer workers. Wait grows: lost processes. Weight update or checkpoint "
            "above a tenth: the dashboard of weights.",
            queries=(Query(average(JOBS.latest(job.STAGE_LAST, "stage"), "stage"), "{{stage}}"),),
        ),
        lines(
            title="Time of an iteration",
            unit=PanelUnit.SECONDS,
            shows="Median and 95th percentile of whole iterations within an hour, by job.",
            normal=job.ITERATION_SECONDS.normal,
            cure="The 95th far above the median: recoveries, or checkpoints; see the stages beside.",
            queries=(
                Query(JOBS.quantile(0.5, job.ITERATION_SECONDS, *JOB, window="1h"), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.95, job.ITERATION_SECONDS, *JOB, window="1h"), f"95% {BY_JOB}"),
            ),
        ),
        lines(
            title="Tokens per second",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Response tokens: of the last finished iteration over its whole time, and decoded now.",
            normal="the first steady, the second high while the job generates.",
            cure="Compare the stages beside: fewer tokens with the same generation time are shorter responses.",
            queries=(per_job(run.TOKENS_PER_SECOND), Query(JOBS.rates(samples.TOKENS), f"now {BY_JOB}")),
        ),
        stacked(
            title="Idle GPUs, by cause",
            unit=PanelUnit.NUMBER,
            shows="GPUs of the jobs chosen that computed nothing, by cause.",
            normal=job.GPU_IDLE.normal,
            cure="tail: inter-stage fusion. training, inference: another split of groups, or colocation. turn: devices "
            "change hands too often. starting, recovering: lost processes.",
            queries=(Query(total(JOBS.rate(job.GPU_IDLE), "cause"), "{{cause}}"),),
        ),
    ),
)
WELL: Final = Row(
    "Is it well?",
    (
        stacked(
            title="Samples, by state",
            unit=PanelUnit.SAMPLES,
            shows="Samples of the iteration in progress by state.",
            normal=samples.SAMPLES.normal,
            cure="A band of `decoding` that stays is the tail; of `generated`, scorers that are too slow or gone.",
            queries=(Query(total(JOBS.latest(samples.SAMPLES, "state"), "state"), "{{state}}"),),
        ),
        lines(
            title="Missing workers",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, RED)),
            shows="Workers that a group is to have and that hold no session.",
            normal="0, but while the job starts, resizes or recovers.",
            cure="`rlhf top NAME` shows who is there; their pods' events say why they do not come.",
            queries=(
                Query(
                    f"{JOBS.latest(samples.WANTED, 'group')} - {JOBS.latest(samples.SESSIONS, 'group')}",
                    f"{BY_JOB} {{{{group}}}}",
                ),
            ),
        ),
        lines(
            title="Lost and restarted",
            unit=PanelUnit.NUMBER,
            shows="Workers lost or out of memory, restarts of the training group, times the job went into recovery.",
            normal="0 but for drained nodes.",
            cure="Again and again: exit codes in `rlhf describe NAME` tell memory, the device and the code apart.",
            queries=(
                Query(JOBS.increases(samples.LOST), f"lost {BY_JOB}"),
                Query(JOBS.increases(training.GROUP_RESTARTS), f"training group {BY_JOB}"),
                Query(JOBS.increases(job.RECOVERIES), f"recoveries {BY_JOB}"),
                Query(JOBS.increases(samples.OUT_OF_MEMORY), f"out of memory {BY_JOB}"),
            ),
        ),
        lines(
            title="Scores that failed",
            unit=PanelUnit.NUMBER,
            shows=samples.SCORE_FAILURES.meaning,
            normal=samples.SCORE_FAILURES.normal,
            cure="The event score-failed has the reward's own words; look at its endpoint, or at the function.",
            queries=(Query(JOBS.increases(samples.SCORE_FAILURES, "task"), f"{{{{task}}}} {BY_JOB}"),),
        ),
    ),
)
JOB_DASHBOARD: Final = Dashboard(
    "rlhf-job",
    "RLHF / Job",
    "One job or several: how far it is, what it learns, where its time and GPUs go, what it lost.",
    (MOVES, LEARNS, TIME, WELL),
    annotations=(RESTARTED, RECOVERED),
)
