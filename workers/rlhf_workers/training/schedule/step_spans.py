"""Spans of training: names for the actions of a rank's schedule row, and times of the work around it.

Rule: an action's span is named for its pipeline and its kind; receives are waits.
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
    """Pass the times of a row's actions to `span`."""
    for step in timed:
        stage, microbatch = str(step.action.stage), str(step.action.microbatch)
        span(name_of(step.action, table), step.start_ns, step.end_ns, stage=stage, microbatch=microbatch)


@contextmanager
def measured(span: SpanSink, name: str) -> Iterator[None]:
    """Pass the time of the block to `span` and count a unit of progress, unless it raises."""
    start = time.time_ns()
    yield
    count_unit()
    span(name, start, time.time_ns())
