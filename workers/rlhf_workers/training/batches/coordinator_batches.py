"""Fetches an iteration's scored batch from the coordinator.

Rule: while the coordinator is unreachable, retry after a pause up to a time-out.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from rlhf_common import channels, control_pb2_grpc
from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError

RETRY_SECONDS: Final = 0.25
"""Pause in seconds between two tries."""
AWAY: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})
"""Statuses that count as a broken connection."""


class CoordinatorBatches:
    """Batches over a blocking channel; each try opens another one."""

    def __init__(self, address: str, worker: str, certificates: Path | None, timeout: float) -> None:
        self._address, self._worker, self._certificates, self._timeout = address, worker, certificates, timeout

    def fetch(
        self, iteration: int, chunk: int = 0, sleep: Callable[[float], None] = time.sleep
    ) -> list[pb.TrainSample]:
        """Return all samples of the batch, or those of one chunk, counted from 1. Raises WorkError BatchTimeout,
        BatchRefused."""
        deadline = time.monotonic() + self._timeout
        request = pb.FetchBatchRequest(worker=self._worker, iteration=iteration, chunk=chunk)
        while True:
            try:
                left = max(1.0, deadline - time.monotonic())
                with channels.channel(self._address, self._certificates) as channel:
                    stub = control_pb2_grpc.CoordinatorStub(channel)
                    parts = list(stub.FetchBatch(request, timeout=left, wait_for_ready=True))
                return [sample for part in parts for sample in part.samples]
            except grpc.RpcError as error:
                self._judge(error, iteration, deadline)
            sleep(RETRY_SECONDS)

    def _judge(self, error: grpc.RpcError, iteration: int, deadline: float) -> None:
        """Return if a retry may succeed; otherwise raise the matching error."""
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED or (code in AWAY and time.monotonic() > deadline):
            raise WorkError(
                "BatchTimeout",
                f"waited {self._timeout:.0f} s for the coordinator at {self._address} to give the batch of iteration "
                f"{iteration}: {details}",
                retryable=True,
            ) from error
        if code not in AWAY:
            raise WorkError(
                "BatchRefused", f"batch of iteration {iteration}: {code.name}: {details}", retryable=True
            ) from error
