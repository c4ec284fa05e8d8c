"""Metrics of the operator itself, and of every job from the operator's view.

Rule: the series of a job end with the job. The process itself sets the labels `namespace` and `rlhf_job`: a scrape must
honor them (the chart's ServiceMonitor does).
"""

from functools import partial
from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Metric, MetricKind, Server, Unit

_gauge = partial(Metric, kind=MetricKind.GAUGE, servers=(Server.OPERATOR,))
_counter = partial(Metric, kind=MetricKind.COUNTER, servers=(Server.OPERATOR,))
_histogram = partial(Metric, kind=MetricKind.HISTOGRAM, servers=(Server.OPERATOR,))

# ---------------------------------------------------------------- the operator

RECONCILE_SECONDS: Final = _histogram(
    "rlhf_operator_reconcile_duration_seconds",
    unit=Unit.SECONDS,
    meaning="Time of one reconcile.",
    source="from taking a job from the queue until its plan is carried out",
    normal="99% below 1 s; making the pods of a large job takes a millisecond a pod",
    labels=(labels.RESULT,),
    buckets=buckets.RECONCILE_SECONDS,
)
RECONCILE_ERRORS: Final = _counter(
    "rlhf_operator_reconcile_errors_total",
    unit=Unit.NUMBER,
    meaning="Reconciles that failed, by kind of error.",
    source="UnavailableError: the API server; RefusedError: rights; Bug: report it",
    normal="0 but while the API server is down; never Bug",
    labels=(labels.ERROR,),
    absent="none failed with this reason",
)
QUEUE_DEPTH: Final = _gauge(
    "rlhf_operator_workqueue_depth",
    unit=Unit.NUMBER,
    meaning="Jobs that wait for a reconcile.",
    source="the work queue",
    normal="0, and for seconds as many as jobs after a start",
)
QUEUE_OLDEST: Final = _gauge(
    "rlhf_operator_workqueue_oldest_age_seconds",
    unit=Unit.SECONDS,
    meaning="Time the longest-waiting job has waited for a reconcile.",
    source="the work queue",
    normal="below 1 s; the operator is unhealthy above 180 s",
)
API_REQUESTS: Final = _counter(
    "rlhf_operator_api_requests_total",
    unit=Unit.NUMBER,
    meaning="Answered requests to the API server; code 0 means no answer.",
    source="the API client",
    normal="few when nothing changes: the Lease, and a small read a job every ten seconds is not among them",
    labels=(labels.VERB, labels.RESOURCE, labels.CODE),
    absent="none was made",
)
WATCH_EVENT: Final = _gauge(
    "rlhf_operator_watch_last_event_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When the last event of a watch came.",
    source="the reflectors",
    normal="as old as the last change of an object of that kind",
    labels=(labels.RESOURCE,),
    absent="no event came yet",
)
WATCH_ALIVE: Final = _gauge(
    "rlhf_operator_watch_alive_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When the API server last said something in a watch: a listing before it, an event, or a bookmark, which "
    "comes every minute or two.",
    source="the reflectors; RLHFJobs have bookmarks only from some API servers",
    normal="below 150 s ago for kinds other than RLHFJobs",
    labels=(labels.RESOURCE,),
    absent="nothing was listed yet",
)
WATCH_RELISTS: Final = _counter(
    "rlhf_operator_watch_relists_total",
    unit=Unit.NUMBER,
    meaning="Listings of watches that could not go on where they were.",
    source="the reflectors",
    normal="a few a day",
    labels=(labels.RESOURCE,),
    absent="none was needed",
)
UNREADABLE: Final = _counter(
    "rlhf_operator_unreadable_objects_total",
    unit=Unit.NUMBER,
    meaning="Objects that could not be read, or not to the end, by kind.",
    source="parsing of watched objects; the log names each",
    normal="0",
    labels=(labels.OBJECT_KIND,),
    absent="none was",
)
LEADER: Final = _gauge(
    "rlhf_operator_leader",
    unit=Unit.STATE,
    meaning="1 while this process reconciles.",
    source="the Lease, or 1 without leader election",
    normal="1 for exactly one process of a release",
)

# ---------------------------------------------------------------- jobs

CONDITION: Final = _gauge(
    "rlhf_job_condition",
    unit=Unit.STATE,
    meaning="1 for the status that each condition of a job has.",
    source="status.conditions",
    normal="Running is True, Failed is False",
    labels=(*labels.JOB, labels.CONDITION, labels.STATUS),
    one_a_set=True,
)
PHASE: Final = _gauge(
    "rlhf_job_phase",
    unit=Unit.STATE,
    meaning="1 for the phase that a job is in; the others have no series.",
    source="reason of the condition Running, as kubectl get rlhf shows it",
    normal="Running, until Complete",
    labels=(*labels.JOB, labels.JOB_PHASE),
    one_a_set=True,
)
PHASE_SINCE: Final = _gauge(
    "rlhf_job_phase_since_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When a job entered the phase that it is in.",
    source="the moment at which the operator wrote the reason; its start, where another process wrote it",
    normal="Pending, Starting and Recovering last minutes; Queued as long as the queue is full",
    labels=labels.JOB,
)
CREATED: Final = _gauge(
    "rlhf_job_created_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When a job was created.",
    source="metadata.creationTimestamp",
    normal="constant",
    labels=labels.JOB,
)
WAITING_SINCE: Final = _gauge(
    "rlhf_job_waiting_since_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Since when a job that does not run waits, by what it waits for; count() of it is the length of the queue.",
    source="phase and rlhf_job_phase_since_timestamp_seconds of jobs before Running",
    normal="no series, or minutes ago",
    labels=(*labels.JOB, labels.WAITING),
    one_a_set=True,
    absent="the job runs, is suspended or has ended",
)
INFO: Final = _gauge(
    "rlhf_job_info",
    unit=Unit.STATE,
    meaning="Always 1; labels say what kind of job it is.",
    source="the manifest",
    normal="one a job",
    labels=(*labels.JOB, labels.ALGORITHM, labels.QUEUE),
)
PODS: Final = _gauge(
    "rlhf_job_group_pods",
    unit=Unit.NUMBER,
    meaning="Pods of a job by group and phase.",
    source="the pods that the operator watches",
    normal="all Running while the job is Running",
    labels=(*labels.JOB, labels.POD_GROUP, labels.POD_PHASE),
    absent="no pod of this group is in this phase",
)
GPUS_REQUESTED: Final = _gauge(
    "rlhf_job_gpus_requested",
    unit=Unit.NUMBER,
    meaning="GPUs that a job asks for, by group, at the size that it is to have now.",
    source="gpusPerReplica times the desired replicas of status.groups",
    normal="constant but for resizing; 0 of a job on CPUs",
    labels=(*labels.JOB, labels.POD_GROUP),
)
GPUS_HELD: Final = _gauge(
    "rlhf_job_gpus_held",
    unit=Unit.NUMBER,
    meaning="GPUs that pods of a job hold, by group: pods that are on a node and have not ended.",
    source="gpusPerReplica times such pods",
    normal="equal to rlhf_job_gpus_requested while the job runs, 0 while it waits",
    labels=(*labels.JOB, labels.POD_GROUP),
)
RESTARTS: Final = _counter(
    "rlhf_job_restarts_total",
    unit=Unit.NUMBER,
    meaning="Ends of a job's pods that were counted.",
    source="status.restarts",
    normal="disruptions as often as nodes are drained; failures at most a few",
    labels=(*labels.JOB, labels.RESTART),
)
MEMORY_KILLS: Final = _counter(
    "rlhf_job_out_of_memory_kills_total",
    unit=Unit.NUMBER,
    meaning="Containers of a job that were killed for using more memory than their limit.",
    source="status.groups: ends with the reason OOMKilled",
    normal="0; else raise the memory in the group's template",
    labels=(*labels.JOB, labels.POD_GROUP),
)
ITERATION: Final = _gauge(
    "rlhf_job_iteration",
    unit=Unit.NUMBER,
    meaning="Iterations that a job has trained, as its status says.",
    source="status.progress.iteration, refreshed at most every ten seconds",
    normal="rises until rlhf_job_iterations",
    labels=labels.JOB,
    absent="the job has made no progress yet",
)
ITERATIONS: Final = _gauge(
    "rlhf_job_iterations",
    unit=Unit.NUMBER,
    meaning="Iterations that a job is to train.",
    source="status.progress.iterations",
    normal="constant, or as the user changes it",
    labels=labels.JOB,
    absent="the job has made no progress yet",
)
POOL: Final = _gauge(
    "rlhf_pool_replicas",
    unit=Unit.NUMBER,
    meaning="Workers in the migration pool of a job now.",
    source="the coordinator's answer to the operator, at most ten seconds old",
    normal="0 but in the tail of generation",
    labels=labels.JOB,
    absent="the coordinator did not answer yet",
)
THRESHOLD: Final = _gauge(
    "rlhf_pool_threshold",
    unit=Unit.SAMPLES,
    meaning="Unfinished samples at which the tail of a job moves to its pool.",
    source="the coordinator's answer to the operator, at most ten seconds old",
    normal="a tenth to a third of the batch; 0 without fusion",
    labels=labels.JOB,
    absent="the coordinator did not answer yet",
)
POOL_DESIRED: Final = _gauge(
    "rlhf_pool_desired_replicas",
    unit=Unit.NUMBER,
    meaning="Workers that a job is to have of a group that can be resized.",
    source="status.groups",
    normal="what the manifest says",
    labels=(*labels.JOB, labels.RESIZED_GROUP),
    absent="the job has no such group",
)
STREAMS: Final = _gauge(
    "rlhf_controlplane_streams",
    unit=Unit.NUMBER,
    meaning="Workers that hold a session with their job's coordinator.",
    source="the coordinator's answer to the operator, at most ten seconds old",
    normal="all workers of the job",
    labels=labels.JOB,
    absent="the coordinator did not answer yet",
)
RESIZE_SECONDS: Final = _histogram(
    "rlhf_pool_resize_duration_seconds",
    unit=Unit.SECONDS,
    meaning="From a change of a job's size until all its workers have joined or left.",
    source="times of the condition Resizing",
    normal="as long as a worker takes to start",
    buckets=buckets.POD_SECONDS,
)
READY_SECONDS: Final = _histogram(
    "rlhf_job_created_to_ready_seconds",
    unit=Unit.SECONDS,
    meaning="From a job's creation to its first Running condition.",
    source="times of the object and of the condition",
    normal="the time of pulling images and loading models, and of the queue",
    buckets=buckets.POD_SECONDS,
)
