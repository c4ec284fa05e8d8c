"""The error of a local run: a message for the user, and the exit code of the command."""

from rlhf_common.names import ExitCode


class RunError(Exception):
    """The run did not start, or could not continue; the message names the field or value."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class MissingFileError(RunError):
    """A file or folder of the manifest is not on this machine; the message begins with the field."""
