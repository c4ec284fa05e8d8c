"""GPUs of a node without a GPU: a device plugin that registers nvidia.com/gpu with the real kubelet.

A separate program inside the node's namespaces: `device_plugin.py <kubelet's folder> <file>`. The file has one line
`<id> Healthy` or `<id> Unhealthy` per GPU and may change at any time. The kubelet does its own accounting, so counts
survive its restart. A container learns its devices from NVIDIA_VISIBLE_DEVICES, as with the vendor's plugin. When this
process dies the kubelet reports its GPUs as unhealthy.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

RESOURCE = "nvidia.com/gpu"
SOCKET = "rlhf-gpus.sock"
POLL = 0.2  # seconds between checks of the file and of the kubelet's folder
messages, services = grpc.protos_and_services("device_plugin.proto")


class Plugin(services.DevicePluginServicer):  # type: ignore[misc, name-defined]
    """Serves the devices listed in `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.stopped = threading.Event()

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return no options."""
        return messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Yield the devices, again after every change of the file."""
        reported = None
        while not self.stopped.is_set() and context.is_active():
            text = self._file.read_text()
            if text != reported:
                reported = text
                pairs = (line.split() for line in text.splitlines())
                yield messages.ListAndWatchResponse(
                    devices=[messages.Device(ID=name, health=health) for name, health in pairs]
                )
            time.sleep(POLL)

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Name the devices to each container."""
        answers = [
            messages.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(container_request.devices_ids))}
            )
            for container_request in request.container_requests
        ]
        return messages.AllocateResponse(container_responses=answers)


def serve_once(folder: Path, file: Path) -> None:
    """Serve and register; return when a starting kubelet has cleared the folder."""
    socket = folder / SOCKET
    socket.unlink(missing_ok=True)
    plugin = Plugin(file)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    services.add_DevicePluginServicer_to_server(plugin, server)
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    try:
        with grpc.insecure_channel(f"unix://{folder}/kubelet.sock") as channel:
            request = messages.RegisterRequest(version="v1beta1", endpoint=SOCKET, resource_name=RESOURCE)
            services.RegistrationStub(channel).Register(request, timeout=5)
        print("registered", flush=True)
        while socket.exists():
            time.sleep(POLL)
    finally:
        plugin.stopped.set()
        server.stop(grace=None).wait()


def main(folder: Path, file: Path) -> None:
    """Register with every kubelet that starts, until killed."""
    while True:
        if (folder / "kubelet.sock").exists():
            try:
                serve_once(folder, file)
            except grpc.RpcError as error:
                print(f"the kubelet does not answer: {error}", flush=True)
        time.sleep(POLL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
