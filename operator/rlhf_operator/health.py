"""Serves health and metrics over HTTP: /healthz, /readyz, /metrics.

Health means that jobs are reconciled and changes arrive.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from rlhf_common.endpoint import listener
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.workqueue import QueueSnapshot

MAX_WAIT_SECONDS: Final = 180.0
"""Longest wait of a job for a reconcile in seconds; beyond it the operator is unhealthy."""
MAX_RECONCILE_SECONDS: Final = 300.0
"""Longest reconcile in seconds; beyond it the operator is unhealthy."""
SILENT_ROUNDS: Final = 2
"""Consecutive comparisons with undelivered changes from which the operator is unhealthy."""


def ailment(queue: QueueSnapshot, silent_rounds: int) -> str:
    """Return the problem as a sentence; empty if there is none."""
    if queue.oldest_age_seconds > MAX_WAIT_SECONDS:
        return f"a job has waited {queue.oldest_age_seconds:.0f} s for a reconcile"
    if queue.longest_active_seconds > MAX_RECONCILE_SECONDS:
        return f"a reconcile has taken {queue.longest_active_seconds:.0f} s so far"
    if silent_rounds >= SILENT_ROUNDS:
        return f"changes have not arrived by the watch {silent_rounds} times in a row"
    return ""


async def serve(
    addresses: Sequence[str],
    snapshot: Callable[[], QueueSnapshot],
    silent_rounds: Callable[[], int],
    metrics: OperatorMetrics,
    unready: Callable[[], str] = lambda: "",
) -> web.AppRunner:
    """Serve on every `host:port`; return the runner to clean up. `unready` returns what the operator waits for."""

    async def healthz(_: web.Request) -> web.Response:
        wrong = ailment(snapshot(), silent_rounds())
        return web.Response(text=wrong or "ok", status=503 if wrong else 200)

    async def readyz(_: web.Request) -> web.Response:
        waits = unready()
        return web.Response(text=waits or "ok", status=503 if waits else 200)

    async def metrics_page(_: web.Request) -> web.Response:
        metrics.queue(snapshot())
        # The thread keeps the event loop free.
        body = await asyncio.to_thread(metrics.page)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics_page)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for address in addresses:
        host, _, port = address.rpartition(":")
        await web.SockSite(runner, listener(host.strip("[]"), int(port))).start()
    return runner
