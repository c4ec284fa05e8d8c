"""A coordinator that answers what a test wrote down, over the job's own mutual TLS, at an address of its own.

For what the operator makes of a coordinator's status; that the real one says such things is tested with the real one.
The rule: it serves on the port that every coordinator has, at a loopback address that no other test uses.
"""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from rlhf_api import control_pb2 as pb
from rlhf_api.channels import server_credentials
from rlhf_api.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from rlhf_api.names import COORDINATOR_PORT

from .job_fixture import Seen


class ScriptedCoordinator(CoordinatorServicer):
    """Answers GetStatus with `status`, and remembers what it was told by Resize."""

    def __init__(self, seen: Seen, folder: Path) -> None:
        self.address = f"127.77.{random.randrange(256)}.{random.randrange(1, 255)}"
        self.status = pb.JobStatus()
        self.told: list[dict[str, int]] = []
        self._seen, self._folder = seen, folder
        self._server = grpc.server(ThreadPoolExecutor(2))

    def __enter__(self) -> Self:
        data = self._seen.cluster.get("secret", "job-certificates", self._seen.where)["data"]
        for name, content in data.items():
            (self._folder / name).write_bytes(base64.b64decode(content))
        add_CoordinatorServicer_to_server(self, self._server)
        self._server.add_secure_port(f"{self.address}:{COORDINATOR_PORT}", server_credentials(self._folder))
        self._server.start()
        self._seen.report("coordinator", {"podIP": self.address, "podIPs": [{"ip": self.address}]})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None)

    def says(self, *workers: str, **fields: Any) -> None:
        """From now on: these workers are busy, and so on."""
        sizes = {group: sum(each.startswith(group) for each in workers) for group in ("generation", "inference")}
        busy = [pb.WorkerStatus(worker=each, state="Busy") for each in workers]
        given = {"phase": "Generating", "iteration": 3, "iterations": 10, "replicas": sizes} | fields
        self.status = pb.JobStatus(job="job", workers=busy, **given)

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:  # noqa: N802
        """As the real one."""
        return self.status

    def Resize(self, request: pb.ResizeRequest, context: grpc.ServicerContext) -> pb.ResizeReply:  # noqa: N802
        """As the real one."""
        self.told.append(dict(request.replicas))
        for group, count in request.replicas.items():
            self.status.replicas[group] = count
        return pb.ResizeReply()
