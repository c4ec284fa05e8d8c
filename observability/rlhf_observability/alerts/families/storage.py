"""Alerts on possible losses of a job: late or failed checkpoints, disks that fill up.

Rule: the limit for late checkpoints depends on the job's own interval; a job that makes no checkpoints is excluded from
it.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import BY_JOB, JOB, ON_JOB, UNLESS_ENDED, WHO, unless_phase

OVERDUE: Final = Alert(
    name="RLHFCheckpointOverdue",
    severity=AlertSeverity.WARNING,
    when="the newest checkpoint is over <intervals> intervals of checkpoints old, in iterations",
    expression=f"""\
(max {BY_JOB} (rlhf_weight_version) - max {BY_JOB} (rlhf_checkpoint_version))
> {ON_JOB} (<intervals> * max {BY_JOB} (rlhf_checkpoint_interval_iterations))
{UNLESS_ENDED}""",
    lasts="10m",
    summary=f"The newest checkpoint of job {WHO} is {{{{ $value }}}} iterations old",
    description="A fault of the training group trains all of them again; the loss of the volume loses them.",
    normal="at most one interval",
    thresholds=(Threshold("intervals", 2.0, "intervals of spec.checkpoints.every"),),
)
FAILING: Final = Alert(
    name="RLHFCheckpointFailing",
    severity=AlertSeverity.CRITICAL,
    when="a try to make a checkpoint failed within <windowSeconds> seconds",
    expression=f"""\
max {BY_JOB} (
  max_over_time(rlhf_checkpoint_failures_total[<windowSeconds>s])
  - min_over_time(rlhf_checkpoint_failures_total[<windowSeconds>s])
) > 0
{unless_phase("Complete", "Suspended")}""",
    lasts="0s",
    summary=f"{{{{ $value }}}} tries to make a checkpoint of job {WHO} failed",
    description="Three in a row end the job with exit code 23. The coordinator's log has the error of the file system.",
    normal="0",
    thresholds=(Threshold("windowSeconds", 1800, "seconds of the window"),),
)
DISK_FULL: Final = Alert(
    name="RLHFDiskNearlyFull",
    severity=AlertSeverity.CRITICAL,
    when="a file system of a job has under <freeRatio> free, or room for fewer than <checkpoints> checkpoints",
    expression=f"""\
(
  min by ({JOB}, folder) (rlhf_disk_free_bytes)
    < on ({JOB}, folder) (<freeRatio> * max by ({JOB}, folder) (rlhf_disk_size_bytes))
)
or
(
  min by ({JOB}, folder) (rlhf_disk_free_bytes)
    < {ON_JOB} group_left () (<checkpoints> * max {BY_JOB} (rlhf_checkpoint_size_bytes))
)""",
    lasts="5m",
    summary=f"The {{{{ $labels.folder }}}} folder of job {WHO} has {{{{ $value | humanize1024 }}}}B left",
    description="When it is full the journal cannot be written and the job fails with exit code 23.",
    normal="room for many checkpoints",
    thresholds=(
        Threshold("freeRatio", 0.03, "share of the file system", most=1),
        Threshold("checkpoints", 2.0, "checkpoints of the newest one's size"),
    ),
)
DISK_FILLING: Final = Alert(
    name="RLHFDiskFillingUp",
    severity=AlertSeverity.WARNING,
    when="a file system of a job will be full within <withinSeconds> seconds, by its last <windowSeconds> seconds, "
    "and has under <freeRatio> free",
    expression=f"""\
min by ({JOB}, folder) (rlhf_disk_free_bytes)
and on ({JOB}, folder)
  min by ({JOB}, folder) (predict_linear(rlhf_disk_free_bytes[<windowSeconds>s], <withinSeconds>)) < 0
and on ({JOB}, folder)
  min by ({JOB}, folder) (rlhf_disk_free_bytes)
    < on ({JOB}, folder) (<freeRatio> * max by ({JOB}, folder) (rlhf_disk_size_bytes))""",
    lasts="30m",
    summary=f"The {{{{ $labels.folder }}}} folder of job {WHO} fills up: {{{{ $value | humanize1024 }}}}B left",
    description="Keep fewer checkpoints (spec.checkpoints.keep), enlarge the claim, or move what is not the job's.",
    normal="flat: old checkpoints and segments of the journal are removed",
    thresholds=(
        Threshold("withinSeconds", 43200, "seconds until it is full"),
        Threshold("windowSeconds", 10800, "seconds from which that is foreseen"),
        Threshold("freeRatio", 0.5, "share that is free at most", most=1),
    ),
)
STORAGE: Final = Family("storage", "what a job would lose", (OVERDUE, FAILING, DISK_FULL, DISK_FILLING))
