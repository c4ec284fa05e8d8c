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
    """Return a query of each job's phase as its number in PHASES, from 1, so that a job is one line of colours."""
    numbered = (f"({JOBS.value(job.PHASE, phase=phase)} == 1) * {index}" for index, phase in enumerate(PHASES, 1))
    return highest(" or ".join(numbered), *JOB)


MOVES: Final = Row(
    "Does the job progress?",
    (
        stat(
            title="Progress",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            shows="Number of trained iterations, and number of iterations to train.",
            normal="rises; the graph behind it is straight.",
            cure="If it is flat, check the time since the last progress and the phase below.",
            queries=(
                Query(bottom(MAX_SERIES, f"{JOBS.latest(job.ITERATION)} / {JOBS.latest(job.ITERATIONS)}"), BY_JOB),
            ),
        ),
        stat(
            title="Time left",
            unit=PanelUnit.SECONDS,
            shows="Number of remaining iterations, multiplied by the time of the last iteration.",
            normal="falls as fast as time passes.",
            cure="It grows if responses get longer: check their length, and the tail on the Fusion dashboard.",
            queries=(
                Query(
                    f"({JOBS.latest(job.ITERATIONS)} - {JOBS.latest(job.ITERATION)})"
                    f" * {JOBS.latest(run.ITERATION_LAST)}",
                    BY_JOB,
                ),
            ),
        ),
        stat(
            title="Time since the last progress",
            unit=PanelUnit.SECONDS,
            thresholds=_LATE,
            shows="Time since the coordinator last received a token, a score, a finished optimizer batch, a loaded "
            "version or a checkpoint.",
            normal=job.LAST_PROGRESS.normal,
            cure="`rlhf describe NAME` names the worker that the job waits for. Then read the log of that worker.",
            queries=(Query(f"time() - {JOBS.latest(job.LAST_PROGRESS)}", BY_JOB),),
        ),
        stat(
            title="GPUs computing",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=((None, RED), (0.3, ORANGE), (0.6, GREEN)),
            shows="Share of the job's GPU time in which GPUs computed.",
            normal="above 60%; less if separate groups wait for each other.",
            cure="The row on GPUs shows the cause.",
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
            shows="Phase of each job's coordinator.",
            normal=job.PHASE.normal,
            cure="If orange appears repeatedly, a worker returns and fails again: run `rlhf describe NAME`.",
            queries=(Query(_phase(), BY_JOB),),
        ),
    ),
)
LEARNS: Final = Row(
    "Does the job learn?",
    (
        lines(
            title="Reward",
            unit=PanelUnit.REWARD,
            shows=run.REWARD.meaning,
            normal=run.REWARD.normal,
            cure="A fall to a constant means a broken reward or a collapsed policy. Log the inputs of the reward "
            "function.",
            queries=(per_job(run.REWARD),),
            low=None,
        ),
        lines(
            title="Divergence from the reference",
            unit=PanelUnit.NATS,
            shows=run.KL_PER_TOKEN.meaning,
            normal=run.KL_PER_TOKEN.normal,
            cure="If it rises steeply, raise klCoefficient or set klTarget. A reward that rises meanwhile means "
            "little.",
            queries=(per_job(run.KL_PER_TOKEN),),
            low=None,
        ),
        lines(
            title="Length of responses",
            unit=PanelUnit.TOKENS,
            shows="Mean and maximum length of the responses of the last iteration.",
            normal="changes slowly, and the maximum is below rollout.maxResponseTokens.",
            cure="At the limit, the engine truncates samples. Longer responses with a higher reward may be reward "
            "hacking.",
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
            shows="Time of the last finished iteration by stage, as a mean over the chosen jobs.",
            normal=job.STAGE_LAST.normal,
            cure="If generation grows, responses are longer or workers are fewer. If wait grows, processes were lost. "
            "If weight update or checkpoint is above a tenth, open the dashboard Weights and checkpoints.",
            queries=(Query(average(JOBS.latest(job.STAGE_LAST, "stage"), "stage"), "{{stage}}"),),
        ),
        lines(
            title="Time of an iteration",
            unit=PanelUnit.SECONDS,
            shows="Median and 95th percentile of the time of iterations within an hour, by job.",
            normal=job.ITERATION_SECONDS.normal,
            cure="If the 95th percentile is far above the median, recoveries or checkpoints take time: compare the "
            "stages.",
            queries=(
                Query(JOBS.quantile(0.5, job.ITERATION_SECONDS, *JOB, window="1h"), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.95, job.ITERATION_SECONDS, *JOB, window="1h"), f"95% {BY_JOB}"),
            ),
        ),
        lines(
            title="Tokens per second",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Response tokens per second: over the whole time of the last finished iteration, and decoded now.",
            normal="the first is steady; the second is high while the job generates.",
            cure="Compare the stages. Fewer tokens in the same generation time mean shorter responses.",
            queries=(per_job(run.TOKENS_PER_SECOND), Query(JOBS.rates(samples.TOKENS), f"now {BY_JOB}")),
        ),
        stacked(
            title="Idle GPUs, by cause",
            unit=PanelUnit.NUMBER,
            shows="Idle GPUs of the chosen jobs, by cause.",
            normal=job.GPU_IDLE.normal,
            cure="For tail, use inter-stage fusion. For training and inference, use other group sizes or colocation. "
            "For turn, roles change on devices too often. For starting and recovering, processes were lost.",
            queries=(Query(total(JOBS.rate(job.GPU_IDLE), "cause"), "{{cause}}"),),
        ),
    ),
)
WELL: Final = Row(
    "Is the job healthy?",
    (
        stacked(
            title="Samples, by state",
            unit=PanelUnit.SAMPLES,
            shows="Samples of the iteration in progress, by state.",
            normal=samples.SAMPLES.normal,
            cure="A band of `decoding` that stays is the tail. If a band of `generated` stays, scorers are too slow "
            "or are missing.",
            queries=(Query(total(JOBS.latest(samples.SAMPLES, "state"), "state"), "{{state}}"),),
        ),
        lines(
            title="Missing workers",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, RED)),
            shows="Wanted workers of a group without a session.",
            normal="0, except while the job starts, resizes or recovers.",
            cure="`rlhf top NAME` shows the connected workers. The events of the other pods say why they do not start.",
            queries=(
                Query(
                    f"{JOBS.latest(samples.WANTED, 'group')} - {JOBS.latest(samples.SESSIONS, 'group')}",
                    f"{BY_JOB} {{{{group}}}}",
                ),
            ),
        ),
        lines(
            title="Losses and recoveries",
            unit=PanelUnit.NUMBER,
            shows="Workers that were lost or out of memory, restarts of the training group, and recoveries of the job.",
            normal="0, except for drained nodes.",
            cure="If it continues, the exit codes in `rlhf describe NAME` distinguish memory, device and code.",
            queries=(
                Query(JOBS.increases(samples.LOST), f"lost {BY_JOB}"),
                Query(JOBS.increases(training.GROUP_RESTARTS), f"training group {BY_JOB}"),
                Query(JOBS.increases(job.RECOVERIES), f"recoveries {BY_JOB}"),
                Query(JOBS.increases(samples.OUT_OF_MEMORY), f"out of memory {BY_JOB}"),
            ),
        ),
        lines(
            title="Failed scores",
            unit=PanelUnit.NUMBER,
            shows=samples.SCORE_FAILURES.meaning,
            normal=samples.SCORE_FAILURES.normal,
            cure="The event score-failed quotes the reward. Check its endpoint or its function.",
            queries=(Query(JOBS.increases(samples.SCORE_FAILURES, "task"), f"{{{{task}}}} {BY_JOB}"),),
        ),
    ),
)
JOB_DASHBOARD: Final = Dashboard(
    "rlhf-job",
    "RLHF / Job",
    "One or several jobs: progress, learning, use of time and GPUs, and losses of processes.",
    (MOVES, LEARNS, TIME, WELL),
    annotations=(RESTARTED, RECOVERED),
)
