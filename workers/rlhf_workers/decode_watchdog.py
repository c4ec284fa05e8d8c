"""Detects a decode step that hangs, from another thread.

Rule: only generation steps are checked. A limit of 0 must never end a worker.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group

LIMIT_FIELD: Final = "spec.runPolicy.hangTimeoutSeconds"
LOOK_SECONDS: Final = 1.0
"""Seconds between two checks."""
FRAMES_SHOWN: Final = 12
"""Maximum innermost frames of the stack that are returned."""

RunningStep = tuple[str, float]
"""(role, start of its step in seconds of the monotonic clock)."""


def hung_step(step: RunningStep | None, limit: float, now: float, stack: Callable[[], list[str]]) -> pb.Failure | None:
    """Return the failure of a generation step that has run longer than `limit` seconds (0: no limit); None otherwise.

    `stack` returns the stack of the step.
    """
    if step is None or not limit or step[0] != Group.GENERATION or now - step[1] <= limit:
        return None
    seconds = f"{now - step[1]:.0f} s ({LIMIT_FIELD} is {limit:.0f})"
    message = f"{step[0]}: a step has not ended for {seconds}; {innermost(stack())}"
    return pb.Failure(reason="StepHangs", field=LIMIT_FIELD, message=message, retryable=True, exit_code=ExitCode.FAILED)


def stack_of(thread: int | None) -> list[str]:
    """Return the innermost frames of a thread, innermost last; empty when the thread does not run."""
    frame = sys._current_frames().get(thread or 0)
    return traceback.format_stack(frame)[-FRAMES_SHOWN:] if frame is not None else []


def innermost(stack: list[str]) -> str:
    """Return `it is at File "engine.py", line 12, in step <its line>` for a stack; other words for an empty one."""
    if not stack:
        return "its thread is gone"
    return "it is at " + " ".join(stack[-1].split())
