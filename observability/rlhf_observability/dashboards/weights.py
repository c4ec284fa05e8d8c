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
    "What would a loss of everything cost now?",
    (
        stat(
            title="Iterations since the checkpoint",
            unit=PanelUnit.NUMBER,
            shows="Weight versions that the newest checkpoint is behind; they would be trained again.",
            normal=storage.CHECKPOINT_VERSION.normal,
            cure="Further behind than the interval: see failures below, and the disk.",
            queries=(Query(_BEHIND, BY_JOB),),
        ),
        stat(
            title="Age of the checkpoint",
            unit=PanelUnit.SECONDS,
            thresholds=((None, GREEN), (3 * 3600, ORANGE), (8 * 3600, RED)),
            shows="Time since the newest checkpoint was complete.",
            normal=storage.CHECKPOINT_TIME.normal,
            cure="`rlhf suspend NAME` makes one at once; a smaller spec.checkpoints.every makes more.",
            queries=(Query(f"time() - {JOBS.latest(storage.CHECKPOINT_TIME)}", BY_JOB),),
        ),
        stat(
            title="Free space",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=_ROOM,
            shows="Share of the file systems of run and checkpoints that is free.",
            normal="above a quarter.",
            cure="Enlarge the volume, or keep fewer checkpoints: spec.checkpoints.keep.",
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
            shows="Tries to make a checkpoint that failed in the time shown.",
            normal=storage.CHECKPOINT_FAILURES.normal,
            cure="The event checkpoint-failed says why: mostly a full disk, or a volume that went away.",
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
            shows="Median and 99th percentile of the time in which one worker loads a version, and how much of the "
            "median is putting weights in place that have come.",
            normal=storage.WEIGHT_UPDATE.normal,
            cure="The 99th far above the median: one slow link or node; `rlhf top NAME` shows who is late.",
            queries=(
                Query(JOBS.quantile(0.5, storage.WEIGHT_UPDATE, *JOB, window="30m"), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.99, storage.WEIGHT_UPDATE, *JOB, window="30m"), f"99% {BY_JOB}"),
                Query(JOBS.quantile(0.5, storage.WEIGHT_COPY, *JOB, window="30m"), f"in place {BY_JOB}"),
            ),
        ),
        lines(
            title="Wait for weights, an iteration",
            unit=PanelUnit.SECONDS,
            shows=storage.WEIGHT_PAUSED.meaning,
            normal=storage.WEIGHT_PAUSED.normal,
            cure="Longer than one update: workers load one after the other, or a lost worker is waited for.",
            queries=(Query(JOBS.mean(storage.WEIGHT_PAUSED, *JOB, window="30m"), BY_JOB),),
        ),
        lines(
            title="Weights loaded",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows=storage.WEIGHT_BYTES.meaning,
            normal=storage.WEIGHT_BYTES.normal,
            cure="At the speed of the trainers' link: more workers make updates longer.",
            queries=(Query(JOBS.rates(storage.WEIGHT_BYTES, "group"), f"{{{{group}}}} {BY_JOB}"),),
        ),
        lines(
            title="Workers behind",
            unit=PanelUnit.NUMBER,
            shows="Generation workers whose policy is older than the job's newest version.",
            normal="0, but for moments after each iteration.",
            cure="Some for longer than an update takes: they came back late, or are stuck; `rlhf top NAME` names them.",
            queries=(Query(f"{_STALE} or 0 * {_VERSION}", BY_JOB),),
        ),
    ),
)
CHECKPOINTS: Final = Row(
    "Are checkpoints made?",
    (
        lines(
            title="Versions",
            unit=PanelUnit.NUMBER,
            shows="Newest weight version, newest checkpoint, and the oldest version that a generation worker holds.",
            normal="three staircases, the checkpoint's with the widest steps.",
            cure="A checkpoint that stays while versions rise: failures beside, and free space.",
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
            cure="Slower with the same size: the volume is busy; fewer checkpoints or a faster class.",
            queries=(Query(JOBS.mean(storage.CHECKPOINT_SECONDS, *JOB, window="1h"), BY_JOB),),
        ),
        lines_of(
            storage.CHECKPOINT_BYTES,
            "Size of a checkpoint",
            "A jump: another model or optimizer; see whether the volume still holds what is kept.",
        ),
        lines(
            title="Behind, against the interval",
            unit=PanelUnit.NUMBER,
            shows="Versions since the newest checkpoint, and the interval that the manifest asks for.",
            normal="a saw between 0 and the interval.",
            cure="Teeth above the interval are checkpoints that failed.",
            queries=(Query(_BEHIND, f"behind {BY_JOB}"), per_job(storage.CHECKPOINT_INTERVAL, "interval")),
        ),
    ),
)
DISKS: Final = Row(
    "How fast do volumes fill, and how fast are moves?",
    (
        lines(
            title="Free",
            unit=PanelUnit.BYTES,
            shows=storage.DISK_FREE.meaning,
            normal=storage.DISK_FREE.normal,
            cure="A line that meets 0 in days: enlarge the volume before it does.",
            queries=(Query(bottom(MAX_SERIES, _FREE), f"{{{{folder}}}} {BY_JOB}"),),
        ),
        lines(
            title="Journal",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows=storage.JOURNAL_BYTES.meaning,
            normal=storage.JOURNAL_BYTES.normal,
            cure="It is cut at every checkpoint: a journal that fills the disk wants checkpoints more often.",
            queries=(Query(JOBS.rates(storage.JOURNAL_BYTES), BY_JOB),),
        ),
        lines_of(
            run.CONTROL,
            "Added by the coordinator",
            "Above 0.01: a slow disk below the journal, or a coordinator without its own core.",
        ),
        lines(
            title="Speed of moves between memories",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows="Bytes over the time that moves of them took, by what went and how: weights, KV caches, offloading.",
            normal="offload and onload near the host's bus; streams near the network; device memory far above both.",
            cure="Far below: pageable memory, a shared link, or a disk in the way. Weights by stream on one machine: "
            "workers that are not told of each other.",
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
    "How new weights reach workers, how old the newest checkpoint is, and room on disks.",
    (LOSS, WEIGHTS, CHECKPOINTS, DISKS),
    annotations=(SAVED,),
    since="now-6h",
)
