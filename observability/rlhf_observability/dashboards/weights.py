"""Weights and checkpoints: transfer of new weights to workers, age of the newest checkpoint, and disk space.

Questions, in the order of the rows:
- On call: how much work would a total loss cost now, and does the next checkpoint fit on the disk?
- Engineer: how long do weights take to reach generation, and which worker is behind?
- On call: are checkpoints saved, how long do they take, how large are they?
- Platform engineer: how fast do volumes fill, and how fast are copies between memories?
"""

from typing import Final

from rlhf_common.metrics import run, storage, worker
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    MAX_SERIES,
    ORANGE,
    RED,
    Annotation,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    lines,
    lines_of,
    per_job,
    stat,
)
from rlhf_observability.promql import JOB, JOBS, bottom, lowest, number_of, total

_BEHIND: Final = f"{JOBS.latest(storage.WEIGHT_VERSION)} - {JOBS.latest(storage.CHECKPOINT_VERSION)}"
_FREE: Final = JOBS.latest(storage.DISK_FREE, "folder")
_HELD: Final = JOBS.latest(worker.WEIGHTS, "worker", group="generation")  # the policy is the newest of its models
_VERSION: Final = JOBS.latest(storage.WEIGHT_VERSION)
_STALE: Final = number_of(f"{_HELD} < on ({', '.join(JOB)}) group_left () {_VERSION}", *JOB)
_ROOM: Final = ((None, RED), (0.1, ORANGE), (0.25, GREEN))  # free share of a file system

SAVED: Final = Annotation(
    "Checkpoints",
    f"changes({JOBS.latest(storage.CHECKPOINT_VERSION)}[1m:]) > 0",
    "Checkpoint of {{rlhf_job}}",
    "blue",
    enabled=False,
)

LOSS: Final = Row(
    "How much work would a loss of all processes cost?",
    (
        stat(
            title="Iterations since the checkpoint",
            unit=PanelUnit.NUMBER,
            shows="Weight versions since the newest checkpoint. The job would train them again.",
            normal=storage.CHECKPOINT_VERSION.normal,
            cure="If it is more than the interval, check the failures below and the disk.",
            queries=(Query(_BEHIND, BY_JOB),),
        ),
        stat(
            title="Age of the checkpoint",
            unit=PanelUnit.SECONDS,
            thresholds=((None, GREEN), (3 * 3600, ORANGE), (8 * 3600, RED)),
            shows="Time since the newest checkpoint was complete.",
            normal=storage.CHECKPOINT_TIME.normal,
            cure="`rlhf suspend NAME` saves a checkpoint at once. A smaller spec.checkpoints.every saves more of them.",
            queries=(Query(f"time() - {JOBS.latest(storage.CHECKPOINT_TIME)}", BY_JOB),),
        ),
        stat(
            title="Free space",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=_ROOM,
            shows="Free share of the file systems of run folder and checkpoints.",
            normal="above a quarter.",
            cure="Enlarge the volume, or lower spec.checkpoints.keep.",
            queries=(
                Query(
                    bottom(MAX_SERIES, f"{_FREE} / {JOBS.latest(storage.DISK_SIZE, 'folder')}"),
                    f"{{{{folder}}}} {BY_JOB}",
                ),
            ),
        ),
        stat(
            title="Failed checkpoints",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (3, RED)),
            shows="Failed attempts to save a checkpoint in the chosen time.",
            normal=storage.CHECKPOINT_FAILURES.normal,
            cure="The event checkpoint-failed names the reason. Usually the disk is full, or the volume is no longer "
            "available.",
            queries=(Query(JOBS.increases(storage.CHECKPOINT_FAILURES, window="$__range"), BY_JOB),),
        ),
    ),
)
WEIGHTS: Final = Row(
    "How do new weights reach workers?",
    (
        lines(
            title="Time of an update",
            unit=PanelUnit.SECONDS,
            shows="Median and 99th percentile of the time in which a worker loads a version, and the part of the "
            "median in which it copies received weights.",
            normal=storage.WEIGHT_UPDATE.normal,
            cure="If the 99th percentile is far above the median, one link or node is slow. `rlhf top NAME` shows the "
            "slow worker.",
            queries=(
                Query(JOBS.quantile(0.5, storage.WEIGHT_UPDATE, *JOB, window="30m"), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.99, storage.WEIGHT_UPDATE, *JOB, window="30m"), f"99% {BY_JOB}"),
                Query(JOBS.quantile(0.5, storage.WEIGHT_COPY, *JOB, window="30m"), f"in place {BY_JOB}"),
            ),
        ),
        lines(
            title="Wait for weights per iteration",
            unit=PanelUnit.SECONDS,
            shows=storage.WEIGHT_PAUSED.meaning,
            normal=storage.WEIGHT_PAUSED.normal,
            cure="If it is longer than one update, workers load one after the other, or the job waits for a lost "
            "worker.",
            queries=(Query(JOBS.mean(storage.WEIGHT_PAUSED, *JOB, window="30m"), BY_JOB),),
        ),
        lines(
            title="Loaded weights",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows=storage.WEIGHT_BYTES.meaning,
            normal=storage.WEIGHT_BYTES.normal,
            cure="At the speed of the trainers' link, more workers make updates longer.",
            queries=(Query(JOBS.rates(storage.WEIGHT_BYTES, "group"), f"{{{{group}}}} {BY_JOB}"),),
        ),
        lines(
            title="Workers with old weights",
            unit=PanelUnit.NUMBER,
            shows="Generation workers whose policy is older than the job's newest version.",
            normal="0, except for moments after each iteration.",
            cure="If some stay old for longer than an update takes, they returned late or hang. `rlhf top NAME` names "
            "them.",
            queries=(Query(f"{_STALE} or 0 * {_VERSION}", BY_JOB),),
        ),
    ),
)
CHECKPOINTS: Final = Row(
    "Does the job save checkpoints?",
    (
        lines(
            title="Versions",
            unit=PanelUnit.NUMBER,
            shows="Newest weight version, version of the newest checkpoint, and oldest version on a generation worker.",
            normal="three staircases; the checkpoint has the widest steps.",
            cure="If the checkpoint stays the same while versions rise, check the failures and the free space.",
            queries=(
                per_job(storage.WEIGHT_VERSION, "weights"),
                per_job(storage.CHECKPOINT_VERSION, "checkpoint"),
                Query(lowest(_HELD, *JOB), f"oldest in generation {BY_JOB}"),
            ),
            low=None,
        ),
        lines(
            title="Time of a checkpoint",
            unit=PanelUnit.SECONDS,
            shows=storage.CHECKPOINT_SECONDS.meaning,
            normal=storage.CHECKPOINT_SECONDS.normal,
            cure="If it is slower at the same size, the volume is busy: save fewer checkpoints, or use a faster "
            "storage class.",
            queries=(Query(JOBS.mean(storage.CHECKPOINT_SECONDS, *JOB, window="1h"), BY_JOB),),
        ),
        lines_of(
            storage.CHECKPOINT_BYTES,
            "Size of a checkpoint",
            "A jump means another model or optimizer. Check that the volume has space for all checkpoints that "
            "it keeps.",
        ),
        lines(
            title="Versions since the checkpoint",
            unit=PanelUnit.NUMBER,
            shows="Versions since the newest checkpoint, and the interval in the manifest.",
            normal="a saw-tooth between 0 and the interval.",
            cure="A tooth above the interval means that a checkpoint failed.",
            queries=(Query(_BEHIND, f"behind {BY_JOB}"), per_job(storage.CHECKPOINT_INTERVAL, "interval")),
        ),
    ),
)
DISKS: Final = Row(
    "How fast do volumes fill, and how fast do weights and caches move?",
    (
        lines(
            title="Free bytes",
            unit=PanelUnit.BYTES,
            shows=storage.DISK_FREE.meaning,
            normal=storage.DISK_FREE.normal,
            cure="If the line will reach 0 within days, enlarge the volume before.",
            queries=(Query(bottom(MAX_SERIES, _FREE), f"{{{{folder}}}} {BY_JOB}"),),
        ),
        lines(
            title="Journal",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows=storage.JOURNAL_BYTES.meaning,
            normal=storage.JOURNAL_BYTES.normal,
            cure="The coordinator prunes the journal at each checkpoint. If the journal fills the disk, save "
            "checkpoints more often.",
            queries=(Query(JOBS.rates(storage.JOURNAL_BYTES), BY_JOB),),
        ),
        lines_of(
            run.CONTROL,
            "Time added by the coordinator",
            "Above 0.01, the disk of the journal is slow, or the coordinator has no core of its own.",
        ),
        lines(
            title="Speed of moves between memories",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows="Moved bytes divided by the time of the moves, by kind: weights, KV caches, offload and onload.",
            normal="offload and onload are near the speed of the host's bus, streams near the speed of the network, "
            "and device memory far above both.",
            cure="If a value is far lower, memory is pageable, a link is shared, or data passes through a disk. If "
            "workers on one machine stream weights, they do not know that they share the machine.",
            queries=(
                Query(
                    f"{total(JOBS.rate(worker.MOVED), 'move')} / {total(JOBS.rate(worker.MOVE_SECONDS), 'move')}",
                    "{{move}}",
                ),
            ),
        ),
    ),
)
WEIGHTS_DASHBOARD: Final = Dashboard(
    "rlhf-weights",
    "RLHF / Weights and checkpoints",
    "How workers receive new weights, how old the newest checkpoint is, and how much space disks have.",
    (LOSS, WEIGHTS, CHECKPOINTS, DISKS),
    annotations=(SAVED,),
    since="now-6h",
)
