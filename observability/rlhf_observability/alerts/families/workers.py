"""Alerts on the workers of a job: lost, without sessions, idle; failed moves, wrong predictions, useless drafts.

Rule: RLHFCoordinatorWithoutSessions does not fire for a job that the operator reports as Starting, waiting, ending or
ended.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import (
    AT_WORK,
    BY_JOB,
    ENDING_PHASES,
    JOB,
    ON_JOB,
    UNLESS_ENDED,
    UNLESS_ENDING,
    WHO,
    unless_phase,
)

WORKER_LOST: Final = Alert(
    name="RLHFWorkerLost",
    severity=AlertSeverity.WARNING,
    when="a worker that had registered has no session, while its job should run",
    expression=f'max by ({JOB}, worker) (rlhf_worker_state{{state="Lost"}}) == 1\n{UNLESS_ENDING}',
    lasts="10m",
    summary=f"Worker {{{{ $labels.worker }}}} of job {WHO} is lost",
    description="Other workers decode its samples; without a training rank the job cannot train. The operator "
    "replaces the pod. If the worker does not return, the events of the pod say why.",
    normal="a lost worker returns within two minutes",
)
_UNLESS_STARTING: Final = unless_phase(
    "Pending",
    "NameTaken",
    "Unschedulable",
    "Starting",
    *ENDING_PHASES,
    "Complete",
    "Failed",
    "Suspended",
)
NO_SESSIONS: Final = Alert(
    name="RLHFCoordinatorWithoutSessions",
    severity=AlertSeverity.CRITICAL,
    when="a job has started, and no worker has a session with its coordinator",
    expression=f"""\
sum {BY_JOB} (rlhf_workers_wanted)
and {ON_JOB} sum {BY_JOB} (rlhf_sessions) == 0
{_UNLESS_STARTING}""",
    lasts="5m",
    summary=f"None of the {{{{ $value }}}} workers of job {WHO} is connected to its coordinator",
    description="The whole job has stopped. All workers are disconnected, so the likely cause is the coordinator's "
    "network, DNS or certificates.",
    normal="all workers are connected within seconds of a restart",
)
GPU_IDLE: Final = Alert(
    name="RLHFGPUIdle",
    severity=AlertSeverity.WARNING,
    when="the GPUs of a job were idle for more than <share> of <windowSeconds> seconds, and the job requests at least "
    "<gpus> GPUs",
    expression=f"""\
sum {BY_JOB} (rate(rlhf_gpu_idle_seconds_total[<windowSeconds>s]))
/
(
  sum {BY_JOB} (rate(rlhf_gpu_idle_seconds_total[<windowSeconds>s]))
  + sum {BY_JOB} (rate(rlhf_gpu_busy_seconds_total[<windowSeconds>s]))
) > <share>
and {ON_JOB} time() - max {BY_JOB} (rlhf_started_timestamp_seconds) > <windowSeconds>
and {ON_JOB} sum {BY_JOB} (
  max by ({JOB}, group) (last_over_time(rlhf_job_gpus_requested[1h]))
) >= <gpus>
{UNLESS_ENDED}""",
    lasts="30m",
    summary=f"The GPUs of job {WHO} were idle for {{{{ $value | humanizePercentage }}}} of the time",
    description="The dashboard of the job shows the cause: the tail, a wait for training or weights, or too little "
    "work. Fewer workers, fusion or colocation reduce the cost.",
    normal="30% to 60% without colocation, because groups wait for each other",
    thresholds=(
        Threshold("share", 0.75, "share of GPU seconds", most=1),
        Threshold("windowSeconds", 10800, "seconds of the window"),
        Threshold("gpus", 1, "least GPUs of a job; 0 includes jobs on CPUs, whose workers count as one GPU each"),
    ),
)
MIGRATION: Final = Alert(
    name="RLHFMigrationFailing",
    severity=AlertSeverity.WARNING,
    when="more than <share> of the moves of samples with their KV caches failed within <windowSeconds> "
    "seconds, and at least <failures> of them",
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
    summary=f"{{{{ $value | humanizePercentage }}}} of the KV cache moves of job {WHO} failed",
    description="Fusion gains nothing from these moves; the samples continue on the worker that had them. The event "
    "migration-failed in the run folder names the reason.",
    normal="a few, for samples that finish during the move",
    thresholds=(
        Threshold("share", 0.5, "share of moves with KV caches", most=1),
        Threshold("failures", 20, "failed moves within the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
MISPREDICTED: Final = Alert(
    name="RLHFFusionMispredicted",
    severity=AlertSeverity.INFO,
    when="generation and inference took longer or shorter than predicted by more than <ratio> of the "
    "prediction, on average over <windowSeconds> seconds, after the first five iterations",
    expression=f"""\
abs(avg {BY_JOB} (avg_over_time(rlhf_fusion_prediction_error_ratio[<windowSeconds>s]))) > <ratio>
and {ON_JOB} max {BY_JOB} (rlhf_iteration) > 5
{UNLESS_ENDED}""",
    lasts="30m",
    summary=f"The predictions of fusion for job {WHO} are wrong by {{{{ $value | humanizePercentage }}}}",
    description="Fusion chooses its threshold and pool from wrong costs or lengths. The fusion dashboard shows which "
    "cost ratio is wrong.",
    normal="within 25% after the first iterations",
    thresholds=(
        Threshold("ratio", 0.25, "measured / predicted - 1, in either direction"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
SPECULATION: Final = Alert(
    name="RLHFSpeculationUseless",
    severity=AlertSeverity.WARNING,
    when="less than <share> of the drafted tokens were accepted within <windowSeconds> seconds, while more "
    "than <steps> of the decode steps verified drafts, and at least <tokens> tokens were drafted",
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
    summary=f"Workers of job {WHO} accept only {{{{ $value | humanizePercentage }}}} of the drafted tokens",
    description="Drafts change no token and cost time. Mode Auto stops drafting by itself; mode Fixed does not. "
    "status.plan.speculation has the acceptance of each drafter.",
    normal="above 40% while the engine drafts",
    thresholds=(
        Threshold("share", 0.1, "accepted share of drafted tokens", most=1),
        Threshold("steps", 0.2, "share of decode steps that verify drafts", most=1),
        Threshold("tokens", 10000, "drafted tokens within the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
WORKERS: Final = Family(
    "workers",
    "workers of a job, and data between them",
    (WORKER_LOST, NO_SESSIONS, GPU_IDLE, MIGRATION, MISPREDICTED, SPECULATION),
)
