"""Coordinators of fake pods: one process that answers at every pod's address, with the certificates of its job.

Fake pods have addresses of the loopback network (`ADDRESSES`), on which this process can listen. Every coordinator is
in the middle of an iteration: only the remaining time changes between two answers, and every ITERATION_SECONDS another
iteration is done.
"""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from benchmarks.operator_scale_rig.bare_client import BareClient, place
from tests.support.coordinator.partial_services import PartialCoordinator

from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import add_CoordinatorServicer_to_server
from rlhf_common.names import COORDINATOR_PORT, LABEL_GROUP, LABEL_JOB_NAME, Group

Json = dict[str, Any]
ADDRESSES = "127.16.0.1/16"
ITERATION_SECONDS = 300.0
ITERATIONS = 100


class _Coordinator(PartialCoordinator):
    def __init__(self, offset: float, generation: int) -> None:
        self._begun, self._generation = time.monotonic() - offset, generation

    async def GetStatus(  # noqa: N802 gRPC names it
        self, request: pb.GetStatusRequest, context: Any
    ) -> pb.JobStatus:
        passed = time.monotonic() - self._begun
        iteration = int(passed / ITERATION_SECONDS)
        workers = [*(f"generation-{index}" for index in range(self._generation)), "inference-0", "training-0"]
        return pb.JobStatus(
            job="job",
            phase="Generating",
            iteration=iteration,
            iterations=ITERATIONS,
            metrics={"reward": 0.5 + iteration / 1000, "seconds/iteration": ITERATION_SECONDS},
            seconds_left=ITERATIONS * ITERATION_SECONDS - passed,
            replicas={"generation": self._generation, "inference": 1, "training": 1},
            workers=[pb.WorkerStatus(worker=name, state="Busy", engine="torch") for name in workers],
        )


async def _serve(secrets: list[tuple[str, dict[str, bytes]]], generation: int) -> None:
    servers = []
    for number, (address, files) in enumerate(secrets):
        server = grpc.aio.server()
        offset = ITERATION_SECONDS * number / len(secrets)
        add_CoordinatorServicer_to_server(_Coordinator(offset, generation), server)
        keys = [(files["tls.key"], files["tls.crt"])]
        credentials = grpc.ssl_server_credentials(keys, files["ca.crt"], require_client_auth=True)
        server.add_secure_port(f"{address}:{COORDINATOR_PORT}", credentials)
        await server.start()
        servers.append(server)
    await asyncio.Event().wait()


def _run(secrets: list[tuple[str, dict[str, bytes]]], generation: int) -> None:
    asyncio.run(_serve(secrets, generation))


async def secrets_by_address(client: BareClient, namespace: str) -> list[tuple[str, dict[str, bytes]]]:
    """Return (address of the coordinator's pod, files of its job's Secret) of every job of a namespace."""
    listed = json.loads(
        await client.ask("GET", f"{place('Pod', namespace)}?labelSelector={LABEL_GROUP}={Group.COORDINATOR}")
    )
    result = []
    for pod in listed["items"]:
        path = f"{place('Secret', namespace)}/{pod['metadata']['labels'][LABEL_JOB_NAME]}-certificates"
        data = json.loads(await client.ask("GET", path))["data"]
        result.append((pod["status"]["podIP"], {name: base64.b64decode(value) for name, value in data.items()}))
    return result


@contextmanager
def answering(secrets: list[tuple[str, dict[str, bytes]]], generation: int) -> Iterator[None]:
    """Answer as the coordinators of all these jobs, in a separate process."""
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(secrets, generation), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()
