"""The worker's gRPC server: WeightSource and KvSink for peers, health and reflection for probes.

Rule: with certificates, a client needs a certificate of the same authority.
"""

import socket
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rlhf_common import control_pb2, control_pb2_grpc
from rlhf_common.channels import OPTIONS, server_credentials
from rlhf_common.names import Env
from rlhf_workers.addresses import why_not_bound
from rlhf_workers.settings import SettingsError
from rlhf_workers.weights.source import WeightSourceService

WEIGHT_SOURCE: Final = control_pb2.DESCRIPTOR.services_by_name["WeightSource"].full_name
KV_SINK: Final = control_pb2.DESCRIPTOR.services_by_name["KvSink"].full_name


class PeerServer:
    """A started server that listens at `port`."""

    def __init__(self, server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, port: int) -> None:
        self.port = port
        self._server = server
        self._health = health_servicer

    async def set_serving(self, serving: bool) -> None:
        """Set the answer to health probes."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", WEIGHT_SOURCE):
            await self._health.set(service, state)

    async def stop(self) -> None:
        """Stop the server; running calls get half a second."""
        await self._server.stop(0.5)


async def start_server(
    listen: str,
    certificates: Path | None,
    weight_source: WeightSourceService,
    kv_sink: control_pb2_grpc.KvSinkServicer | None = None,
) -> PeerServer:
    """Bind the address and start; raise AddressInUseError or SettingsError if it cannot be bound.

    Unusable certificates are a SettingsError too.
    """
    try:
        credentials = None if certificates is None else server_credentials(certificates)
    except ValueError as error:
        raise SettingsError(f"{Env.CERTIFICATES}: {error}") from error
    server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)])
    add_weight_source(weight_source, server)
    if kv_sink is not None:
        control_pb2_grpc.add_KvSinkServicer_to_server(kv_sink, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (WEIGHT_SOURCE, KV_SINK, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise why_not_bound(Env.LISTEN, listen) from error
    await server.start()
    peer_server = PeerServer(server, health_servicer, port)
    await peer_server.set_serving(True)
    return peer_server


def add_weight_source(weight_source: WeightSourceService, server: grpc.aio.Server) -> None:
    """Add the WeightSource service to a server."""
    pb = control_pb2
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            weight_source.Describe, pb.WeightRequest.FromString, pb.WeightManifest.SerializeToString
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(weight_source.Fetch, pb.WeightRequest.FromString),
        "Lend": grpc.stream_stream_rpc_method_handler(
            weight_source.Lend, pb.WeightLoanRequest.FromString, pb.WeightLoan.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WEIGHT_SOURCE, handlers),))


def free_port(host: str) -> int:
    """Return a port that is free now, for a TCPStore that this worker may open later.

    Raises OSError when `host`, the name that other ranks use for this one, cannot be resolved.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        raise OSError(f"{Env.RENDEZVOUS}={host} cannot be found: {error}; does DNS answer pods of the job?") from error
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:  # the name of a service, not an address of this machine
            probe.bind(("", 0))
        return int(probe.getsockname()[1])
