"""Measures an operator whose jobs run without events: processor time, memory, requests.

`python benchmarks/operator_at_work.py [--jobs 200] [--seconds 60] [--silent] [--json]`: the operator's watches, queue,
controller and connections to coordinators run in a separate process. This process has an in-memory API server, and a
kubelet that reports every pod as running; a third process has coordinators that answer. Needs no cluster, so it runs
anywhere. `operator_scale.py --scenario S8` measures the same on a real API server. With `--silent` no coordinator
answers. Nothing is measured before SETTLED_SECONDS have passed since the last pod started.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.operator_scale_rig import coordinators
from benchmarks.operator_scale_rig.jobs import FEWEST_PODS, job
from benchmarks.operator_scale_rig.processor_time import seconds_of
from tests.support.operator.fake_api_server import FakeApiServer, until

from rlhf_common import names
from rlhf_operator.__main__ import GC_THRESHOLDS, RESOURCES
from rlhf_operator.api_client.reflector import Reflector
from rlhf_operator.api_client.transport import Transport
from rlhf_operator.controller import Controller
from rlhf_operator.coordinator_client import Coordinators
from rlhf_operator.events import EventPoster
from rlhf_operator.index import Index
from rlhf_operator.manifests import Images
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.watch_events import WATCHED, ResourceConsumer, WatchEventHandler
from rlhf_operator.workqueue import WorkQueue

Json = dict[str, Any]
NAMESPACE = "team"
PODS = 5
"""Number of pods per job."""
SETTLED_SECONDS = 60.0
"""Seconds from the start of all pods to the measurement: longer than the delays scheduled after a start."""
LONGEST_SECONDS = 900.0


async def operate(address: str) -> None:
    """Run the operator of an API server forever."""
    server = FakeApiServer()
    server.url = address
    index, metrics, client = Index(), OperatorMetrics(), server.client()
    queue: WorkQueue
    readers = Coordinators(lambda key: queue.add(key))
    controller = Controller(client, index, Images(), metrics, readers, EventPoster(client, "operator-0"))
    queue = WorkQueue(controller.reconcile, 16)
    handler = WatchEventHandler(index, queue, metrics, len(WATCHED))
    transport = Transport(server.connection())
    async with asyncio.TaskGroup() as tasks:
        for kind, resource in WATCHED.items():
            consumer = ResourceConsumer(handler, metrics, kind, resource)
            labels = "" if kind == names.KIND else names.LABEL_JOB_NAME
            tasks.create_task(Reflector(transport, resource, None, consumer, labels).run())
        tasks.create_task(queue.run())


def operator(address: str) -> None:
    """The operator's process."""
    gc.set_threshold(*GC_THRESHOLDS)
    asyncio.run(operate(address))


class Kubelet:
    """Reports every pod as running, each with its own address."""

    def __init__(self, server: FakeApiServer) -> None:
        self._server = server
        self._addresses: dict[str, str] = {}

    def address(self, pod: str) -> str:
        """Return the address of a pod."""
        number = len(self._addresses) + 10
        return self._addresses.setdefault(pod, f"127.16.{number // 250}.{number % 250 + 1}")

    def pods(self, phase: str) -> list[Json]:
        """Return the pods in a phase."""
        listed = [body for (path, _, _), body in self._server.objects.items() if path.endswith("/pods")]
        return [body for body in listed if body["status"]["phase"] == phase]

    def start_all(self) -> None:
        """Start pending pods."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for body in self.pods("Pending"):
            conditions = [
                {"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")
            ]
            status = {"phase": "Running", "podIP": self.address(body["metadata"]["name"]), "conditions": conditions}
            status["containerStatuses"] = [{"name": "worker", "state": {"running": {"startedAt": now}}}]
            self._server.put("Pod", {**body, "status": status})


def certificates(server: FakeApiServer, kubelet: Kubelet) -> list[tuple[str, dict[str, bytes]]]:
    """Return (address, files of the Secret) of every coordinator."""
    result = []
    for (path, _, name), body in list(server.objects.items()):
        if path.endswith("/secrets") and name.endswith("-certificates"):
            files = {key: base64.b64decode(value) for key, value in body["data"].items()}
            result.append((kubelet.address(f"{name.removesuffix('-certificates')}-coordinator"), files))
    return result


def memory_mb(pid: int | None) -> float:
    """Return the memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


async def measure(jobs: int, seconds: float, *, silent: bool) -> Json:
    """Return the cost of the operator during `seconds`."""
    with ExitStack() as stack:
        async with FakeApiServer() as server:
            kubelet = Kubelet(server)
            child = multiprocessing.get_context("spawn").Process(target=operator, args=(server.url,), daemon=True)
            child.start()
            stack.callback(child.terminate)
            for number in range(jobs):
                server.put(names.KIND, job(NAMESPACE, f"job-{number}", pods=PODS))
            await until(lambda: len(kubelet.pods("Pending")) == jobs * PODS, LONGEST_SECONDS)
            if not silent:
                secrets = certificates(server, kubelet)
                stack.enter_context(coordinators.answering(secrets, PODS - FEWEST_PODS + 1))
                await asyncio.sleep(10)
            kubelet.start_all()
            await asyncio.sleep(SETTLED_SECONDS)
            assert child.pid is not None
            asked, begun, spent = len(server.requests), time.perf_counter(), seconds_of(child.pid)
            await asyncio.sleep(seconds)
            wall, spent = time.perf_counter() - begun, seconds_of(child.pid) - spent
            requests = Counter(_asked_for(method, path) for method, path in server.requests[asked:])
            stored = [body for (path, _, _), body in server.objects.items() if path.endswith(f"/{names.PLURAL}")]
            reasons = Counter(_running(body) for body in stored)
            return {
                "jobs": jobs,
                "pods": jobs * PODS,
                "core_share": spent / wall,
                "memory_mb": memory_mb(child.pid),
                "requests_per_minute": {request: count * 60 / wall for request, count in requests.items()},
                "running": dict(reasons),
            }


def _asked_for(method: str, path: str) -> str:
    """Return the kind of a request, such as `GET secrets` or `PATCH rlhfjobs/status`."""
    parts = path.strip("/").split("/")
    place = next(
        (i for i, part in enumerate(parts) if part in {resource.plural for resource in RESOURCES.values()}), -1
    )
    named = parts[place + 1 :]
    return f"{method} {'/'.join([parts[place], *named[1:]])}" if named or method != "GET" else f"watch {parts[place]}"


def _running(body: Json) -> str:
    return next(str(each["reason"]) for each in body["status"]["conditions"] if each["type"] == "Running")


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the operator is looked at")
    parser.add_argument("--silent", action="store_true", help="no coordinator answers")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result = asyncio.run(measure(options.jobs, options.seconds, silent=options.silent))
    for name, value in result.items():
        print(f"{name:22} {value if not isinstance(value, float) else f'{value:.4g}'}", flush=True)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
