"""Alerts on late or failed checkpoints and on file systems that fill up.

Rule: a checkpoint is late by the versions of the job's own interval. An iteration does not end before its due
checkpoint, so the age of the newest one in iterations cannot exceed one interval.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import BY_JOB, JOB, ON_JOB, UNLESS_ENDED, WHO, unless_phase

OVERDUE: Final = Alert(
    name="RLHFCheckpointOverdue",
    severity=AlertSeverity.WARNING,
    when="the last weight version that spec.checkpoints.every makes due has no complete checkpoint",
    expression=f"""\
(
  max {BY_JOB} (rlhf_weight_version)
  - max {BY_JOB} (rlhf_weight_version) % {ON_JOB} max {BY_JOB} (rlhf_checkpoint_interval_iterations)
)
> {ON_JOB} max {BY_JOB} (rlhf_checkpoint_version)
{UNLESS_ENDED}""",
    lasts="30m",
    summary=f"Job {WHO} has not completed the checkpoint of weight version {{{{ $value }}}}",
    description="The job trains nothing until this checkpoint is complete. After a failure of the training group it "
    "trains all iterations since the newest checkpoint again.",
    normal="a due checkpoint is complete within minutes",
)
FAILING: Final = Alert(
    name="RLHFCheckpointFailing",
    severity=AlertSeverity.CRITICAL,
    when="an attempt to save a checkpoint failed within the last <windowSeconds> seconds",
    expression=f"""\
max {BY_JOB} (
  max_over_time(rlhf_checkpoint_failures_total[<windowSeconds>s])
  - min_over_time(rlhf_checkpoint_failures_total[<windowSeconds>s])
) > 0
{unless_phase("Complete", "Suspended")}""",
    lasts="0s",
    summary=f"{{{{ $value }}}} attempts to save a checkpoint of job {WHO} failed",
    description="Three failures in a row end the job with exit code 23. The coordinator's log has the error of the "
    "file system.",
    normal="0",
    thresholds=(Threshold("windowSeconds", 1800, "seconds of the window"),),
)
DISK_FULL: Final = Alert(
    name="RLHFDiskNearlyFull",
    severity=AlertSeverity.CRITICAL,
    when="a file system of a job has less than <freeRatio> of its size free, or no room for <checkpoints> "
    "more checkpoints",
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
    summary=f"The file system of the {{{{ $labels.folder }}}} folder of job {WHO} has {{{{ $value | humanize1024 }}}}B "
    "free",
    description="When it is full, the coordinator cannot write its journal, and the job fails with exit code 23.",
    normal="room for many checkpoints",
    thresholds=(
        Threshold("freeRatio", 0.03, "share of the file system that is free", most=1),
        Threshold("checkpoints", 2.0, "checkpoints of the newest one's size"),
    ),
)
DISK_FILLING: Final = Alert(
    name="RLHFDiskFillingUp",
    severity=AlertSeverity.WARNING,
    when="the trend of the last <windowSeconds> seconds fills a file system of a job within <withinSeconds> "
    "seconds, and less than <freeRatio> of it is free",
    expression=f"""\
min by ({JOB}, folder) (rlhf_disk_free_bytes)
and on ({JOB}, folder)
  min by ({JOB}, folder) (predict_linear(rlhf_disk_free_bytes[<windowSeconds>s], <withinSeconds>)) < 0
and on ({JOB}, folder)
  min by ({JOB}, folder) (rlhf_disk_free_bytes)
    < on ({JOB}, folder) (<freeRatio> * max by ({JOB}, folder) (rlhf_disk_size_bytes))""",
    lasts="30m",
    summary=f"The file system of the {{{{ $labels.folder }}}} folder of job {WHO} fills up: "
    "{{ $value | humanize1024 }}B are free",
    description="Keep fewer checkpoints (spec.checkpoints.keep), enlarge the claim, or move other files away.",
    normal="constant, because the coordinator removes old checkpoints and journal segments",
    thresholds=(
        Threshold("withinSeconds", 43200, "seconds until the file system is full"),
        Threshold("windowSeconds", 10800, "seconds of the window"),
        Threshold("freeRatio", 0.5, "share of the file system that is free", most=1),
    ),
)
STORAGE: Final = Family("storage", "checkpoints and disks of a job", (OVERDUE, FAILING, DISK_FULL, DISK_FILLING))
