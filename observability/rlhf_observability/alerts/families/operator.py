"""Alerts on operators: they do not lead, keep up or hear of changes; and on expiring certificates and unscraped jobs.

Rule: `cluster`, `namespace` and `job` of the scrape identify the operators of one release.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import BY_JOB, ON_JOB, WHO

_WHERE: Final = "namespace {{ $labels.namespace }}"
_WHERE_IF_SCRAPED: Final = f"{{{{ if $labels.namespace }}}} in {_WHERE}{{{{ end }}}}"
"""The namespace with `in`; empty if Prometheus has no operator at all, so that `absent` has no labels."""

NOT_LEADING: Final = Alert(
    name="RLHFOperatorNotLeading",
    severity=AlertSeverity.CRITICAL,
    when="operators of a release are scraped, and none of them reconciles",
    expression="sum by (cluster, namespace, job) (rlhf_operator_leader) == 0",
    lasts="5m",
    summary=f"No operator leads in {_WHERE}",
    description="Jobs continue to train, but the operator replaces no lost pods, starts no new jobs and writes no "
    "status. Its log says what it waits for.",
    normal="one operator leads; after a crash, none leads for 15 seconds",
)
TWO_LEADERS: Final = Alert(
    name="RLHFOperatorTwoLeaders",
    severity=AlertSeverity.CRITICAL,
    when="more than one operator of a release reconciles",
    expression="sum by (cluster, namespace, job) (rlhf_operator_leader) > 1",
    lasts="2m",
    summary=f"{{{{ $value }}}} operators lead at the same time in {_WHERE}",
    description="Two operators undo each other's work and may restart jobs. Scale the Deployment to one replica, and "
    "enable leader election.",
    normal="one operator leads; a killed one still counts until the next scrape",
)
ABSENT: Final = Alert(
    name="RLHFOperatorAbsent",
    severity=AlertSeverity.CRITICAL,
    when="no operator is scraped, or a release that was scraped within the last hour no longer is",
    expression="""\
absent(rlhf_operator_leader)
or
group by (cluster, namespace, job) (last_over_time(rlhf_operator_leader[1h]))
  unless group by (cluster, namespace, job) (rlhf_operator_leader)""",
    lasts="10m",
    summary=f"Prometheus scrapes no operator{_WHERE_IF_SCRAPED}",
    description="The operator does not run, or Prometheus does not find it. No other alert on the operator can fire, "
    "and few alerts on jobs can.",
    normal="one series for each replica",
)
QUEUE_OLD: Final = Alert(
    name="RLHFOperatorQueueOld",
    severity=AlertSeverity.WARNING,
    when="a job has waited for a reconcile for more than <ageSeconds> seconds",
    expression="max by (cluster, namespace, job) (rlhf_operator_workqueue_oldest_age_seconds) > <ageSeconds>",
    lasts="5m",
    summary=f"A job has waited for the operator in {_WHERE} for {{{{ $value | humanizeDuration }}}}",
    description="The operator is overloaded, or the API server is slow, so the operator replaces lost pods late. Its "
    "liveness probe restarts it after 180 seconds.",
    normal="less than a second; seconds while users create a thousand jobs",
    thresholds=(Threshold("ageSeconds", 60, "seconds that the longest-waiting job has waited"),),
)
WATCH_STALE: Final = Alert(
    name="RLHFOperatorWatchStale",
    severity=AlertSeverity.CRITICAL,
    when="the leading operator has received nothing in a watch for more than <ageSeconds> seconds",
    expression="""\
max by (cluster, namespace, job, resource) (
  (time() - rlhf_operator_watch_alive_timestamp_seconds{resource!="rlhfjobs"})
    and on (cluster, namespace, job, instance) rlhf_operator_leader == 1
) > <ageSeconds>""",
    lasts="2m",
    summary=f"The operator in {_WHERE} has received nothing about {{{{ $labels.resource }}}} for "
    "{{ $value | humanizeDuration }}",
    description="The operator notices ended pods late, in its comparison every 5 minutes. Check the API server, and "
    "the connection between it and the operator.",
    normal="a bookmark arrives every minute or two",
    thresholds=(Threshold("ageSeconds", 300, "seconds since the API server last said something in a watch"),),
)
ERRORS: Final = Alert(
    name="RLHFOperatorErrors",
    severity=AlertSeverity.WARNING,
    when="more than <errors> reconciles failed for one reason within <windowSeconds> seconds",
    expression="""\
sum by (cluster, namespace, job, reason) (
  increase(rlhf_operator_reconcile_errors_total[<windowSeconds>s])
) > <errors>""",
    lasts="5m",
    summary=f'{{{{ $value | printf "%.0f" }}}} reconciles failed in {_WHERE}: {{{{ $labels.reason }}}}',
    description="UnavailableError: the API server does not answer. RefusedError: the operator lacks rights, for "
    "example after an upgrade without the chart's roles. Bug: a fault of the operator; its log has the "
    "traceback.",
    normal="0; a few UnavailableError while the API server restarts",
    thresholds=(
        Threshold("errors", 10, "failed reconciles within the window, for one reason"),
        Threshold("windowSeconds", 900, "seconds of the window"),
    ),
)
CERTIFICATE: Final = Alert(
    name="RLHFCertificateExpiring",
    severity=AlertSeverity.WARNING,
    when="a certificate that a process of a job uses expires within <leftSeconds> seconds",
    expression=f"min {BY_JOB} (rlhf_certificate_expiry_timestamp_seconds) - time() < <leftSeconds>",
    lasts="10m",
    summary=f"A certificate of job {WHO} expires in {{{{ $value | humanizeDuration }}}}",
    description="The operator renews a certificate when a third of its lifetime is left. Either it did not renew "
    "this one, or the pod did not receive the new one. After the expiry, processes cannot open new "
    "connections.",
    normal="more than 121 days left of 365",
    thresholds=(Threshold("leftSeconds", 1209600, "seconds until the certificate expires"),),
)
NOT_SCRAPED: Final = Alert(
    name="RLHFJobNotScraped",
    severity=AlertSeverity.WARNING,
    when="a job is Running or Recovering and Prometheus has no series of its coordinator, or its workers are "
    "connected and Prometheus has no series of any of them",
    expression=f"""\
(max {BY_JOB} (rlhf_job_phase{{phase=~"Running|Recovering"}}) == 1)
  unless {ON_JOB} max {BY_JOB} (rlhf_iteration)
or
(sum {BY_JOB} (rlhf_sessions) > 0)
  unless {ON_JOB} max {BY_JOB} (rlhf_worker_connected)""",
    lasts="10m",
    summary=f"Prometheus does not scrape the coordinator or the workers of job {WHO}",
    description="Other alerts on the work of the job cannot fire. Prometheus finds the pods by the chart's "
    "PodMonitor or by their annotations. If the job is Recovering, its coordinator may not answer the operator "
    "either.",
    normal="every pod of a job is a target",
)
OPERATOR: Final = Family(
    "operator",
    "the operator's leadership, queue, watches and errors, and certificates and scrapes of jobs",
    (NOT_LEADING, TWO_LEADERS, ABSENT, QUEUE_OLD, WATCH_STALE, ERRORS, CERTIFICATE, NOT_SCRAPED),
)
