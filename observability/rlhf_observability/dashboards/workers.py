"""Workers: connected and lost workers, idle devices, and the cost of processes and messages.

Questions, in the order of the rows:
- On call: are all workers connected; which one was lost?
- Engineer: which devices compute, which are idle?
- On call: does a process run out of memory, processor or files?
- Are there invalid messages, and do certificates expire?
"""

from typing import Final

from rlhf_common.metrics import job, process, samples, training, worker
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    MAX_SERIES,
    ORANGE,
    RED,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    Variable,
    lines,
    per_job,
    stacked,
    stat,
)
from rlhf_observability.promql import JOB, JOBS, WORKERS, bottom, lowest, number_of, or_zero, top, total

_FEW: Final = 8  # workers or pods that a person can distinguish
_WORKER = f"{{{{worker}}}} {BY_JOB}"
_POD = "{{namespace}}/{{pod}}"
_OF_POD = (*JOB, "pod")

_WANTED, _SESSIONS = JOBS.latest(samples.WANTED, "group"), JOBS.latest(samples.SESSIONS, "group")

THERE: Final = Row(
    "Are all workers connected?",
    (
        stat(
            title="Missing",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE)),
            shows="Wanted workers of jobs without a session.",
            normal="0, except while jobs start, resize or recover.",
            cure="The events of the pods say why they do not start; `rlhf describe NAME` explains them.",
            queries=(Query(or_zero(total(f"{_WANTED} - {_SESSIONS}"))),),
        ),
        stat(
            title="Lost",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE)),
            shows=samples.LOST.meaning,
            normal=samples.LOST.normal,
            cure="`rlhf describe NAME` shows exit codes. If several are lost at once, the cause is a node or the "
            "network.",
            queries=(Query(or_zero(total(JOBS.increase(samples.LOST, "$__range")))),),
        ),
        stat(
            title="Not connected",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, RED)),
            shows="Workers that run and report that they have no session.",
            normal="0, except while a coordinator starts.",
            cure="They cannot reach the coordinator: check its pod, its Service, the NetworkPolicy of the job, and "
            "certificates.",
            queries=(Query(or_zero(number_of(f"{WORKERS.latest(worker.CONNECTED, 'worker')} == 0"))),),
        ),
        stacked(
            title="Workers by state",
            unit=PanelUnit.NUMBER,
            shows="Number of workers by the state that their coordinator reports.",
            normal=samples.WORKER_STATE.normal,
            cure="If workers stay Lost or Missing for minutes, read the events of their pods. If they stay Starting, "
            "they load models.",
            queries=(Query(number_of(JOBS.latest(samples.WORKER_STATE, "worker", "state"), "state"), "{{state}}"),),
        ),
        lines(
            title="Wanted and connected",
            unit=PanelUnit.NUMBER,
            shows="Wanted workers of each group, and workers with a session.",
            normal="both lines are equal.",
            cure="If they differ for longer than a pod takes to start, read the events of the pods.",
            queries=(
                Query(total(_WANTED, "group"), "wanted {{group}}"),
                Query(total(_SESSIONS, "group"), "connected {{group}}"),
            ),
        ),
        lines(
            title="Workers with the most restarts",
            unit=PanelUnit.NUMBER,
            shows="Restarts as a new process within an hour, for the eight workers with the most.",
            normal=samples.WORKER_RESTARTS.normal,
            cure="If one worker restarts repeatedly, its node or device may be faulty: cordon the node. If all do, "
            "check the code and memory.",
            queries=(
                Query(
                    top(_FEW, JOBS.increases(samples.WORKER_RESTARTS, "worker", window="1h", worker="~$worker")),
                    _WORKER,
                ),
            ),
        ),
    ),
)
BUSY: Final = Row(
    "Which devices compute?",
    (
        lines(
            title="Least busy workers",
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the time for which the compute thread worked, for the eight least busy of the chosen "
            "workers.",
            normal=worker.BUSY.normal,
            cure="Training ranks are idle while the job generates. An idle generation worker has no samples.",
            queries=(Query(bottom(_FEW, WORKERS.rates(worker.BUSY, "worker")), _WORKER),),
        ),
        lines(
            title="Most idle in generation and inference",
            unit=PanelUnit.NUMBER,
            high=1,
            shows=job.WORKER_IDLE.meaning,
            normal=job.WORKER_IDLE.normal,
            cure="Fusion releases workers that are idle in the tail. Idle inference workers wait for responses.",
            queries=(Query(top(_FEW, JOBS.latest(job.WORKER_IDLE, "worker", worker="~$worker")), _WORKER),),
        ),
        lines(
            title="Busy share by group",
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of GPU time in which workers of a group computed.",
            normal=job.GPU_BUSY.normal,
            cure="If a group stays below a tenth, it is too large.",
            queries=(
                Query(
                    f"{total(JOBS.rate(job.GPU_BUSY), 'group')} / {total(JOBS.latest(job.GPUS, 'group'), 'group')}",
                    "{{group}}",
                ),
            ),
        ),
    ),
)
PROCESSES: Final = Row(
    "Does a process run out of resources?",
    (
        lines(
            title="Most memory",
            unit=PanelUnit.BYTES,
            shows="Resident memory of the eight pods of jobs with the most, and the size of "
            "AdamW's moments in host memory.",
            normal=process.RESIDENT_MEMORY.normal,
            cure="If a line only rises, memory leaks: save the name of the pod and its log. At its limit the pod ends "
            "with exit code 137.",
            queries=(
                Query(top(_FEW, JOBS.latest(process.RESIDENT_MEMORY, "pod")), _POD),
                per_job(training.HOST_OPTIMIZER, "moments"),
            ),
        ),
        lines(
            title="Most CPU time",
            unit=PanelUnit.NUMBER,
            shows="Cores that the eight busiest pods of jobs use.",
            normal="a coordinator uses less than one core; a worker on a GPU one or two, and on CPUs all that it may "
            "use.",
            cure="A coordinator at one core delays the job: give it a core of its own, and check the time that it "
            "adds.",
            queries=(Query(top(_FEW, total(JOBS.rate(process.CPU_SECONDS), *_OF_POD)), _POD),),
        ),
        lines(
            title="Open files",
            unit=PanelUnit.SHARE,
            high=1,
            thresholds=((None, GREEN), (0.7, ORANGE), (0.9, RED)),
            shows="Open file descriptors as a share of the limit, for the eight pods with the highest share.",
            normal="below a half; a coordinator has about one per worker.",
            cure="Near 1, raise the limit of open files of the container runtime.",
            queries=(
                Query(
                    top(_FEW, f"{JOBS.latest(process.OPEN_FILES, 'pod')} / {JOBS.latest(process.MAX_FILES, 'pod')}"),
                    _POD,
                ),
            ),
        ),
    ),
)
NONSENSE: Final = Row(
    "Are there invalid messages, and do certificates expire?",
    (
        lines(
            title="Messages",
            unit=PanelUnit.PER_SECOND,
            shows=samples.MESSAGES.meaning,
            normal=samples.MESSAGES.normal,
            cure="Thousands per second with few workers mean responses of single tokens: check the CPU of the "
            "coordinator.",
            queries=(Query(JOBS.rates(samples.MESSAGES), BY_JOB),),
        ),
        lines(
            title="Dropped and invalid messages",
            unit=PanelUnit.NUMBER,
            shows="Messages about leases that are no longer in force, and invalid messages.",
            normal="0; a few dropped messages after moves and lost workers.",
            cure="Invalid messages mean broken or hostile code in a worker: check its image, its plug-ins, and who "
            "can reach the port.",
            queries=(
                Query(JOBS.increases(samples.STALE), f"dropped {BY_JOB}"),
                Query(JOBS.increases(samples.BAD_MESSAGES), f"nonsense {BY_JOB}"),
            ),
        ),
        lines(
            title="Time until certificates expire",
            empty="for jobs without certificates",
            unit=PanelUnit.SECONDS,
            thresholds=((None, RED), (86400, ORANGE), (3 * 86400, GREEN)),
            shows="Time until the first certificate of a job's processes expires.",
            normal=process.CERTIFICATE_EXPIRY.normal,
            cure="Below a day, the operator did not renew it, or the pod did not read it again: check both logs.",
            queries=(
                Query(bottom(MAX_SERIES, f"{lowest(JOBS.value(process.CERTIFICATE_EXPIRY), *JOB)} - time()"), BY_JOB),
            ),
            low=None,
        ),
        lines(
            title="Processes by version",
            unit=PanelUnit.NUMBER,
            shows="Number of processes of jobs by the version of the package.",
            normal=process.BUILD_INFO.normal,
            cure="If a job has two versions for long, a pod template names an image of its own.",
            queries=(Query(number_of(JOBS.value(process.BUILD_INFO), "version"), "{{version}}"),),
        ),
    ),
)
WORKERS_DASHBOARD: Final = Dashboard(
    "rlhf-workers",
    "RLHF / Workers",
    "Connected and lost workers, idle devices, and the cost of processes and messages.",
    (THERE, BUSY, PROCESSES, NONSENSE),
    variables=(Variable.CLUSTER, Variable.NAMESPACE, Variable.JOB, Variable.WORKER),
    since="now-1h",
)
