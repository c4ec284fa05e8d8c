"""Converts exceptions of a role into `pb.Failure`.

Rule: a WorkError brings its own failure; a lack of memory names the field to change, if MEMORY_FIELDS has one.
"""

import traceback
from pathlib import Path
from typing import Final

import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.error_text import error_text
from rlhf_common.names import ExitCode
from rlhf_common.surrogates import escaped

MEMORY_FIELDS: Final = {
    "generation": "spec.generation.maxBatchSize",
    "generate": "spec.generation.maxBatchSize",
    "inference": "spec.inference.batchTokens",
    "score": "spec.inference.batchTokens",
    "training": "spec.training.microBatchSize",
    "train": "spec.training.microBatchSize",
    "accumulate": "spec.training.microBatchSize",
    "become_generation": "spec.generation.gpusPerReplica",
    "become_inference": "spec.inference.gpusPerReplica",
    "become_training": "spec.training.gpusPerReplica",
}
"""Field to change after a lack of memory, by command or role."""
MEMORY_TEXTS: Final = ("CUDA out of memory", "HIP out of memory", "DefaultCPUAllocator: can't allocate memory")
"""Texts in the out-of-memory errors of torch's allocators."""


class WorkError(Exception):
    """A failure with its reason, message, field and exit code, as a `pb.Failure`."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        field: str = "",
        retryable: bool = False,
        exit_code: ExitCode = ExitCode.FAILED,
    ) -> None:
        message = escaped(message)
        super().__init__(message)
        self.failure = pb.Failure(
            reason=reason, field=field, message=message, retryable=retryable, exit_code=int(exit_code)
        )


def failure_of(error: Exception, work: str) -> pb.Failure:
    """Return the failure to report for `error`; `work` names the command, role or other work that raised it."""
    if isinstance(error, WorkError):
        return error.failure
    if is_out_of_memory(error):
        field = MEMORY_FIELDS.get(work, "")
        advice = f"; {'raise' if field.endswith('gpusPerReplica') else 'lower'} {field}" if field else ""
        message = f"{work}: {_first_line(error) or 'out of memory'}{advice}"
        return pb.Failure(reason="OutOfMemory", field=field, message=message, exit_code=ExitCode.FAILED)
    reason = "DeviceLost" if device_is_lost(error) else "Internal"
    return pb.Failure(reason=reason, message=f"{work}: {describe(error)}", retryable=True, exit_code=ExitCode.FAILED)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a device or the host ran out of memory.

    For a RuntimeError that is no OutOfMemoryError, the text decides.
    """
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_TEXTS)
    )


def device_is_lost(error: Exception) -> bool:
    """Return True for an error of the GPU's runtime: later calls of this process may fail too, so it must end."""
    return isinstance(error, torch.AcceleratorError)


def describe(error: BaseException) -> str:
    """Return `file.py:12 in function: ValueError: text`, with the innermost frame's line; see `error_text`."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    return where + escaped(error_text(error))


def _first_line(error: Exception) -> str:
    return escaped(str(error)).splitlines()[0] if str(error) else ""
