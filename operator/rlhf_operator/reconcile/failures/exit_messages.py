"""Describes how processes ended: the meaning of the exit code and the last log line.

Rule: pure.
"""

from typing import Final

from rlhf_common.names import ExitCode
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod, PodEnd

LINES_SHOWN: Final = 8
"""Maximum number of last lines of a log that are shown."""
OUT_OF_MEMORY: Final = "OOMKilled"
"""Reason of a container that the kernel killed for exceeding its memory limit."""
_KILLED: Final = 137
"""Exit code 128 + SIGKILL."""
_NOT_STARTED: Final = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container whose command could not be started."""
_MEANINGS: Final = {
    ExitCode.USAGE: "its settings or the manifest are wrong",
    ExitCode.USER_CODE: "the reward failed",
    ExitCode.BAD_MODEL: "a model folder is missing or corrupt",
    ExitCode.BAD_DATA: "the prompts cannot be read",
    ExitCode.STORAGE: "a checkpoint or the journal could not be written",
    ExitCode.SAMPLE_FAILED: "no worker could decode a sample",
    ExitCode.ADDRESS_IN_USE: "its port is in use",
    ExitCode.RESTART: "it asked to be restarted",
}


def last_words(log: str) -> str:
    """Return the last line of a log that is not blank; empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def log_lines(pod: ObservedPod) -> str:
    """Return at most the last LINES_SHOWN lines of the pod's end message, under a heading; empty for fewer than two."""
    lines = pod.end.message.splitlines() if pod.end else []
    if len(lines) < 2:
        return ""
    return "\n  ".join([f"The last lines of the log of {pod.name}:", *lines[-LINES_SHOWN:]])


def how_it_ended(end: PodEnd) -> str:
    """Return a text such as `exit code 21 (a model folder is missing or corrupt): ...`."""
    if end.reason == OUT_OF_MEMORY:
        return "it was killed for using more memory than its limit: raise resources.limits.memory in its pod template"
    if end.reason in _NOT_STARTED:
        return f"its container cannot be started ({end.message}): use an image with the container's command"
    if end.code is None:
        return f"{end.reason or 'the pod failed'}: {end.message}" if end.message else end.reason or "the pod failed"
    meaning = _MEANINGS.get(ExitCode(end.code)) if end.code in set(ExitCode) else None
    if end.code == _KILLED:
        meaning = "it was killed from outside"
    line = last_words(end.message)
    return f"exit code {end.code}" + (f" ({meaning})" if meaning else "") + (f": {line}" if line else "")
