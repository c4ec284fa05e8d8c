"""Compares the requests of gangs with those that the real scheduler counts for the same pods on the real API server."""

from __future__ import annotations

import re
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.support.operator.quota_templates import OVERHEAD, POD_SPECS, RUNTIME_CLASS

from rlhf_operator.gang.pod_requests import pod_requests

pytestmark = pytest.mark.full

PATIENCE = 240.0  # seconds
SERIES = re.compile(r'^kube_pod_resource_request\{.*?pod="([^"]+)".*?resource="([^"]+)".*?\} (\S+)$', re.MULTILINE)


class CountingScheduler:
    """A scheduler that reports its count for each pod."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.arguments = [
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--authorization-always-allow-paths=/metrics/resources",
        ]

    def counts(self) -> dict[str, dict[str, float]]:
        """Return pod -> resource -> amount; resources with amount 0 are omitted."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        url = f"https://127.0.0.1:{self.port}/metrics/resources"
        with urllib.request.urlopen(url, timeout=30, context=context) as answer:
            text = answer.read().decode()
        counted: dict[str, dict[str, float]] = {}
        for pod, resource, value in SERIES.findall(text):
            counted.setdefault(pod, {})[resource] = float(value)
        return counted


@pytest.fixture(scope="module")
def scheduler() -> CountingScheduler:
    """Return the scheduler of the cluster."""
    return CountingScheduler()


@pytest.fixture(scope="module")
def cluster(scheduler: CountingScheduler) -> Iterator[Cluster]:
    """Yield a control plane without nodes, with a runtime class that has an overhead."""
    with Cluster(level="control-plane", component_args={"kube-scheduler": scheduler.arguments}) as started:
        runtime_class = {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": RUNTIME_CLASS},
            "handler": "sandboxed",
            "overhead": {"podFixed": OVERHEAD},
        }
        started.apply(runtime_class)
        yield started


@settings(
    max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(specs=st.lists(POD_SPECS, min_size=30, max_size=30), unique=st.uuids())
def test_a_pod_is_counted_as_the_scheduler_counts_it(
    cluster: Cluster, scheduler: CountingScheduler, specs: list[dict[str, Any]], unique: Any
) -> None:
    pods = {f"pod-{unique}-{number}": spec for number, spec in enumerate(specs)}
    cluster.apply(
        [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec} for name, spec in pods.items()],
        "--namespace=default",
    )
    expected = {
        name: {resource: float(value) for resource, value in pod_requests(spec).items() if value}
        for name, spec in pods.items()
    }
    seen = {name for name, asked in expected.items() if asked}
    wait_until("the scheduler to see the pods", lambda: seen <= scheduler.counts().keys(), PATIENCE, every=0.2)
    counted = scheduler.counts()
    for name, spec in pods.items():
        assert counted.get(name, {}) == pytest.approx(expected[name]), spec
