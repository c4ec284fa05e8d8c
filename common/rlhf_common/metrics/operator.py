"""Metrics of the operator itself, and of the jobs from the operator's view.

The operator sets the labels `namespace` and `rlhf_job` of a job's series.
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
    source="from the moment a job leaves the queue until the operator has carried out its plan",
    normal="99% below 1 s; creating the pods of a large job takes about a millisecond per pod",
    labels=(labels.RESULT,),
    buckets=buckets.RECONCILE_SECONDS,
)
RECONCILE_ERRORS: Final = _counter(
    "rlhf_operator_reconcile_errors_total",
    unit=Unit.NUMBER,
    meaning="Reconciles that failed, by kind of error.",
    source="UnavailableError: the API server does not answer; RefusedError: rights are missing; Bug: a fault of "
    "the operator",
    normal="0 while the API server is up; report a Bug",
    labels=(labels.ERROR,),
    absent="no reconcile failed with this reason",
)
QUEUE_DEPTH: Final = _gauge(
    "rlhf_operator_workqueue_depth",
    unit=Unit.NUMBER,
    meaning="Jobs that wait for a reconcile.",
    source="the work queue",
    normal="0; after a start, the number of jobs for some seconds",
)
QUEUE_OLDEST: Final = _gauge(
    "rlhf_operator_workqueue_oldest_age_seconds",
    unit=Unit.SECONDS,
    meaning="Time for which the longest-waiting job has waited for a reconcile.",
    source="the work queue",
    normal="below 1 s; the operator is unhealthy above 180 s",
)
API_REQUESTS: Final = _counter(
    "rlhf_operator_api_requests_total",
    unit=Unit.NUMBER,
    meaning="Requests to the API server, by status code; code 0 means that no answer came.",
    source="the API client",
    normal="few while nothing changes, such as renewals of the Lease; reads of coordinators do not count",
    labels=(labels.VERB, labels.RESOURCE, labels.CODE),
    absent="the operator made no such request",
)
WATCH_EVENT: Final = _gauge(
    "rlhf_operator_watch_last_event_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time of the last event of a watch.",
    source="the reflectors",
    normal="the time of the last change of an object of that kind",
    labels=(labels.RESOURCE,),
    absent="no event has arrived yet",
)
WATCH_ALIVE: Final = _gauge(
    "rlhf_operator_watch_alive_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time of the last message of the API server in a watch: a listing before it, an event, or a "
    "bookmark, which arrives every minute or two.",
    source="the reflectors; RLHFJobs have bookmarks only from some API servers",
    normal="less than 150 s ago for kinds other than RLHFJobs",
    labels=(labels.RESOURCE,),
    absent="the operator has listed nothing yet",
)
WATCH_RELISTS: Final = _counter(
    "rlhf_operator_watch_relists_total",
    unit=Unit.NUMBER,
    meaning="Listings after which a watch had to start again.",
    source="the reflectors",
    normal="a few per day",
    labels=(labels.RESOURCE,),
    absent="no listing was needed",
)
UNREADABLE: Final = _counter(
    "rlhf_operator_unreadable_objects_total",
    unit=Unit.NUMBER,
    meaning="Objects that the operator could not parse, or could parse only in part, by kind.",
    source="parsing of watched objects; the log names each",
    normal="0",
    labels=(labels.OBJECT_KIND,),
    absent="the operator could parse every object",
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
    meaning="1 for the current status of each condition of a job.",
    source="status.conditions",
    normal="Running is True, Failed is False",
    labels=(*labels.JOB, labels.CONDITION, labels.STATUS),
    one_a_set=True,
)
PHASE: Final = _gauge(
    "rlhf_job_phase",
    unit=Unit.STATE,
    meaning="1 for the current phase of a job; the other phases have no series.",
    source="reason of the condition Running, as kubectl get rlhf shows it",
    normal="Running, until Complete",
    labels=(*labels.JOB, labels.JOB_PHASE),
    one_a_set=True,
)
PHASE_SINCE: Final = _gauge(
    "rlhf_job_phase_since_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time at which a job entered its current phase.",
    source="the time at which the operator wrote the reason; the start of the operator, if another process wrote it",
    normal="Pending, Starting and Recovering last minutes; Queued lasts as long as the queue is full",
    labels=labels.JOB,
)
CREATED: Final = _gauge(
    "rlhf_job_created_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Creation time of a job.",
    source="metadata.creationTimestamp",
    normal="constant",
    labels=labels.JOB,
)
WAITING_SINCE: Final = _gauge(
    "rlhf_job_waiting_since_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time since which a job waits, by the reason. The count of these series is the length of the queue.",
    source="rlhf_job_phase_since_timestamp_seconds of jobs before Running; phases Pending, Starting, NameTaken and "
    "Released in a row count from the first of them",
    normal="no series, or minutes ago",
    labels=(*labels.JOB, labels.WAITING),
    one_a_set=True,
    absent="the job runs, is suspended or has ended",
)
INFO: Final = _gauge(
    "rlhf_job_info",
    unit=Unit.STATE,
    meaning="Always 1; the labels describe the job.",
    source="the manifest",
    normal="one series per job",
    labels=(*labels.JOB, labels.ALGORITHM, labels.QUEUE),
)
PODS: Final = _gauge(
    "rlhf_job_group_pods",
    unit=Unit.NUMBER,
    meaning="Pods of a job by group and phase.",
    source="the pods that the operator watches",
    normal="all pods are Running while the job is Running",
    labels=(*labels.JOB, labels.POD_GROUP, labels.POD_PHASE),
    absent="no pod of this group is in this phase",
)
GPUS_REQUESTED: Final = _gauge(
    "rlhf_job_gpus_requested",
    unit=Unit.NUMBER,
    meaning="GPUs that a job requests, by group, at its desired size.",
    source="gpusPerReplica times the desired replicas of status.groups",
    normal="constant between resizes; 0 for a job on CPUs",
    labels=(*labels.JOB, labels.POD_GROUP),
)
GPUS_HELD: Final = _gauge(
    "rlhf_job_gpus_held",
    unit=Unit.NUMBER,
    meaning="GPUs that pods of a job occupy, by group. A pod occupies its GPUs while it is on a node and has not "
    "ended.",
    source="gpusPerReplica times the number of such pods",
    normal="equal to rlhf_job_gpus_requested while the job runs, 0 while it waits",
    labels=(*labels.JOB, labels.POD_GROUP),
)
RESTARTS: Final = _counter(
    "rlhf_job_restarts_total",
    unit=Unit.NUMBER,
    meaning="Ends of a job's pods that count as failures or disruptions.",
    source="status.restarts",
    normal="disruptions as often as somebody drains nodes; a few failures at most",
    labels=(*labels.JOB, labels.RESTART),
)
MEMORY_KILLS: Final = _counter(
    "rlhf_job_out_of_memory_kills_total",
    unit=Unit.NUMBER,
    meaning="Containers of a job that the kernel killed for using more memory than their limit.",
    source="status.groups: ends with the reason OOMKilled",
    normal="0; if not, raise the memory in the template of the group",
    labels=(*labels.JOB, labels.POD_GROUP),
)
ITERATION: Final = _gauge(
    "rlhf_job_iteration",
    unit=Unit.NUMBER,
    meaning="Number of iterations that a job has trained, according to its status.",
    source="status.progress.iteration, which the operator updates at most every ten seconds",
    normal="rises up to rlhf_job_iterations",
    labels=labels.JOB,
    absent="the job has made no progress yet",
)
ITERATIONS: Final = _gauge(
    "rlhf_job_iterations",
    unit=Unit.NUMBER,
    meaning="Number of iterations that a job should train.",
    source="status.progress.iterations",
    normal="constant, unless the user changes it",
    labels=labels.JOB,
    absent="the job has made no progress yet",
)
POOL: Final = _gauge(
    "rlhf_pool_replicas",
    unit=Unit.NUMBER,
    meaning="Number of workers in the migration pool of a job.",
    source="the coordinator's answer to the operator, at most ten seconds old",
    normal="0 outside the tail of generation",
    labels=labels.JOB,
    absent="the coordinator has not answered yet",
)
THRESHOLD: Final = _gauge(
    "rlhf_pool_threshold",
    unit=Unit.SAMPLES,
    meaning="Number of unfinished samples at which the tail of a job moves to its pool.",
    source="the coordinator's answer to the operator, at most ten seconds old",
    normal="a tenth to a third of the batch; 0 without fusion",
    labels=labels.JOB,
    absent="the coordinator has not answered yet",
)
POOL_DESIRED: Final = _gauge(
    "rlhf_pool_desired_replicas",
    unit=Unit.NUMBER,
    meaning="Desired number of workers of a group that can be resized.",
    source="status.groups",
    normal="the number in the manifest",
    labels=(*labels.JOB, labels.RESIZED_GROUP),
    absent="the job has no such group",
)
STREAMS: Final = _gauge(
    "rlhf_controlplane_streams",
    unit=Unit.NUMBER,
    meaning="Number of workers that have a session with the coordinator of their job.",
    source="the coordinator's answer to the operator, at most ten seconds old",
    normal="all workers of the job",
    labels=labels.JOB,
    absent="the coordinator has not answered yet",
)
RESIZE_SECONDS: Final = _histogram(
    "rlhf_pool_resize_duration_seconds",
    unit=Unit.SECONDS,
    meaning="Time from a change of a job's size until all its workers have joined or left.",
    source="times of the condition Resizing",
    normal="the time that a worker needs to start",
    buckets=buckets.POD_SECONDS,
)
READY_SECONDS: Final = _histogram(
    "rlhf_job_created_to_ready_seconds",
    unit=Unit.SECONDS,
    meaning="Time from the creation of a job to its first Running condition.",
    source="times of the object and of the condition",
    normal="the time to wait in the queue, pull images and load models",
    buckets=buckets.POD_SECONDS,
)
