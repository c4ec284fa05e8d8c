"""What a verb cannot do, in a sentence with the remedy, and the exit code it ends with.

What the API server did not do is an `ApiError` of the shared client, with a text of `remedies`.
"""

from typing import Final

from rlhf_api.names import ExitCode

TIMED_OUT: Final = 124
"""`wait` gave up; the code that timeout(1) uses."""


class VerbError(Exception):
    """Nothing more was done; the message says what was wrong and what would help."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)
