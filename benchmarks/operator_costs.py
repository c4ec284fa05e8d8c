"""What the operator's own code costs, piece by piece, in CPU time of one process: no cluster, hence quick and steady.

`python benchmarks/operator_costs.py [--json]`: one event of a pod from a line of JSON into the index, rendering a pod,
reading a stored job, one request through the client against a bare server, beside plain aiohttp, and one comparison of
the backstop. Each is the best of several rounds, so that other load on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.operator_scale_rig.jobs import job, objects
from tests.support.fake_api_server import FakeApiServer, until

from rlhf_api import names
from rlhf_api.names import Group
from rlhf_operator.__main__ import GC_THRESHOLDS
from rlhf_operator.api_client.client import PAGE, KubernetesClient
from rlhf_operator.api_client.connection import Connection
from rlhf_operator.api_client.reflector import Reflector
from rlhf_operator.api_client.resources import CORE_RESOURCES
from rlhf_operator.api_client.transport import CONCURRENCY, Transport
from rlhf_operator.index import Index
from rlhf_operator.manifests import Images
from rlhf_operator.manifests.rendering import pod
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.resync import Resync
from rlhf_operator.watch_events import ResourceConsumer, WatchEventHandler
from rlhf_operator.watches import JobWatch
from rlhf_operator.workqueue import WorkQueue

Json = dict[str, Any]
ROUNDS = 3
TIMES = 200


def best(work: Callable[[], Any]) -> float:
    """Microseconds of CPU of one of TIMES, in the best round."""

    def once() -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    return min(once() for _ in range(ROUNDS)) / TIMES * 1e6


BASE = job("team", "job", pods=100)


def stored(name: str) -> Json:
    """A job as the API server holds it."""
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1", "generation": 1}
    return BASE | {"metadata": meta}


async def left_alone(key: str) -> float | None:
    """Take a key of the queue, and do nothing with it."""
    return None


def event_cost() -> float:
    """One event of a running pod, from its line of JSON into the index."""
    body = next(item for item in objects(stored("job")) if item["kind"] == "Pod")
    body["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    handler = WatchEventHandler(Index(), WorkQueue(left_alone, 1), OperatorMetrics())
    version = 0

    async def events() -> None:
        nonlocal version
        for _ in range(TIMES):
            version += 1
            meta = body["metadata"] | {"uid": "p", "resourceVersion": str(version)}
            handler.take("Pod", json.loads(json.dumps({"type": "MODIFIED", "object": body | {"metadata": meta}})))

    return best(lambda: asyncio.run(events()))


def comparison_cost(jobs: int) -> float:
    """Seconds of CPU of one comparison of the backstop with so many jobs that wait, from the pages it is answered."""
    index, metas = Index(), []
    for number in range(jobs):
        body = stored(f"job-{number}")
        body["metadata"] = body["metadata"] | {"resourceVersion": str(number + 1)}
        index.put_job(body)
        metas.append({"metadata": body["metadata"] | {"managedFields": [{"fieldsV1": {"f:spec": {}}}] * 3}})
    pages = [json.dumps({"items": metas[item : item + PAGE]}) for item in range(0, jobs, PAGE)]

    class Listed:
        async def metadata(
            self, kind: str, place: str | None, labels: str, on_version: Callable[[int], object]
        ) -> AsyncIterator[Json]:
            on_version(jobs)
            for page in pages if kind == names.KIND else ():
                for item in json.loads(page)["items"]:
                    yield item["metadata"]

    resync = Resync(cast(KubernetesClient, Listed()), index, WorkQueue(left_alone, 1), ())
    begun = time.process_time()
    asyncio.run(resync.compare())
    return time.process_time() - begun


def request_cost() -> dict[str, float]:
    """One POST of a pod by our client, and by aiohttp alone, to a server in another process."""
    body = next(item for item in objects(stored("job")) if item["kind"] == "Pod")
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(port,), daemon=True)
    server.start()
    try:
        return asyncio.run(requests(f"http://127.0.0.1:{port.get(timeout=120)}", body))
    finally:
        server.terminate()


async def requests(address: str, body: Json) -> dict[str, float]:
    """The two clients, CONCURRENCY requests at a time."""
    configuration = Configuration()
    configuration.host = address
    cluster = KubernetesClient(Transport(Connection(configuration)))
    content = json.dumps(body).encode()

    async def many(ask: Callable[[], Awaitable[object]]) -> float:
        spent = []
        for _ in range(ROUNDS):
            waiting, begun = iter(range(TIMES)), time.process_time()

            async def client(waiting: Any = waiting) -> None:
                for _ in waiting:
                    await ask()

            await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
            spent.append(time.process_time() - begun)
        return min(spent) / TIMES * 1e6

    async with aiohttp.ClientSession() as session:

        async def bare() -> None:
            async with session.post(address, data=content) as answer:
                await answer.read()

        result = {"request": await many(lambda: cluster.create(body)), "request_by_aiohttp_alone": await many(bare)}
    await cluster.close()
    return result


def serve(port: multiprocessing.Queue[int]) -> None:
    """Answers everything with a little metadata."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"metadata": {"uid": "x", "resourceVersion": "1"}})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def watch_cost(jobs: int) -> dict[str, float]:
    """One RLHFJob of a first listing, from the API server into the index: by kopf, and by a reflector."""
    result: dict[str, float] = {}
    for by in ("kopf", "reflector"):
        address: multiprocessing.Queue[str] = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve_jobs, args=(address, jobs), daemon=True)
        server.start()
        try:
            begun = time.process_time()
            asyncio.run(watched(address.get(timeout=120), jobs, by))
            result[f"listed_job_by_{by}"] = (time.process_time() - begun) / jobs * 1e6
        finally:
            server.terminate()
    return result


async def watched(address: str, jobs: int, by: str) -> None:
    """Watches until so many jobs are in the index."""
    index, metrics = Index(), OperatorMetrics()
    handler = WatchEventHandler(index, WorkQueue(left_alone, 1), metrics)
    server = FakeApiServer()
    server.url = address
    transport = Transport(server.connection())
    with server.kubeconfig() as path:
        os.environ["KUBECONFIG"] = str(path)
        if by == "kopf":
            running = asyncio.create_task(JobWatch(handler, metrics, ()).run(served_already))
        else:
            consumer = ResourceConsumer(handler, metrics, names.KIND, CORE_RESOURCES[names.KIND])
            running = asyncio.create_task(Reflector(transport, CORE_RESOURCES[names.KIND], None, consumer).run())
        await until(lambda: len(index.known(names.KIND)) == jobs, 300)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await transport.close()


async def served_already() -> None:
    """RLHFJobs are served."""


def serve_jobs(address: multiprocessing.Queue[str], jobs: int) -> None:
    """Holds so many jobs."""

    async def run() -> None:
        async with FakeApiServer() as server:
            for number in range(jobs):
                body = stored(f"job-{number}")
                server.put(names.KIND, body | {"metadata": {"name": f"job-{number}", "namespace": "team"}})
            address.put(server.url)
            await asyncio.Event().wait()

    asyncio.run(run())


def main() -> None:
    """Prints microseconds of CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    parsed = parse_job(stored("job")).job
    assert parsed is not None
    numbers = iter(range(10**9))
    result: dict[str, float] = {}

    def tell(figures: dict[str, float]) -> None:
        result.update(figures)
        for name, microseconds in figures.items():
            print(f"{name:28} {microseconds:9.0f} us", flush=True)

    tell({"event": event_cost()})
    tell({"render_a_pod": best(lambda: [pod(parsed, Group.GENERATION, item, Images()) for item in range(TIMES)])})
    tell({"read_a_stored_job": best(lambda: [parse_job(stored(f"job-{next(numbers)}")) for _ in range(TIMES)])})
    tell(request_cost())
    tell(watch_cost(1000))
    tell({"compare_5000_waiting_jobs": comparison_cost(5000) * 1e6})
    if given.json:
        print(json.dumps({"microseconds": result}))


if __name__ == "__main__":
    main()
