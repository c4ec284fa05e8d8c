"""Connections that the NetworkPolicies of a job and of the chart allow and block, on a node that enforces them.

Policies and labels come from the operator and the chart. Small servers listen at every port in question, so that only a
policy can block a connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.cluster import images, pods
from tests.cluster.cluster import Cluster
from tests.cluster.fixture import own_cluster
from tests.cluster.processes import ClusterError, wait_until
from tests.cluster.releases.chart import HOME, RELEASE, ROOT, render

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import load
from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.network import network_policy

pytestmark = pytest.mark.full


COORDINATOR, WORKER, METRICS = names.COORDINATOR_PORT, names.WORKER_PORT, names.METRICS_PORT
OPERATOR_METRICS, HEALTH = 8080, 8081
RENDEZVOUS = 41234  # any other: training ranks choose theirs
PORTS = (COORDINATOR, WORKER, METRICS, OPERATOR_METRICS, HEALTH, RENDEZVOUS)
PATIENCE = 240.0  # seconds until policies are enforced everywhere
TEAM, OTHER = "team-rl", "team-other"

SERVER = f"""
import selectors, socket
selector = selectors.DefaultSelector()
for port in {PORTS}:
    selector.register(socket.create_server(("", port)), selectors.EVENT_READ)
while True:
    for key, _ in selector.select():
        key.fileobj.accept()[0].close()
"""
# A port counts as blocked if it does not answer while others do: a policy drops packets silently.
ASK = """
import json, socket, sys, threading
reached = []
def ask(name, address, port):
    try:
        socket.create_connection((address, port), 4).close()
    except OSError:
        return
    reached.append([name, port])
threads = [threading.Thread(target=ask, args=each) for each in json.loads(sys.argv[1])]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(sorted(reached)))
"""


def job(name: str = "job", namespace: str = TEAM) -> RLHFJob:
    """Return a job of the examples."""
    result = load(ROOT / "examples" / "ppo.yaml")
    return result.model_copy(update={"metadata": {"name": name, "namespace": namespace}})


OPERATOR = {
    "app.kubernetes.io/name": "rlhf-operator",
    "app.kubernetes.io/instance": RELEASE,
    "app.kubernetes.io/component": "operator",
}
PEERS: Mapping[str, tuple[str, dict[str, str]]] = {
    "operator": (HOME, OPERATOR),
    "coordinator": (TEAM, identity.labels(job(), Group.COORDINATOR)),
    "worker": (TEAM, identity.labels(job(), Group.GENERATION, 0)),
    "rank": (TEAM, identity.labels(job(), Group.TRAINING, 0)),
    "another-job": (TEAM, identity.labels(job("another"), Group.GENERATION, 0)),
    "bystander": (TEAM, {}),
    "same-name": (OTHER, identity.labels(job(namespace=OTHER), Group.GENERATION, 0)),
    "stranger": (OTHER, {}),
    "pretender": (OTHER, OPERATOR),
}
"""Pod -> its namespace and labels."""
OF_THE_JOB = ("coordinator", "worker", "rank")


class Peers:
    """The pods and their connections."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._addresses = {
            name: cluster.get("pod", name, f"--namespace={namespace}")["status"]["podIP"]
            for name, (namespace, _) in PEERS.items()
        }

    def run(self, name: str, program: str, *arguments: str) -> Any:
        """Return the output of a program in pod `name`."""
        inside = (f"--namespace={PEERS[name][0]}", "--", "python3", "-c", program, *arguments)
        return json.loads(self._cluster.kubectl("exec", name, *inside))

    def reached(self, name: str) -> set[tuple[str, int]]:
        """Return (pod, port) of all connections that pod `name` can open now."""
        asked = [[other, self._addresses[other], port] for other in PEERS if other != name for port in PORTS]
        return {(other, port) for other, port in self.run(name, ASK, json.dumps(asked))}

    def until(self, name: str, expected: set[tuple[str, int]]) -> None:
        """Wait until pod `name` reaches exactly this."""
        seen: set[tuple[str, int]] = set()

        def exactly() -> bool:
            nonlocal seen
            seen = self.reached(name)
            return seen == expected

        try:
            wait_until(f"what {name} reaches", exactly, PATIENCE, every=1)
        except TimeoutError as error:
            wrongly, missed = sorted(seen - expected), sorted(expected - seen)
            raise AssertionError(f"{name}: let through wrongly {wrongly}, kept out wrongly {missed}") from error


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield a node that enforces policies, with the pods and without any policy."""
    with own_cluster(request, level="node", gpus=0, network_policies=True, images=[images.python()]) as result:
        for name in (HOME, TEAM, OTHER):
            result.add_namespace(name)
        for name, (namespace, labels) in PEERS.items():
            result.apply(pods.python(name, SERVER, labels=labels), f"--namespace={namespace}")
        for name, (namespace, _) in PEERS.items():
            pods.wait(result, name, "Running", namespace=namespace)
        yield result


@pytest.fixture(scope="module")
def peers(cluster: Cluster) -> Peers:
    """Check that two pods reach all others at every port, then apply the policies."""
    result = Peers(cluster)
    for name in ("stranger", "operator"):
        result.until(name, {(other, port) for other in PEERS if other != name for port in PORTS})
    api_server = int(cluster.server.rpartition(":")[2])
    values = {"networkPolicy": {"enabled": True, "apiServerPorts": [api_server]}}
    cluster.apply([network_policy(job(), HOME), render(values)["NetworkPolicy", RELEASE]])
    return result


def open_to(*ports: int, peers: tuple[str, ...]) -> set[tuple[str, int]]:
    """Return (pod, port) for each pod and port."""
    return {(name, port) for name in peers for port in ports}


OUTSIDE = tuple(name for name in PEERS if name not in (*OF_THE_JOB, "operator"))
FOR_ANYBODY = open_to(METRICS, peers=OF_THE_JOB) | open_to(OPERATOR_METRICS, HEALTH, peers=("operator",))


@pytest.mark.parametrize("name", OF_THE_JOB)
def test_pods_of_a_job_reach_each_other_at_every_port_and_the_world_outside(peers: Peers, name: str) -> None:
    """Check egress, which stays open for the user's reward endpoints, hubs and stores."""
    others = tuple(item for item in (*OF_THE_JOB, *OUTSIDE) if item != name)
    peers.until(name, open_to(*PORTS, peers=others) | open_to(OPERATOR_METRICS, HEALTH, peers=("operator",)))


@pytest.mark.parametrize("name", OUTSIDE)
def test_nobody_else_reaches_more_than_metrics(peers: Peers, name: str) -> None:
    """Other pods are another job of the namespace, one of the same name elsewhere, a fake operator, and pods without
    labels."""
    others = tuple(item for item in OUTSIDE if item != name)
    peers.until(name, open_to(*PORTS, peers=others) | FOR_ANYBODY)


def test_the_operator_reaches_coordinators_dns_and_the_api_server_and_nothing_else(
    cluster: Cluster, peers: Peers
) -> None:
    peers.until("operator", {("coordinator", COORDINATOR)})
    resolves = "import json, socket; print(json.dumps(socket.gethostbyname('kubernetes.default.svc.cluster.local')))"
    service = cluster.get("service", "kubernetes")["spec"]["clusterIP"]

    def resolved() -> bool:
        """Return whether the name resolves; a busy name server may not answer a single query."""
        try:
            return bool(peers.run("operator", resolves) == service)
        except ClusterError:
            return False

    wait_until("the name of the API server to be answered", resolved, PATIENCE, every=1)
    host, _, port = cluster.server.removeprefix("https://").rpartition(":")
    asks = f"import json, socket; print(json.dumps(socket.create_connection(('{host}', {port}), 60).getpeername()))"
    assert peers.run("operator", asks) == [host, int(port)]


def test_a_scraper_may_be_named_and_then_nobody_else_reads_the_operators_metrics(
    cluster: Cluster, peers: Peers
) -> None:
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": OTHER}}}
    values = {"networkPolicy": {"enabled": True, "metricsFrom": [scraper]}}
    cluster.apply(render(values)["NetworkPolicy", RELEASE])
    wait_until(
        "a bystander to be refused", lambda: ("operator", OPERATOR_METRICS) not in peers.reached("bystander"), PATIENCE
    )
    wait_until("the scraper", lambda: ("operator", OPERATOR_METRICS) in peers.reached("stranger"), PATIENCE)
