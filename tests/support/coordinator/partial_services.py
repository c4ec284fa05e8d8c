"""Services of the control protocol that implement some methods; the others answer UNIMPLEMENTED."""

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import CoordinatorServicer


class PartialCoordinator(CoordinatorServicer):
    """A coordinator without any method; gRPC answers UNIMPLEMENTED to a NotImplementedError."""

    def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.CoordinatorMessage]:  # noqa: N802
        raise NotImplementedError

    def FetchBatch(  # noqa: N802
        self, request: pb.FetchBatchRequest, context: Any
    ) -> Iterator[pb.BatchPart] | AsyncIterator[pb.BatchPart]:
        raise NotImplementedError

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.JobStatus | Awaitable[pb.JobStatus]:  # noqa: N802
        raise NotImplementedError

    def WatchStatus(self, request: pb.WatchStatusRequest, context: Any) -> AsyncIterator[pb.JobStatus]:  # noqa: N802
        raise NotImplementedError

    def Stop(self, request: pb.StopRequest, context: Any) -> pb.StopReply | Awaitable[pb.StopReply]:  # noqa: N802
        raise NotImplementedError

    def Resize(self, request: pb.ResizeRequest, context: Any) -> pb.ResizeReply | Awaitable[pb.ResizeReply]:  # noqa: N802
        raise NotImplementedError
