"""What a verb cannot do, in a sentence with the remedy, and the exit code it ends with."""

from typing import Final

from rlhf_api.names import ExitCode

TIMED_OUT: Final = 124
"""`wait` gave up; the code that timeout(1) uses."""


class VerbError(Exception):
    """Nothing more was done; the message says what was wrong and what would help."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)


class UnreachableError(VerbError):
    """The API server does not answer, or has no time; it may later."""


class ForbiddenError(VerbError):
    """The user may not do it."""


class AbsentError(VerbError):
    """There is no object of that name (any more)."""


class RefusedError(VerbError):
    """The API server does not accept the request; the message is its own."""
