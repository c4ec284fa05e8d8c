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
    "Are all workers there?",
    (
        stat(
            title="Missing",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE)),
            shows="Workers that jobs are to have and that hold no session.",
            normal="0, but while jobs start, resize or recover.",
            cure="The pods' events say why they do not come; `rlhf describe NAME` says it in words.",
            queries=(Query(or_zero(total(f"{_WANTED} - {_SESSIONS}"))),),
        ),
        stat(
            title="Lost",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE)),
            shows=samples.LOST.meaning,
            normal=samples.LOST.normal,
            cure="`rlhf describe NAME` has exit codes; several at once are a node or the network.",
            queries=(Query(or_zero(total(JOBS.increase(samples.LOST, "$__range")))),),
        ),
        stat(
            title="Not connected",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, RED)),
            shows="Workers that run and say themselves that they have no session.",
            normal="0, but while a coordinator starts.",
            cure="They cannot reach the coordinator: its pod, its Service, the job's NetworkPolicy, certificates.",
            queries=(Query(or_zero(number_of(f"{WORKERS.latest(worker.CONNECTED, 'worker')} == 0"))),),
        ),
        stacked(
            title="Workers by state",
            unit=PanelUnit.NUMBER,
            shows="Workers by the state that their coordinator sees.",
            normal=samples.WORKER_STATE.normal,
            cure="Lost or Missing for minutes: the pods' events. Starting for minutes: the loading of models.",
            queries=(Query(number_of(JOBS.latest(samples.WORKER_STATE, "worker", "state"), "state"), "{{state}}"),),
        ),
        lines(
            title="Wanted and connected",
            unit=PanelUnit.NUMBER,
            shows="Workers that each group is to have, and those with a session.",
            normal="one line over the other.",
            cure="Apart for longer than a pod takes to start: the pods' events.",
            queries=(
                Query(total(_WANTED, "group"), "wanted {{group}}"),
                Query(total(_SESSIONS, "group"), "connected {{group}}"),
            ),
        ),
        lines(
            title="Workers that came back most",
            unit=PanelUnit.NUMBER,
            shows="Returns as a new process within an hour, of the eight workers with the most.",
            normal=samples.WORKER_RESTARTS.normal,
            cure="One again and again: its node or its device; cordon the node. All: the code, or memory.",
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
    "Whose device computes?",
    (
        lines(
            title="Least busy",
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of the time that the compute thread worked, of the eight chosen workers with the least.",
            normal=worker.BUSY.normal,
            cure="Training ranks idle while the job generates; a generation worker that idles has no samples.",
            queries=(Query(bottom(_FEW, WORKERS.rates(worker.BUSY, "worker")), _WORKER),),
        ),
        lines(
            title="Most idle in generation and inference",
            unit=PanelUnit.NUMBER,
            high=1,
            shows=job.WORKER_IDLE.meaning,
            normal=job.WORKER_IDLE.normal,
            cure="Those of the tail are what fusion releases; those of inference wait for responses.",
            queries=(Query(top(_FEW, JOBS.latest(job.WORKER_IDLE, "worker", worker="~$worker")), _WORKER),),
        ),
        lines(
            title="Busy by group",
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of GPU time in which workers of a group computed.",
            normal=job.GPU_BUSY.normal,
            cure="A group that is never busy above a tenth is too large.",
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
    "Does a process run out of something?",
    (
        lines(
            title="Most memory",
            unit=PanelUnit.BYTES,
            shows="Memory of the eight pods of jobs that occupy the most, and AdamW's moments that a training rank "
            "keeps in it.",
            normal=process.RESIDENT_MEMORY.normal,
            cure="A line that only rises is a leak: note the pod and its log. At the limit the pod ends with 137.",
            queries=(
                Query(top(_FEW, JOBS.latest(process.RESIDENT_MEMORY, "pod")), _POD),
                per_job(training.HOST_OPTIMIZER, "moments"),
            ),
        ),
        lines(
            title="Most processor time",
            unit=PanelUnit.NUMBER,
            shows="Cores that the eight busiest pods of jobs use.",
            normal="a coordinator below one core; workers on GPUs one or two, on CPUs all that they may.",
            cure="A coordinator at one core holds the job up: give it its own, and see what it adds.",
            queries=(Query(top(_FEW, total(JOBS.rate(process.CPU_SECONDS), *_OF_POD)), _POD),),
        ),
        lines(
            title="Open files",
            unit=PanelUnit.SHARE,
            high=1,
            thresholds=((None, GREEN), (0.7, ORANGE), (0.9, RED)),
            shows="Share of the file descriptors that a pod may have, of the eight with the most.",
            normal="below a half; a coordinator has about one a worker.",
            cure="Near 1: raise the limit of open files of the container runtime.",
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
    "Does anybody send nonsense, and do certificates end?",
    (
        lines(
            title="Messages",
            unit=PanelUnit.PER_SECOND,
            shows=samples.MESSAGES.meaning,
            normal=samples.MESSAGES.normal,
            cure="Thousands a second with few workers: responses of single tokens; see the coordinator's core.",
            queries=(Query(JOBS.rates(samples.MESSAGES), BY_JOB),),
        ),
        lines(
            title="Dropped and refused messages",
            unit=PanelUnit.NUMBER,
            shows="Messages of leases that are no more in force, and messages that made no sense.",
            normal="0; a few after moves and lost workers. Never any that make no sense.",
            cure="Nonsense is broken or hostile code in a worker: its image, its plug-ins, and who may reach the port.",
            queries=(
                Query(JOBS.increases(samples.STALE), f"dropped {BY_JOB}"),
                Query(JOBS.increases(samples.BAD_MESSAGES), f"nonsense {BY_JOB}"),
            ),
        ),
        lines(
            title="Certificates end in",
            empty="of jobs without certificates",
            unit=PanelUnit.SECONDS,
            thresholds=((None, RED), (86400, ORANGE), (3 * 86400, GREEN)),
            shows="Time until the first certificate of a job's processes ends.",
            normal=process.CERTIFICATE_EXPIRY.normal,
            cure="Below a day: the operator does not renew it, or the pod does not read it again; look at both logs.",
            queries=(
                Query(bottom(MAX_SERIES, f"{lowest(JOBS.value(process.CERTIFICATE_EXPIRY), *JOB)} - time()"), BY_JOB),
            ),
            low=None,
        ),
        lines(
            title="Processes by version",
            unit=PanelUnit.NUMBER,
            shows="Processes of jobs by the version of the package that they run.",
            normal=process.BUILD_INFO.normal,
            cure="Two of one job for long: an image that pods name themselves.",
            queries=(Query(number_of(JOBS.value(process.BUILD_INFO), "version"), "{{version}}"),),
        ),
    ),
)
WORKERS_DASHBOARD: Final = Dashboard(
    "rlhf-workers",
    "RLHF / Workers",
    "Who is there, who is lost, whose device idles, what processes and messages cost.",
    (THERE, BUSY, PROCESSES, NONSENSE),
    variables=(Variable.CLUSTER, Variable.NAMESPACE, Variable.JOB, Variable.WORKER),
    since="now-1h",
)
