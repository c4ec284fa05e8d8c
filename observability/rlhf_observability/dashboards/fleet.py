"""The fleet: all jobs of a cluster, its GPUs and its queues.

Questions, in the order of the rows:
- Is there a problem now: do jobs fail, wait, or hold GPUs that compute nothing?
- Which job is it, in which phase, since when?
- Who uses the GPUs, and why are they idle?
- How long is the queue, and who waits longest?
"""

from typing import Final

from rlhf_common.metrics import job, operator
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
    Variable,
    bars,
    lines,
    stacked,
    stat,
    table,
)
from rlhf_observability.promql import (
    FLEET,
    JOB,
    NAMESPACE,
    OPERATORS,
    RLHF_JOB,
    highest,
    number_of,
    or_zero,
    top,
    total,
)

_LONGEST: Final = 10  # bars that a person reads at a glance
_GPUS = (*JOB, "group")
_WAITING: Final = FLEET.latest(operator.WAITING_SINCE)
_BUSY, _IDLE = total(FLEET.rate(job.GPU_BUSY)), f"({or_zero(total(FLEET.rate(job.GPU_IDLE)))})"
_REQUESTED: Final = highest(FLEET.value(operator.GPUS_REQUESTED), *_GPUS)
_HELD: Final = highest(FLEET.value(operator.GPUS_HELD), *_GPUS)
_PHASE: Final = FLEET.latest(operator.PHASE, "phase")
_KIND: Final = FLEET.latest(operator.INFO, "algorithm", "queue")
_JOB_AT: Final = (
    "/d/rlhf-job?var-datasource=${{datasource}}&var-namespace={namespace}&var-job={job}&${{__url_time_range}}"
)
_OF_ROW: Final = {"Open the job": _JOB_AT.format(namespace="${__data.fields.namespace}", job="${__data.fields.job}")}
_OF_BAR: Final = {
    "Open the job": _JOB_AT.format(namespace="${__field.labels.namespace}", job="${__field.labels.rlhf_job}")
}

NOW: Final = Row(
    "Is anything wrong?",
    (
        stat(
            title="Running",
            unit=PanelUnit.NUMBER,
            shows="Jobs whose iterations are under way.",
            normal="as many as the cluster has room for.",
            cure="Look at the jobs below: what is not Running says in its phase what it waits for.",
            queries=(Query(or_zero(number_of(FLEET.latest(operator.PHASE, phase="Running")))),),
        ),
        stat(
            title="Waiting",
            unit=PanelUnit.NUMBER,
            shows="Jobs that do not run yet: queued, without a node, or starting.",
            normal="0, or what the queue is for.",
            cure="The row on queues says for what they wait; `kubectl describe rlhf NAME` says it of one job in words.",
            queries=(Query(or_zero(number_of(_WAITING))),),
        ),
        stat(
            title="Failed or recovering",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (5, RED)),
            shows="Jobs that gave up or lost a process, and are still in the cluster.",
            normal="0; a recovering job is back within minutes.",
            cure="`rlhf describe NAME` names the process and the cure. Delete failed jobs that nobody needs.",
            queries=(Query(or_zero(number_of(FLEET.latest(operator.PHASE, phase="~Failed|Recovering")))),),
        ),
        stat(
            title="GPUs held",
            unit=PanelUnit.NUMBER,
            shows="GPUs that pods of jobs occupy.",
            normal="near the GPUs of the cluster.",
            cure="With a queue and free GPUs, look for fragments: a gang needs all its GPUs at once.",
            queries=(Query(or_zero(total(_HELD))),),
        ),
        stat(
            title="GPUs waited for",
            unit=PanelUnit.NUMBER,
            shows="GPUs that waiting jobs ask for.",
            normal="0, or what the queue is for.",
            cure="More than the cluster has free for days is a case for more GPUs, or for fewer of a job.",
            queries=(Query(or_zero(total(f"{_REQUESTED} and on ({', '.join(JOB)}) {_WAITING}"))),),
        ),
        stat(
            title="GPUs computing",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=((None, RED), (0.3, ORANGE), (0.6, GREEN)),
            shows="Share of the GPU time of running jobs in which they computed.",
            normal="above 60%.",
            cure="The row on GPUs names causes and jobs of what is lost.",
            queries=(Query(f"{_BUSY} / ({_BUSY} + {_IDLE})"),),
        ),
    ),
)
WHICH: Final = Row(
    "Which jobs?",
    (
        table(
            title="Jobs",
            unit=PanelUnit.NUMBER,
            shows="Every job: its phase and since when, its iterations, GPUs and ended pods. A click opens the job.",
            normal="Running, with ends only where nodes were drained.",
            cure="A long time in Pending, Starting or Recovering: `rlhf describe NAME`.",
            queries=(
                Query(f"{_PHASE} * on ({', '.join(JOB)}) group_left (algorithm, queue) {_KIND}"),
                Query(f"time() - {FLEET.latest(operator.PHASE_SINCE)}"),
                Query(FLEET.latest(operator.ITERATION)),
                Query(FLEET.latest(operator.ITERATIONS)),
                Query(total(_HELD, *JOB)),
                Query(total(highest(FLEET.total(operator.RESTARTS), *JOB, "reason"), *JOB)),
            ),
            columns={
                "rlhf_job": "job",
                "namespace": "namespace",
                "algorithm": "algorithm",
                "queue": "queue",
                "phase": "phase",
                "Value #B": "in it for",
                "Value #C": "iteration",
                "Value #D": "of",
                "Value #E": "GPUs",
                "Value #F": "ends of pods",
            },
            column_units={"in it for": PanelUnit.SECONDS},
            links=_OF_ROW,
        ),
        stacked(
            title="Jobs by phase",
            unit=PanelUnit.NUMBER,
            shows="Jobs by the phase that `kubectl get rlhf` shows.",
            normal="Running is the widest band; Starting and Recovering are thin and short.",
            cure="A band of Recovering on many jobs at once is a node or the network, not a job.",
            queries=(Query(number_of(_PHASE, "phase"), "{{phase}}"),),
        ),
        bars(
            title="Ends of pods, by job",
            links=_OF_BAR,
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (3, YELLOW), (10, RED)),
            shows="Ends of pods in the time shown, of the ten jobs with the most.",
            normal=operator.RESTARTS.normal,
            cure="The same job again and again: `rlhf describe NAME` shows the exit codes and the last words.",
            queries=(
                Query(
                    top(_LONGEST, FLEET.increases(operator.RESTARTS, window="$__range")),
                    BY_JOB,
                    instant=True,
                ),
            ),
        ),
    ),
)
GPUS: Final = Row(
    "Who uses the GPUs, and what are they wasted on?",
    (
        stacked(
            title="GPUs by use",
            unit=PanelUnit.NUMBER,
            shows="GPUs of running jobs: those that compute, by group, and those that do not, by cause.",
            normal="groups that compute are the larger part; of generation, `training` is idle unless colocated.",
            cure="`tail` grows with long responses: fusion. `training` and `inference`: another split of the groups, "
            "or colocated ones. `starting` and `recovering`: look at the jobs.",
            queries=(
                Query(total(FLEET.rate(job.GPU_BUSY), "group"), "computes: {{group}}"),
                Query(total(FLEET.rate(job.GPU_IDLE), "cause"), "idle: {{cause}}"),
            ),
        ),
        lines(
            title="GPUs by namespace",
            unit=PanelUnit.NUMBER,
            shows="GPUs that jobs hold and ask for, of the ten namespaces with the most.",
            normal="held equals asked for, but while jobs wait.",
            cure="A namespace that asks for more than its quota waits forever: see its queue.",
            queries=(
                Query(top(_LONGEST, total(_HELD, "namespace")), "held {{namespace}}"),
                Query(top(_LONGEST, total(_REQUESTED, "namespace")), "asked for {{namespace}}"),
            ),
        ),
        bars(
            title="GPU time wasted, by job",
            links=_OF_BAR,
            unit=PanelUnit.SECONDS,
            shows="GPU time in which nothing was computed in the time shown, of the ten jobs with the most.",
            normal="below a third of a job's GPUs times the time shown.",
            cure="Open the job: its causes are there, with what each is cured by.",
            queries=(Query(top(_LONGEST, FLEET.increases(job.GPU_IDLE, window="$__range")), BY_JOB, instant=True),),
        ),
        bars(
            title="GPU time wasted, by cause",
            unit=PanelUnit.SECONDS,
            shows="The same of all jobs, by cause.",
            normal="`training` and `tail` lead; `starting`, `recovering` and `turn` are small.",
            cure="What leads here is what more hardware would not cure.",
            queries=(Query(total(FLEET.increase(job.GPU_IDLE, "$__range"), "cause"), "{{cause}}", instant=True),),
        ),
    ),
    columns=2,
)
QUEUES: Final = Row(
    "How long is the queue?",
    (
        stacked(
            title="Waiting jobs, by reason",
            unit=PanelUnit.NUMBER,
            shows="Jobs before Running, by what they wait for.",
            normal="Queued as long as the queue is full; the others for minutes.",
            cure="Unschedulable: no node fits. NameTaken: an object of another owner. Released: pods could not start.",
            queries=(
                Query(
                    or_zero(number_of(FLEET.latest(operator.WAITING_SINCE, "reason"), "reason"), "reason"), "{{reason}}"
                ),
            ),
        ),
        bars(
            title="Longest waits",
            links=_OF_BAR,
            unit=PanelUnit.SECONDS,
            shows="How long the ten jobs have waited that wait longest.",
            normal="as long as jobs before them run.",
            cure="Longer than that: its gang may be larger than what one queue ever has free.",
            queries=(Query(or_zero(top(_LONGEST, f"time() - {_WAITING}"), NAMESPACE, RLHF_JOB), BY_JOB, instant=True),),
        ),
        lines(
            title="From creation to Running, and resizes",
            empty="when neither happened within an hour",
            unit=PanelUnit.SECONDS,
            shows="Median and 90th percentile from a job's creation to Running, and of changes of size.",
            normal=operator.READY_SECONDS.normal,
            cure="Without a queue it is images and models: keep them on the nodes, or nearer to them.",
            queries=(
                Query(OPERATORS.quantile(0.5, operator.READY_SECONDS, window="1h"), "median"),
                Query(OPERATORS.quantile(0.9, operator.READY_SECONDS, window="1h"), "90%"),
                Query(OPERATORS.quantile(0.9, operator.RESIZE_SECONDS, window="1h"), "90% of resizes"),
            ),
        ),
    ),
)
FLEET_DASHBOARD: Final = Dashboard(
    "rlhf-fleet",
    "RLHF / Fleet",
    "All jobs of a cluster: what is wrong, who uses the GPUs, what they are wasted on, how long the queue is.",
    (NOW, WHICH, GPUS, QUEUES),
    variables=(Variable.CLUSTER, Variable.NAMESPACE),
    since="now-24h",
)
