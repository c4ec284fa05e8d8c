"""Alerts on the course of a job: it does not start, is stuck, makes no progress, keeps recovering, or has failed.

Rule: waiting reasons, failures and conditions come from the operator, which also sees jobs without a coordinator;
activity comes from the coordinator. A complete or suspended job has no waiting reason, and queries of activity exclude
it.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Recording, Threshold
from rlhf_observability.alerts.families.job_labels import BY_JOB, JOB, ON_JOB, UNLESS_ENDED, WHO, unless_phase

_STUCK_SECONDS: Final = {
    "Starting": 1800,
    "Generating": 900,
    "Scoring": 1800,
    "Training": 3600,
    "Publishing": 900,
    "Checkpointing": 3600,
    "Recovering": 1800,
}
"""Phase of the coordinator -> default maximum of seconds without progress in it."""


def _waiting(reasons: str, threshold: str) -> str:
    return f"""\
time() - max by ({JOB}, reason) (
  rlhf_job_waiting_since_timestamp_seconds{{reason=~"{reasons}"}}
) > <{threshold}>"""


WITHOUT_PROGRESS: Final = Recording(
    name="rlhf_job:without_progress_seconds",
    expression=f"""\
(time() - max {BY_JOB} (rlhf_last_progress_timestamp_seconds))
* {ON_JOB} group_right ()
(max by ({JOB}, phase) (rlhf_phase) == 1)""",
    why="once, and not once for each phase of RLHFJobStuck",
)
NOT_STARTING: Final = Alert(
    name="RLHFJobNotStarting",
    severity=AlertSeverity.WARNING,
    when="a job has been Pending, Starting, NameTaken or Released for over <startSeconds> seconds",
    expression=_waiting("Pending|Starting|NameTaken|Released", "startSeconds"),
    lasts="2m",
    summary=f"Job {WHO} has been {{{{ $labels.reason }}}} for {{{{ $value | humanizeDuration }}}}",
    description="Its pods may hold GPUs and do nothing. The message of its condition Running says what it waits for "
    "and what to do.",
    normal="minutes: pulling images, loading models",
    thresholds=(Threshold("startSeconds", 2400, "seconds until a job that may start runs"),),
)
UNSCHEDULABLE: Final = Alert(
    name="RLHFJobUnschedulable",
    severity=AlertSeverity.WARNING,
    when="no node could take a pod of a job for over <unschedulableSeconds> seconds",
    expression=_waiting("Unschedulable", "unschedulableSeconds"),
    lasts="2m",
    summary=f"No node can take a pod of job {WHO}, for {{{{ $value | humanizeDuration }}}}",
    description="Without a gang its other pods hold their GPUs meanwhile. The message of its condition Running has the "
    "scheduler's words.",
    normal="minutes, while nodes are added",
    thresholds=(Threshold("unschedulableSeconds", 3600, "seconds for which no node takes a pod"),),
)
QUEUED: Final = Alert(
    name="RLHFJobQueued",
    severity=AlertSeverity.INFO,
    when="a job has waited over <queuedSeconds> seconds for its queue",
    expression=_waiting("Queued", "queuedSeconds"),
    lasts="2m",
    summary=f"Job {WHO} has been queued for {{{{ $value | humanizeDuration }}}}",
    description="It holds no GPUs. The condition Admitted has the queue's words; a job that asks for more than the "
    "queue's whole quota waits for ever.",
    normal="as long as the queue is full",
    thresholds=(Threshold("queuedSeconds", 86400, "seconds in the queue"),),
)
STUCK: Final = Alert(
    name="RLHFJobStuck",
    severity=AlertSeverity.CRITICAL,
    when="no token, score, optimizer batch, loaded version or checkpoint came in for as long as the phase of the job "
    "allows",
    expression="(\n  "
    + "\n  or ".join(
        f'{WITHOUT_PROGRESS.name}{{phase="{phase}"}} > <{phase.lower()}Seconds>' for phase in _STUCK_SECONDS
    )
    + "\n)\n"
    + unless_phase("Queued", "Unschedulable", "Released", "NameTaken", "Complete", "Failed", "Suspended"),
    lasts="2m",
    summary=f"Job {WHO} is stuck in {{{{ $labels.phase }}}}: nothing came in for {{{{ $value | humanizeDuration }}}}",
    description="All its GPUs are held for nothing. `rlhf describe` names the worker that is waited for.",
    normal="seconds; minutes in a long optimizer batch",
    thresholds=tuple(
        Threshold(f"{phase.lower()}Seconds", seconds, f"seconds without progress in phase {phase}")
        for phase, seconds in _STUCK_SECONDS.items()
    ),
)
NO_PROGRESS: Final = Alert(
    name="RLHFJobNoProgress",
    severity=AlertSeverity.CRITICAL,
    when="a job that is neither waiting nor suspended has finished no iteration for <windowSeconds> seconds, and its "
    "last one took under a third of that; its first one may take three times as long",
    expression=f"""\
(
  max {BY_JOB} (max_over_time(rlhf_iteration[<windowSeconds>s]))
    == min {BY_JOB} (min_over_time(rlhf_iteration[<windowSeconds>s]))
)
and {ON_JOB} (
  (time() - max {BY_JOB} (rlhf_job_created_timestamp_seconds) > <windowSeconds> * 3)
  or
  (time() - max {BY_JOB} (rlhf_job_created_timestamp_seconds) > <windowSeconds>
    and {ON_JOB} max {BY_JOB} (last_over_time(rlhf_iteration[<windowSeconds>s])) > 0)
)
and {ON_JOB} max {BY_JOB} (rlhf_job_phase{{phase=~"Running|Recovering"}}) == 1
unless {ON_JOB} max {BY_JOB} (
  max_over_time(
    rlhf_job_phase{{phase=~"Pending|Queued|NameTaken|Released|Unschedulable|Starting|Suspended"}}[<windowSeconds>s]
  )
) == 1
unless {ON_JOB} max {BY_JOB} (last_over_time(rlhf_iteration_last_seconds[<windowSeconds>s])) * 3 > <windowSeconds>""",
    lasts="5m",
    summary=f"Job {WHO} has finished no iteration for long: it is still at {{{{ $value }}}}",
    description="Something comes in, or it would be stuck, and yet no iteration ends: it may restart again and again, "
    "or a response or a reward takes for ever.",
    normal="the iteration rises steadily",
    thresholds=(Threshold("windowSeconds", 7200, "seconds without a finished iteration"),),
)
RECOVERING: Final = Alert(
    name="RLHFJobRecoveringRepeatedly",
    severity=AlertSeverity.CRITICAL,
    when="a job counted <failures> failures, or recovered as often, within <windowSeconds> seconds",
    expression=f"""\
max {BY_JOB} (
  label_replace(
    sum {BY_JOB} (increase(rlhf_job_restarts_total{{reason="failure"}}[<windowSeconds>s])), "of", "failures", "", ""
  )
  or
  label_replace(sum {BY_JOB} (increase(rlhf_recoveries_total[<windowSeconds>s])), "of", "recoveries", "", "")
) >= <failures>
{UNLESS_ENDED}""",
    lasts="0s",
    summary=f'Job {WHO} had to recover {{{{ $value | printf "%.0f" }}}} times',
    description="It pays for its GPUs and trains the same batches again. status.restarts.lastReason says what ended; "
    "at backoffLimit the job fails.",
    normal="0; one for each lost node",
    thresholds=(
        Threshold("failures", 3, "failures, or recoveries, in the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
FAILED: Final = Alert(
    name="RLHFJobFailed",
    severity=AlertSeverity.WARNING,
    when="a job has failed, for <windowSeconds> seconds after that",
    expression=f"""\
max {BY_JOB} (rlhf_job_condition{{condition="Failed", status="True"}}) == 1
unless {ON_JOB} max {BY_JOB} (
  max_over_time(
    rlhf_job_condition{{condition="Failed", status="True"}}[<windowSeconds>s] offset <windowSeconds>s
  )
) == 1""",
    lasts="0s",
    summary=f"Job {WHO} has failed",
    description="It is not started again. The message of its condition Failed names the cause and the cure; a new job "
    "at the same checkpoint path resumes from the last one.",
    normal="none",
    thresholds=(Threshold("windowSeconds", 14400, "seconds for which it is shown"),),
)
JOBS: Final = Family(
    "jobs",
    "their course",
    (NOT_STARTING, UNSCHEDULABLE, QUEUED, STUCK, NO_PROGRESS, RECOVERING, FAILED),
    (WITHOUT_PROGRESS,),
)
