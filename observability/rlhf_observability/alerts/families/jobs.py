"""Alerts on the course of a job: it does not start, is stuck, makes no progress, keeps recovering, or has failed.

Rule: waiting reasons, failures and conditions come from the operator, which also sees jobs without a coordinator;
activity comes from the coordinator. Queries of activity exclude complete and suspended jobs.
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
"""Phase of the coordinator -> default of its threshold in RLHFJobStuck, in seconds without progress."""


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
    why="one evaluation serves every phase of RLHFJobStuck",
)
NOT_STARTING: Final = Alert(
    name="RLHFJobNotStarting",
    severity=AlertSeverity.WARNING,
    when="a job has been Pending, Starting, NameTaken or Released, or changed between these phases, for more than "
    "<startSeconds> seconds",
    expression=_waiting("Pending|Starting|NameTaken|Released", "startSeconds"),
    lasts="2m",
    summary=f"Job {WHO} has not started for {{{{ $value | humanizeDuration }}}} and is {{{{ $labels.reason }}}}",
    description="Its pods may occupy GPUs that do no work. The message of its condition Running says why it waits, "
    "and the remedy.",
    normal="minutes, while nodes pull images and workers load models",
    thresholds=(Threshold("startSeconds", 2400, "seconds that a job may take to start"),),
)
UNSCHEDULABLE: Final = Alert(
    name="RLHFJobUnschedulable",
    severity=AlertSeverity.WARNING,
    when="no node has taken a pod of a job for more than <unschedulableSeconds> seconds",
    expression=_waiting("Unschedulable", "unschedulableSeconds"),
    lasts="2m",
    summary=f"No node has taken a pod of job {WHO} for {{{{ $value | humanizeDuration }}}}",
    description="Without a gang, its other pods occupy their GPUs meanwhile. The message of its condition Running "
    "quotes the scheduler.",
    normal="minutes, while nodes are added",
    thresholds=(Threshold("unschedulableSeconds", 3600, "seconds that a pod may wait for a node"),),
)
QUEUED: Final = Alert(
    name="RLHFJobQueued",
    severity=AlertSeverity.INFO,
    when="a job has waited in its queue for more than <queuedSeconds> seconds",
    expression=_waiting("Queued", "queuedSeconds"),
    lasts="2m",
    summary=f"Job {WHO} has been queued for {{{{ $value | humanizeDuration }}}}",
    description="The job uses no GPUs. The message of its condition Admitted quotes the queue. A job that asks for "
    "more than the whole quota of its queue waits without end.",
    normal="as long as the queue is full",
    thresholds=(Threshold("queuedSeconds", 86400, "seconds that a job may wait in its queue"),),
)
STUCK: Final = Alert(
    name="RLHFJobStuck",
    severity=AlertSeverity.CRITICAL,
    when="the coordinator of a job has received no token, score, optimizer batch, loaded version or "
    "checkpoint for longer than the phase of the job allows",
    expression="(\n  "
    + "\n  or ".join(
        f'{WITHOUT_PROGRESS.name}{{phase="{phase}"}} > <{phase.lower()}Seconds>' for phase in _STUCK_SECONDS
    )
    + "\n)\n"
    + unless_phase("Queued", "Unschedulable", "Released", "NameTaken", "Complete", "Failed", "Suspended"),
    lasts="2m",
    summary=f"Job {WHO} is stuck in {{{{ $labels.phase }}}}: its coordinator has received nothing for "
    "{{ $value | humanizeDuration }}",
    description="The job makes no progress and occupies all its GPUs. `rlhf describe` names the worker that the job "
    "waits for.",
    normal="seconds; minutes during a long optimizer batch",
    thresholds=tuple(
        Threshold(f"{phase.lower()}Seconds", seconds, f"seconds without progress in phase {phase}")
        for phase, seconds in _STUCK_SECONDS.items()
    ),
)
NO_PROGRESS: Final = Alert(
    name="RLHFJobNoProgress",
    severity=AlertSeverity.CRITICAL,
    when="a job that was Running or Recovering has finished no iteration for <windowSeconds> seconds, "
    "although its last iteration took less than a third of that; its first iteration may take three "
    "times as long",
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
    summary=f"Job {WHO} has been at iteration {{{{ $value }}}} for a long time",
    description="No iteration ends. The job may restart repeatedly, or a response or a reward may take very long. "
    "RLHFJobStuck fires too if the coordinator receives nothing.",
    normal="the iteration rises steadily",
    thresholds=(Threshold("windowSeconds", 7200, "seconds of the window"),),
)
RECOVERING: Final = Alert(
    name="RLHFJobRecoveringRepeatedly",
    severity=AlertSeverity.CRITICAL,
    when="a job had at least <failures> failures, or at least as many recoveries, within <windowSeconds> seconds",
    expression=f"""\
max {BY_JOB} (
  label_replace(
    sum {BY_JOB} (increase(rlhf_job_restarts_total{{reason="failure"}}[<windowSeconds>s])),
    "counted", "failures", "", ""
  )
  or
  label_replace(sum {BY_JOB} (increase(rlhf_recoveries_total[<windowSeconds>s])), "counted", "recoveries", "", "")
) >= <failures>
{UNLESS_ENDED}""",
    lasts="0s",
    summary=f'Job {WHO} had {{{{ $value | printf "%.0f" }}}} failures or recoveries',
    description="The job trains the same batches again. status.restarts.lastReason says which process ended last and "
    "why. The job fails when it has more failures than backoffLimit.",
    normal="0, or one for each lost node",
    thresholds=(
        Threshold("failures", 3, "failures or recoveries within the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
FAILED: Final = Alert(
    name="RLHFJobFailed",
    severity=AlertSeverity.WARNING,
    when="a job failed within the last <windowSeconds> seconds",
    expression=f"""\
max {BY_JOB} (rlhf_job_condition{{condition="Failed", status="True"}}) == 1
unless {ON_JOB} max {BY_JOB} (
  max_over_time(
    rlhf_job_condition{{condition="Failed", status="True"}}[<windowSeconds>s] offset <windowSeconds>s
  )
) == 1""",
    lasts="0s",
    summary=f"Job {WHO} has failed",
    description="The operator does not start the job again. The message of its condition Failed names the cause and "
    "the remedy. A new job with the same checkpoint path resumes from the newest checkpoint.",
    normal="no job has failed",
    thresholds=(Threshold("windowSeconds", 14400, "seconds of the window"),),
)
JOBS: Final = Family(
    "jobs",
    "the course of a job",
    (NOT_STARTING, UNSCHEDULABLE, QUEUED, STUCK, NO_PROGRESS, RECOVERING, FAILED),
    (WITHOUT_PROGRESS,),
)
