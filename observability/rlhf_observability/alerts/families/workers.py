"""Alerts on the workers of a job: lost, without sessions, idle; failed moves, wrong predictions, useless drafts.

Rule: RLHFCoordinatorWithoutSessions does not fire for a job that the operator reports as Starting, waiting or ended.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import AT_WORK, BY_JOB, JOB, ON_JOB, UNLESS_ENDED, WHO, unless_phase

WORKER_LOST: Final = Alert(
    name="RLHFWorkerLost",
    severity=AlertSeverity.WARNING,
    when="a worker that had joined has no session",
    expression=f'max by ({JOB}, worker) (rlhf_worker_state{{state="Lost"}}) == 1\n{UNLESS_ENDED}',
    lasts="10m",
    summary=f"Worker {{{{ $labels.worker }}}} of job {WHO} is lost",
    description="Its samples are with others; a lost rank stops training. The operator makes the pod again: if it does "
    "not come back, its events say why.",
    normal="back within two minutes",
)
_UNLESS_STARTING: Final = unless_phase(
    "Pending",
    "Queued",
    "NameTaken",
    "Released",
    "Unschedulable",
    "Starting",
    "Checkpointing",
    "Complete",
    "Failed",
    "Suspended",
)
NO_SESSIONS: Final = Alert(
    name="RLHFCoordinatorWithoutSessions",
    severity=AlertSeverity.CRITICAL,
    when="a job has begun, and no worker has a session with its coordinator",
    expression=f"""\
sum {BY_JOB} (rlhf_workers_wanted)
and {ON_JOB} sum {BY_JOB} (rlhf_sessions) == 0
{_UNLESS_STARTING}""",
    lasts="5m",
    summary=f"None of the {{{{ $value }}}} workers of job {WHO} reaches its coordinator",
    description="The whole job stands still. Most likely the coordinator's network, DNS or certificates, as all are "
    "gone at once.",
    normal="all workers, within seconds of a restart",
)
GPU_IDLE: Final = Alert(
    name="RLHFGPUIdle",
    severity=AlertSeverity.WARNING,
    when="GPUs of a job idled for over <share> of <windowSeconds> seconds",
    expression=f"""\
sum {BY_JOB} (rate(rlhf_gpu_idle_seconds_total[<windowSeconds>s]))
/
(
  sum {BY_JOB} (rate(rlhf_gpu_idle_seconds_total[<windowSeconds>s]))
  + sum {BY_JOB} (rate(rlhf_gpu_busy_seconds_total[<windowSeconds>s]))
) > <share>
and {ON_JOB} time() - max {BY_JOB} (rlhf_started_timestamp_seconds) > <windowSeconds>
{UNLESS_ENDED}""",
    lasts="30m",
    summary=f"GPUs of job {WHO} idle for {{{{ $value | humanizePercentage }}}} of the time",
    description="The dashboard of the job shows the cause: the tail, waiting for training or weights, too little work. "
    "Fewer workers, fusion or colocation cost less.",
    normal="groups wait for one another: 30% to 60% without colocation",
    thresholds=(
        Threshold("share", 0.75, "share of GPU seconds", most=1),
        Threshold("windowSeconds", 10800, "seconds of the window"),
    ),
)
MIGRATION: Final = Alert(
    name="RLHFMigrationFailing",
    severity=AlertSeverity.WARNING,
    when="over <share> of the samples that were to move with their KV caches within <windowSeconds> seconds stayed "
    "where they were, at least <failures> of them",
    expression=f"""\
(
  sum {BY_JOB} (increase(rlhf_migration_failures_total[<windowSeconds>s]))
  /
  (
    sum {BY_JOB} (increase(rlhf_migration_failures_total[<windowSeconds>s]))
    + sum {BY_JOB} (increase(rlhf_migrated_samples_total{{by="kv"}}[<windowSeconds>s]))
  ) > <share>
)
and {ON_JOB} sum {BY_JOB} (increase(rlhf_migration_failures_total[<windowSeconds>s])) >= <failures>
{AT_WORK}""",
    lasts="0s",
    summary=f"{{{{ $value | humanizePercentage }}}} of the moves of KV caches fail in job {WHO}",
    description="Fusion gains nothing by such moves, and samples decode on where they were. The event migration-failed "
    "of the run folder says why.",
    normal="a few, of samples that finished meanwhile",
    thresholds=(
        Threshold("share", 0.5, "share of moves that fail", most=1),
        Threshold("failures", 20, "moves that must have failed"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
MISPREDICTED: Final = Alert(
    name="RLHFFusionMispredicted",
    severity=AlertSeverity.INFO,
    when="generation and inference took over <ratio> longer, or shorter, than predicted, on average over "
    "<windowSeconds> seconds",
    expression=f"""\
abs(avg {BY_JOB} (avg_over_time(rlhf_fusion_prediction_error_ratio[<windowSeconds>s]))) > <ratio>
and {ON_JOB} max {BY_JOB} (rlhf_iteration) > 5
{UNLESS_ENDED}""",
    lasts="30m",
    summary=f"Fusion of job {WHO} is predicted wrong by {{{{ $value | humanizePercentage }}}}",
    description="Its threshold and pool are chosen by wrong costs or lengths. The dashboard of fusion shows which cost "
    "ratio is off.",
    normal="within 25% after the first iterations",
    thresholds=(
        Threshold("ratio", 0.25, "measured / predicted - 1, in either direction"),
        Threshold("windowSeconds", 3600, "seconds of the mean"),
    ),
)
SPECULATION: Final = Alert(
    name="RLHFSpeculationUseless",
    severity=AlertSeverity.WARNING,
    when="less than <share> of the drafted tokens were accepted within <windowSeconds> seconds, while over <steps> of "
    "the decode steps verified drafts, of at least <tokens> tokens",
    expression=f"""\
(
  sum {BY_JOB} (increase(rlhf_accepted_tokens_total[<windowSeconds>s]))
  /
  sum {BY_JOB} (increase(rlhf_drafted_tokens_total[<windowSeconds>s])) < <share>
)
and {ON_JOB} sum {BY_JOB} (increase(rlhf_drafted_tokens_total[<windowSeconds>s])) >= <tokens>
and {ON_JOB} (
  sum {BY_JOB} (increase(rlhf_speculation_drafted_steps_total[<windowSeconds>s]))
  /
  sum {BY_JOB} (increase(rlhf_speculation_steps_total[<windowSeconds>s])) > <steps>
)
{AT_WORK}""",
    lasts="0s",
    summary=f"Only {{{{ $value | humanizePercentage }}}} of the drafted tokens of job {WHO} are accepted",
    description="Drafts change no token and cost time. Mode Auto stops drafting by itself, mode Fixed does not: "
    "status.plan.speculation says whose drafts are wrong.",
    normal="above 40% while drafts are made",
    thresholds=(
        Threshold("share", 0.1, "share of drafted tokens that are accepted", most=1),
        Threshold("steps", 0.2, "share of decode steps that verify drafts", most=1),
        Threshold("tokens", 10000, "tokens that must have been drafted"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
WORKERS: Final = Family(
    "workers",
    "of a job, and what moves between them",
    (WORKER_LOST, NO_SESSIONS, GPU_IDLE, MIGRATION, MISPREDICTED, SPECULATION),
)
