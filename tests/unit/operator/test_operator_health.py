"""The operator is alive if it serves jobs and receives changes."""

import socket

import aiohttp
import pytest
from tests.support.loopback import LOOPBACKS, bracketed

from rlhf_operator.health import ailment, serve
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.workqueue import QueueSnapshot

WELL = QueueSnapshot(depth=3, active=2, oldest_age_seconds=4.0, longest_active_seconds=20.0)


def test_a_busy_operator_is_well() -> None:
    assert ailment(WELL, 1) == ""


@pytest.mark.parametrize(
    ("snapshot", "rounds", "words"),
    [
        (QueueSnapshot(1, 16, 200.0, 20.0), 0, "a job has waited 200 s for a reconcile"),
        (QueueSnapshot(0, 1, 0.0, 400.0), 0, "a reconcile has taken 400 s"),
        (WELL, 2, "changes have not arrived by the watch 2 times in a row"),
    ],
)
def test_what_is_wrong_is_told(snapshot: QueueSnapshot, rounds: int, words: str) -> None:
    assert words in ailment(snapshot, rounds)


@pytest.mark.parametrize("wildcard", ["[::]", "0.0.0.0"])
async def test_health_and_metrics_answer_on_both_families(wildcard: str) -> None:
    """In an IPv6-only cluster the kubelet and Prometheus connect over IPv6."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    served = await serve([f"{wildcard}:{port}"], lambda: WELL, lambda: 0, OperatorMetrics())
    try:
        async with aiohttp.ClientSession() as client:
            for host in map(bracketed, LOOPBACKS):
                async with client.get(f"http://{host}:{port}/healthz") as answer:
                    assert (answer.status, await answer.text()) == (200, "ok")
                async with client.get(f"http://{host}:{port}/metrics") as answer:
                    assert answer.status == 200
    finally:
        await served.cleanup()
