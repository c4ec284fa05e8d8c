"""A failure that ends the job, with its reason, field, message and exit code."""

from pathlib import Path
from typing import Literal

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_common.surrogates import escaped


class JobError(Exception):
    """A failure of the job; `failure` is its message for the status."""

    def __init__(self, reason: str, message: str, *, field: str = "", exit_code: ExitCode = ExitCode.FAILED) -> None:
        message = escaped(message)
        super().__init__(message)
        self.failure = pb.Failure(reason=reason, field=field, message=message, exit_code=int(exit_code))


def storage_error(
    subject: str, path: Path, error: OSError, field: str, action: Literal["read", "written"] = "written"
) -> JobError:
    """Return the error of a path that cannot be read or written: exit code 23, with the path and the system's
    reason."""
    message = f"{subject} cannot be {action} at {path}: {error.strerror or error}"
    return JobError(
        "StorageFull" if error.errno == 28 else "StorageFailed", message, field=field, exit_code=ExitCode.STORAGE
    )
