"""A decode step that does not end: noticed by another thread than the one it holds, named, and the end of the worker.

A step decodes one token of each sample, and a long prompt in pieces, so minutes mean that a kernel, a peer of an
executor or a lock never answers. Nothing inside can say so: the compute thread is in it.
Rule: steps of generation alone. Commands have limits of their own (spec.runPolicy.startTimeoutSeconds), and a training
step has none that could be named. Must never end a worker whose limit is 0.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group

LIMIT_FIELD: Final = "spec.runPolicy.hangTimeoutSeconds"
LOOK_SECONDS: Final = 1.0
"""Between two looks; a limit is seconds to minutes."""
FRAMES_SHOWN: Final = 12
"""Innermost frames of the stack that are logged."""

RunningStep = tuple[str, float]
"""(role, when its step began in seconds of the monotonic clock)."""


def hung_step(step: RunningStep | None, limit: float, now: float, stack: Callable[[], list[str]]) -> pb.Failure | None:
    """Return what to report of a step that runs for longer than `limit` seconds (0: none does); None: it is well.

    `stack`: where the step is, innermost frame last.
    """
    if step is None or not limit or step[0] != Group.GENERATION or now - step[1] <= limit:
        return None
    seconds = f"{now - step[1]:.0f} s ({LIMIT_FIELD} is {limit:.0f})"
    message = f"{step[0]}: a step has not ended for {seconds}; {innermost(stack())}"
    return pb.Failure(reason="StepHangs", field=LIMIT_FIELD, message=message, retryable=True, exit_code=ExitCode.FAILED)


def stack_of(thread: int | None) -> list[str]:
    """Return the innermost frames of a thread, the last one innermost; empty when it has ended."""
    frame = sys._current_frames().get(thread or 0)
    return traceback.format_stack(frame)[-FRAMES_SHOWN:] if frame is not None else []


def innermost(stack: list[str]) -> str:
    """Return `it is at engine.py:12 in step: <its line>` of a stack."""
    if not stack:
        return "its thread is gone"
    return "it is at " + " ".join(stack[-1].split())
