"""Alerts on operators: they do not lead, keep up or hear of changes; and on expiring certificates and unscraped jobs.

Rule: `cluster`, `namespace` and `job` of the scrape identify the operators of one release. Jobs continue to train
without an operator, but their failed pods are not replaced.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import BY_JOB, ON_JOB, WHO

_WHERE: Final = "namespace {{ $labels.namespace }}"

NOT_LEADING: Final = Alert(
    name="RLHFOperatorNotLeading",
    severity=AlertSeverity.CRITICAL,
    when="operators of a release are scraped and none of them reconciles",
    expression="sum by (cluster, namespace, job) (rlhf_operator_leader) == 0",
    lasts="5m",
    summary=f"No operator leads in {_WHERE}",
    description="Jobs train on, but no lost pod is made again, no new job starts and no status is written. The "
    "operator's log says what it waits for.",
    normal="one leads; after a crash nobody does for 15 seconds",
)
TWO_LEADERS: Final = Alert(
    name="RLHFOperatorTwoLeaders",
    severity=AlertSeverity.CRITICAL,
    when="more than one operator of a release reconciles",
    expression="sum by (cluster, namespace, job) (rlhf_operator_leader) > 1",
    lasts="2m",
    summary=f"{{{{ $value }}}} operators lead at the same time in {_WHERE}",
    description="Two operators undo each other's work and may restart jobs. Scale the Deployment to one replica, and "
    "see that leader election is on.",
    normal="one leads; one that was killed is still counted for a scrape",
)
ABSENT: Final = Alert(
    name="RLHFOperatorAbsent",
    severity=AlertSeverity.CRITICAL,
    when="no operator is scraped, or those of a release no longer are that were within the last hour",
    expression="""\
absent(rlhf_operator_leader)
or
group by (cluster, namespace, job) (last_over_time(rlhf_operator_leader[1h]))
  unless group by (cluster, namespace, job) (rlhf_operator_leader)""",
    lasts="10m",
    summary=f"No operator is scraped in {_WHERE}",
    description="It does not run, or Prometheus does not find it: no other alert of the operator, and few of jobs, can "
    "fire.",
    normal="one series for each replica",
)
QUEUE_OLD: Final = Alert(
    name="RLHFOperatorQueueOld",
    severity=AlertSeverity.WARNING,
    when="a job has waited over <ageSeconds> seconds for a reconcile",
    expression="max by (cluster, namespace, job) (rlhf_operator_workqueue_oldest_age_seconds) > <ageSeconds>",
    lasts="5m",
    summary=f"A job waits for the operator in {_WHERE} for {{{{ $value | humanizeDuration }}}}",
    description="The operator does not keep up, or the API server is slow: lost pods are made again late. After 180 "
    "seconds the operator's liveness probe restarts it.",
    normal="under a second; seconds while a thousand jobs are created",
    thresholds=(Threshold("ageSeconds", 60, "seconds that the longest-waiting job has waited"),),
)
WATCH_STALE: Final = Alert(
    name="RLHFOperatorWatchStale",
    severity=AlertSeverity.CRITICAL,
    when="the API server has said nothing for over <ageSeconds> seconds in a watch of the operator that leads",
    expression="""\
max by (cluster, namespace, job, resource) (
  (time() - rlhf_operator_watch_alive_timestamp_seconds{resource!="rlhfjobs"})
    and on (cluster, namespace, job, instance) rlhf_operator_leader == 1
) > <ageSeconds>""",
    lasts="2m",
    summary=f"The operator in {_WHERE} has heard nothing of {{{{ $labels.resource }}}} for "
    "{{ $value | humanizeDuration }}",
    description="Pods that end are seen only by the comparison every 5 minutes. Look whether the API server answers, "
    "and what is between it and the operator.",
    normal="a bookmark comes every minute or two",
    thresholds=(Threshold("ageSeconds", 300, "seconds since the API server last said something in a watch"),),
)
ERRORS: Final = Alert(
    name="RLHFOperatorErrors",
    severity=AlertSeverity.WARNING,
    when="over <errors> reconciles failed within <windowSeconds> seconds for one reason",
    expression="""\
sum by (cluster, namespace, job, reason) (
  increase(rlhf_operator_reconcile_errors_total[<windowSeconds>s])
) > <errors>""",
    lasts="5m",
    summary=f'{{{{ $value | printf "%.0f" }}}} reconciles failed in {_WHERE}: {{{{ $labels.reason }}}}',
    description="UnavailableError: the API server does not answer. RefusedError: rights are missing, as after an "
    "upgrade without the chart's roles. Bug: an error of the operator, whose log has the traceback.",
    normal="none; a few UnavailableError while the API server restarts",
    thresholds=(
        Threshold("errors", 10, "reconciles that failed in the window for one reason"),
        Threshold("windowSeconds", 900, "seconds of the window"),
    ),
)
CERTIFICATE: Final = Alert(
    name="RLHFCertificateExpiring",
    severity=AlertSeverity.WARNING,
    when="a certificate that a process of a job uses ends within <leftSeconds> seconds",
    expression=f"min {BY_JOB} (rlhf_certificate_expiry_timestamp_seconds) - time() < <leftSeconds>",
    lasts="10m",
    summary=f"A certificate of job {WHO} ends in {{{{ $value | humanizeDuration }}}}",
    description="The operator renews it when a third of its life is left, and has not, or the pod has not got it. When "
    "it ends, processes that lose a connection cannot make a new one.",
    normal="over 121 days of 365",
    thresholds=(Threshold("leftSeconds", 1209600, "seconds until it ends"),),
)
NOT_SCRAPED: Final = Alert(
    name="RLHFJobNotScraped",
    severity=AlertSeverity.WARNING,
    when="a job is Running, and Prometheus has no series of its coordinator, or of none of its workers",
    expression=f"""\
(max {BY_JOB} (rlhf_job_phase{{phase="Running"}}) == 1)
  unless {ON_JOB} max {BY_JOB} (rlhf_iteration)
or
(sum {BY_JOB} (rlhf_sessions) > 0)
  unless {ON_JOB} max {BY_JOB} (rlhf_worker_connected)""",
    lasts="10m",
    summary=f"Job {WHO} runs and is not scraped",
    description="No other alert of what it does can fire. Its pods are found by the chart's PodMonitor, or by their "
    "annotations.",
    normal="every pod of a job is a target",
)
OPERATOR: Final = Family(
    "operator",
    "whether one leads, keeps up and hears, and what follows when it does not",
    (NOT_LEADING, TWO_LEADERS, ABSENT, QUEUE_OLD, WATCH_STALE, ERRORS, CERTIFICATE, NOT_SCRAPED),
)
