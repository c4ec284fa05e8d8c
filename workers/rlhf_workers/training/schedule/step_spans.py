"""Spans of training: the names of what a rank's schedule row did, and the time of what follows it.

Rule: a span is named for its pipeline and what was done, waits for peers among it. A measured part counts as progress.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rlhf_common.schedule import Action, ScheduleTable
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.schedule.executor import TimedAction
from rlhf_workers.training.schedule.progress_counter import count_unit

NAMES: Final = {"F": "F", "B": "B", "I": "I", "W": "W", "RECV_F": "wait-F", "RECV_B": "wait-B"}
"""Action kind -> last part of its span's name."""


def name_of(action: Action, table: ScheduleTable) -> str:
    """Return the name of an action's span."""
    return f"train/{table.pipelines[action.pipeline].name}/{NAMES[action.kind]}"


def give_spans(span: SpanSink, timed: Sequence[TimedAction], table: ScheduleTable) -> None:
    """Give `span` the time of each action of a row."""
    for step in timed:
        stage, microbatch = str(step.action.stage), str(step.action.microbatch)
        span(name_of(step.action, table), step.start_ns, step.end_ns, stage=stage, microbatch=microbatch)


@contextmanager
def measured(span: SpanSink, name: str) -> Iterator[None]:
    """Give `span` the time of what runs within, unless it raises."""
    start = time.time_ns()
    yield
    count_unit()
    span(name, start, time.time_ns())
