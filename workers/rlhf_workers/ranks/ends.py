"""The end of a pod with several ranks: the responsible rank, the exit code, and the message. Pure.

Rule: the cause is the first rank that failed by itself, or else the first that restarted.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_common.names import ExitCode

_FOLLOWS: Final = frozenset({ExitCode.OK, ExitCode.RESTART})
"""Exit codes of ranks that succeeded, or restarted because of others."""
_SIGNAL_BASE: Final = 128
"""Base of a container's exit codes for signals."""


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank."""

    rank: str
    code: int
    """Exit code; negative: the number of the signal."""
    last_words: str
    by_launcher: bool = False
    """Whether the launcher ended it."""


def pod_end(ends: Sequence[RankEnd]) -> tuple[int, str]:
    """Return the exit code of a pod, and why it ended; `ends` are in order."""
    own = [end for end in ends if not end.by_launcher]
    causes = [end for end in own if end.code not in _FOLLOWS] or [end for end in own if end.code]
    if not causes:
        return ExitCode.OK, "every rank of this pod was released"
    cause = causes[0]
    code = cause.code if cause.code >= 0 else _SIGNAL_BASE - cause.code
    words = f": {cause.last_words}" if cause.code > 0 and cause.last_words else ""
    return code, f"{cause.rank} ended with {_exit_in_words(cause.code)}, and the ranks of its pod with it{words}"


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}" + (" (killed, or out of memory)" if code == -signal.SIGKILL else "")
