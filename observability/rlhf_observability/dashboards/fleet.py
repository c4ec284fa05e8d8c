"""The fleet: all jobs of the chosen clusters, their GPUs and their queues.

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
            shows="Number of jobs with iterations in progress.",
            normal="as many as fit into the cluster.",
            cure="Find the other jobs in the table below. Their phase says what they wait for.",
            queries=(Query(or_zero(number_of(FLEET.latest(operator.PHASE, phase="Running")))),),
        ),
        stat(
            title="Waiting",
            unit=PanelUnit.NUMBER,
            shows="Number of jobs that do not run yet: they are queued, have no node, or start.",
            normal="0, or the jobs that wait in queues by design.",
            cure="The row on queues shows the reasons. `kubectl describe rlhf NAME` explains the reason for one job.",
            queries=(Query(or_zero(number_of(_WAITING))),),
        ),
        stat(
            title="Failed or recovering",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (5, RED)),
            shows="Number of jobs in the cluster that failed or lost a process.",
            normal="0; a recovering job runs again within minutes.",
            cure="`rlhf describe NAME` names the process and the cure. Delete failed jobs that nobody needs.",
            queries=(Query(or_zero(number_of(FLEET.latest(operator.PHASE, phase="~Failed|Recovering")))),),
        ),
        stat(
            title="GPUs in use",
            unit=PanelUnit.NUMBER,
            shows="GPUs that pods of jobs occupy.",
            normal="near the number of GPUs in the cluster.",
            cure="If jobs wait while GPUs are free, the free GPUs may be too scattered: a gang needs all its GPUs at "
            "once.",
            queries=(Query(or_zero(total(_HELD))),),
        ),
        stat(
            title="GPUs requested by waiting jobs",
            unit=PanelUnit.NUMBER,
            shows="GPUs that waiting jobs request.",
            normal="0, or the requests of jobs that wait in queues by design.",
            cure="If it exceeds the free GPUs of the cluster for days, add GPUs or use smaller jobs.",
            queries=(Query(or_zero(total(f"{_REQUESTED} and on ({', '.join(JOB)}) {_WAITING}"))),),
        ),
        stat(
            title="GPUs computing",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=((None, RED), (0.3, ORANGE), (0.6, GREEN)),
            shows="Share of the GPU time of running jobs in which GPUs computed.",
            normal="above 60%.",
            cure="The row on GPUs shows the causes and the jobs of the rest.",
            queries=(Query(f"{_BUSY} / ({_BUSY} + {_IDLE})"),),
        ),
    ),
)
WHICH: Final = Row(
    "Which jobs exist, and in which phase?",
    (
        table(
            title="Jobs",
            unit=PanelUnit.NUMBER,
            shows="Each job with its phase, the time in this phase, its iterations, its GPUs and the ends of its pods. "
            "A click opens the job.",
            normal="jobs are Running, and pods end where somebody drains a node.",
            cure="If a job stays in Pending, Starting or Recovering, run `rlhf describe NAME`.",
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
            shows="Number of jobs by the phase that `kubectl get rlhf` shows.",
            normal="Running is the widest band; Starting and Recovering are thin and short.",
            cure="If many jobs are Recovering at once, the cause is a node or the network.",
            queries=(Query(number_of(_PHASE, "phase"), "{{phase}}"),),
        ),
        bars(
            title="Ends of pods, by job",
            links=_OF_BAR,
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (3, YELLOW), (10, RED)),
            shows="Ends of pods in the chosen time, for the ten jobs with the most ends.",
            normal=operator.RESTARTS.normal,
            cure="If a job appears repeatedly, `rlhf describe NAME` shows exit codes and last log lines.",
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
    "Who uses the GPUs, and why are GPUs idle?",
    (
        stacked(
            title="GPUs by use",
            unit=PanelUnit.NUMBER,
            shows="GPUs of running jobs: those that compute, by group, and idle ones, by cause.",
            normal="computing GPUs are the larger part; generation is idle for `training`, unless it is colocated.",
            cure="For `tail`, which grows with long responses, use fusion. For `training` and `inference`, use other "
            "group sizes or colocation. For `starting` and `recovering`, check the jobs.",
            queries=(
                Query(total(FLEET.rate(job.GPU_BUSY), "group"), "computes: {{group}}"),
                Query(total(FLEET.rate(job.GPU_IDLE), "cause"), "idle: {{cause}}"),
            ),
        ),
        lines(
            title="GPUs by namespace",
            unit=PanelUnit.NUMBER,
            shows="GPUs in use and requested GPUs, for the ten namespaces with the most.",
            normal="both are equal while no job waits.",
            cure="A namespace that requests more than its quota waits without end: check its queue.",
            queries=(
                Query(top(_LONGEST, total(_HELD, "namespace")), "held {{namespace}}"),
                Query(top(_LONGEST, total(_REQUESTED, "namespace")), "asked for {{namespace}}"),
            ),
        ),
        bars(
            title="Idle GPU time, by job",
            links=_OF_BAR,
            unit=PanelUnit.SECONDS,
            shows="Idle GPU time in the chosen time, for the ten jobs with the most.",
            normal="below a third of a job's GPUs multiplied by the chosen time.",
            cure="Open the job. Its dashboard shows each cause with a cure.",
            queries=(Query(top(_LONGEST, FLEET.increases(job.GPU_IDLE, window="$__range")), BY_JOB, instant=True),),
        ),
        bars(
            title="Idle GPU time, by cause",
            unit=PanelUnit.SECONDS,
            shows="Idle GPU time of all jobs in the chosen time, by cause.",
            normal="`training` and `tail` lead; `starting`, `recovering` and `turn` are small.",
            cure="More hardware does not reduce the largest cause: follow the advice of the panel GPUs by use.",
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
            shows="Number of jobs that do not run yet, by reason.",
            normal="Queued lasts as long as the queue is full; other reasons last minutes.",
            cure="Unschedulable: no node can take a pod. NameTaken: another owner has an object of the name. "
            "Released: pods could not start.",
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
            shows="Waiting time of the ten jobs that have waited longest.",
            normal="the remaining time of the jobs before them.",
            cure="If a job waits longer, its gang may be larger than the free part of any queue.",
            queries=(Query(or_zero(top(_LONGEST, f"time() - {_WAITING}"), NAMESPACE, RLHF_JOB), BY_JOB, instant=True),),
        ),
        lines(
            title="Time to Running, and time of resizes",
            empty="if no job started or changed its size within an hour",
            unit=PanelUnit.SECONDS,
            shows="Median and 90th percentile of the time from creation to Running, and of the time of resizes.",
            normal=operator.READY_SECONDS.normal,
            cure="Without a queue, images and models take the time: store them on the nodes or near them.",
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
    "All jobs of a cluster: faults, GPUs in use, idle GPUs and their causes, and the length of the queue.",
    (NOW, WHICH, GPUS, QUEUES),
    variables=(Variable.CLUSTER, Variable.NAMESPACE),
    since="now-24h",
)
