"""The capabilities of each level of the cluster, tested as a user would: through kubectl, and from inside pods."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.cluster import environment, images, kwok, pods
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.fixture import NO_ROOT
from tests.cluster.processes import wait_until
from tests.cluster.settings import ClusterSettings

import rlhf_api

pytestmark = pytest.mark.full


ANSWER = 60  # seconds for one answer of a small server


@pytest.fixture(scope="module")
def cluster(node_cluster: Cluster) -> Cluster:
    """Return the real node with the Python image in it."""
    node_cluster.nodes["n1"].import_image(images.python())
    return node_cluster


@pytest.fixture
def web(cluster: Cluster) -> Iterator[str]:
    """Yield a headless service and a service address for one pod web-0 that serves HTTP on port 8000."""
    program = "import http.server as h; h.ThreadingHTTPServer(('', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
    port = {"port": 8000}
    selector = {"app": "web"}
    cluster.apply(
        [
            service(
                "web", {"clusterIP": "None", "selector": selector, "ports": [port], "publishNotReadyAddresses": True}
            ),
            service("web-vip", {"selector": selector, "ports": [port]}),
            pods.python("web-0", program, labels=selector, hostname="web-0", subdomain="web"),
        ]
    )
    pods.wait(cluster, "web-0", "Running")
    name = "web-0.web.default.svc.cluster.local"
    wait_until(
        "web-0 to be known by all its names", lambda: answers(cluster, "web-0", (name, "web-vip")), pods.POD_TIMEOUT
    )
    yield name
    cluster.kubectl("delete", "pod/web-0", "service/web", "service/web-vip")


def answers(cluster: Cluster, pod: str, hosts: Sequence[str]) -> bool:
    """Return whether all of these serve HTTP at port 8000 to pod `pod`.

    A running container may not listen yet, and endpoints, DNS and kube-proxy's rules follow after it is ready.
    """
    ask = "import sys, urllib.request as r; [r.urlopen(f'http://{h}:8000/', timeout=5) for h in sys.argv[1:]]"
    try:
        cluster.kubectl("exec", pod, "--", "python3", "-c", ask, *hosts)
    except ClusterError:
        return False
    return True


def unschedulable(cluster: Cluster, name: str, words: str) -> None:
    """Wait until the scheduler reports these words as the reason why a pod has no node."""
    path = "--output=jsonpath={.status.conditions[?(@.type=='PodScheduled')].message}"
    said = ("get", "pod", name, path)
    wait_until(f"pod {name} to be refused: {words}", lambda: words in cluster.kubectl(*said), pods.POD_TIMEOUT)


def service(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a Service."""
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="level: 'nodes': must be one of api, control-plane, node"):
        ClusterSettings(level="nodes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nodes: 9: must be 1 to 8"):
        ClusterSettings(level="api", nodes=9)
    with pytest.raises(ValueError, match=r"component_args: \['kube-api'\]"):
        ClusterSettings(level="api", component_args={"kube-api": []})


def test_level_node_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match="needs root; level 'control-plane' does not"):
        ClusterSettings(level="node")


def test_api_level_is_ready_and_enforces_rbac(api_cluster: Cluster) -> None:
    assert api_cluster.kubectl("get", "--raw=/readyz") == "ok"
    assert '"gitVersion": "v1.' in api_cluster.kubectl("get", "--raw=/version")
    stranger = api_cluster.user("dana", "team-a")
    with pytest.raises(ClusterError, match='User "dana" cannot list resource "pods"'):
        api_cluster.kubectl("get", "pods", kubeconfig=stranger)


def test_a_component_that_ends_by_itself_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_CLUSTER_LOGS", str(tmp_path))
    broken = Cluster(level="api", component_args={"kube-apiserver": ["--no-such-flag"]})
    with pytest.raises(ClusterError, match=r"kube-apiserver ended with code 1(.|\n)*unknown flag: --no-such-flag"):
        broken.start()


def test_helm_speaks_to_the_cluster(api_cluster: Cluster) -> None:
    assert "NAMESPACE" in api_cluster.helm("list", "--all-namespaces")


def test_after_a_failure_the_logs_and_the_objects_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_CLUSTER_LOGS", str(tmp_path))
    with pytest.raises(ZeroDivisionError), Cluster(level="api"):
        raise ZeroDivisionError
    [folder] = tmp_path.iterdir()
    assert {"etcd.log", "kube-apiserver.log", "events.yaml", "pods.yaml"} <= {path.name for path in folder.iterdir()}
    assert str(folder) in capsys.readouterr().err


def test_fake_nodes_run_gpu_pods_until_the_gpus_are_used_up(control_plane_cluster: Cluster) -> None:
    cluster = control_plane_cluster
    assert cluster.add_kwok_nodes(2, gpus=8) == ["kwok-0", "kwok-1"]
    four: dict[str, Any] = {"resources": {"nvidia.com/gpu": "4"}, "tolerations": [kwok.TOLERATION]}
    # Other tests of the session may have added nodes that accept any pod.
    named = [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["kwok-0", "kwok-1"]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": named}]}}
    four["affinity"] = {"nodeAffinity": required}
    cluster.apply([pods.pod(f"fake-{index}", ["true"], **four) for index in range(5)])

    def in_phase(phase: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in cluster.get("pods")["items"] if pod["status"]["phase"] == phase]

    wait_until("four of five pods to run", lambda: len(in_phase("Running")) == 4, pods.POD_TIMEOUT)
    [pending] = in_phase("Pending")
    unschedulable(cluster, pending, "2 Insufficient nvidia.com/gpu")


def test_a_restricted_pod_runs_to_completion_and_its_log_is_read_through_the_api(cluster: Cluster) -> None:
    cluster.apply(pods.python("hello", "import os; print('user', os.getuid()); open('/x', 'w')"))
    pod = pods.wait(cluster, "hello", "Failed")
    [state] = [container_status["state"]["terminated"] for container_status in pod["status"]["containerStatuses"]]
    log = cluster.kubectl("logs", "hello")
    assert state["exitCode"] == 1
    assert "user 65532\n" in log
    assert "Read-only file system" in log


def test_the_environment_of_this_machine_runs_in_a_restricted_namespace(cluster: Cluster) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.add_namespace("restricted", labels)
    mounted = environment.folders()
    volumes, mounts = environment.pod_spec(mounted)
    program = "import google.protobuf, grpc, numpy, rlhf_api; print(grpc.__version__, rlhf_api.__file__)"
    worker = pods.pod("worker", [environment.PYTHON, "-c", program], volumes=volumes, mounts=mounts)
    cluster.apply(environment.volumes(mounted, "restricted"))
    cluster.apply(worker, "--namespace=restricted")
    pods.wait(cluster, "worker", "Succeeded", namespace="restricted")
    log = cluster.kubectl("logs", "worker", "--namespace=restricted").split()
    assert log == [grpc.__version__, rlhf_api.__file__]
    forbidden = pods.pod("host", ["true"], volumes=[{"name": "all", "hostPath": {"path": "/"}}])
    with pytest.raises(ClusterError, match='violates PodSecurity "restricted'):
        cluster.apply(forbidden, "--namespace=restricted")


def test_names_of_a_headless_service_and_service_addresses_are_reached_from_a_pod(cluster: Cluster, web: str) -> None:
    program = f"""
import socket, urllib.request
print(socket.gethostbyname('{web}'))
for host in ('web-0.web', 'web-vip', '{web}'):
    print(urllib.request.urlopen(f'http://{{host}}:8000/etc/hostname', timeout={ANSWER}).read().decode().strip())
"""
    cluster.apply(pods.python("client", program))
    pods.wait(cluster, "client", "Succeeded")
    expected = cluster.get("pod", "web-0")["status"]["podIP"]
    assert cluster.kubectl("logs", "client").split() == [expected, "web-0", "web-0", "web-0"]


def test_the_host_reaches_pods_and_service_addresses(cluster: Cluster, web: str) -> None:
    pod_address = cluster.get("pod", web.split(".")[0])["status"]["podIP"]
    service_address = cluster.get("service", "web-vip")["spec"]["clusterIP"]
    for address in (pod_address, service_address):
        with urllib.request.urlopen(f"http://{address}:8000/etc/hostname", timeout=ANSWER) as answer:
            assert answer.read().decode().strip() == "web-0"


def test_exec_runs_in_a_pod_and_a_pod_reaches_its_own_service(cluster: Cluster, web: str) -> None:
    program = (
        f"import urllib.request as r; print(r.urlopen('http://web-vip:8000/etc/hostname', timeout={ANSWER}).read())"
    )
    output = cluster.kubectl("exec", web.split(".")[0], "--", "python3", "-c", program)
    assert output.strip() == r"b'web-0\n'"


def test_the_api_is_reached_from_a_pod_with_its_token(cluster: Cluster) -> None:
    program = """
import json, os, ssl, urllib.request
folder = '/var/run/secrets/kubernetes.io/serviceaccount'
request = urllib.request.Request(f"https://{os.environ['KUBERNETES_SERVICE_HOST']}/apis")
request.add_header('Authorization', 'Bearer ' + open(folder + '/token').read())
context = ssl.create_default_context(cafile=folder + '/ca.crt')
print(json.load(urllib.request.urlopen(request, timeout=60, context=context))['kind'])
"""
    cluster.apply(pods.python("api-client", program))
    pods.wait(cluster, "api-client", "Succeeded")
    assert cluster.kubectl("logs", "api-client").strip() == "APIGroupList"


def test_gpus_are_counted_on_the_real_node(cluster: Cluster) -> None:
    cluster.apply(
        [
            pods.python("eight", "print('ran')", resources={"nvidia.com/gpu": "8"}),
            pods.python("nine", "print('ran')", resources={"nvidia.com/gpu": "9"}),
        ]
    )
    pods.wait(cluster, "eight", "Succeeded")
    unschedulable(cluster, "nine", "Insufficient nvidia.com/gpu")
    cluster.kubectl("delete", "pod/eight", "pod/nine")


def test_a_container_is_told_its_gpus_and_a_broken_one_is_not_given_out(cluster: Cluster) -> None:
    cluster.set_gpus("n1", 4, unhealthy=1)
    show = "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])"
    try:
        cluster.apply(pods.python("ask-3", show, resources={"nvidia.com/gpu": "3"}))
        pods.wait(cluster, "ask-3", "Succeeded")
        assert cluster.kubectl("logs", "ask-3").strip() == "gpu-0,gpu-1,gpu-2"
        cluster.apply(pods.python("ask-4", show, resources={"nvidia.com/gpu": "4"}))  # all GPUs are free by now
        unschedulable(cluster, "ask-4", "Insufficient nvidia.com/gpu")
    finally:
        cluster.kubectl("delete", "pod/ask-3", "pod/ask-4", "--ignore-not-found")
        cluster.set_gpus("n1", 8)


def test_kubelet_restart_leaves_pods_and_gpus_alone(cluster: Cluster, web: str) -> None:
    before = cluster.get("pod", web.split(".")[0])["status"]
    log = cluster.component("device-plugin").log("device-plugin")
    registered = log.read_text().count("registered")
    cluster.component("kubelet").restart("kubelet")
    again = "the GPUs to be registered again"
    wait_until(again, lambda: log.read_text().count("registered") > registered, pods.POD_TIMEOUT)
    cluster.wait_nodes()
    after = cluster.get("pod", web.split(".")[0])["status"]
    assert [container_status["containerID"] for container_status in after["containerStatuses"]] == [
        container_status["containerID"] for container_status in before["containerStatuses"]
    ]
    # A restarted kubelet may once report its earlier state before its GPUs are registered.
    allocatable = ("node", "n1", "--output=jsonpath={.status.allocatable.nvidia\\.com/gpu}")
    wait_until("all GPUs to be given out", lambda: cluster.kubectl("get", *allocatable) == "8", pods.POD_TIMEOUT)


def test_objects_survive_the_end_of_etcd_and_api_server() -> None:
    with Cluster(level="api") as cluster:
        cluster.kubectl("create", "configmap", "kept", "--from-literal=a=b")
        for name in ("etcd", "kube-apiserver"):
            cluster.component(name).restart(name, grace=0)
        cluster.wait_ready()
        assert cluster.get("configmap", "kept")["data"] == {"a": "b"}


@pytest.mark.skipif(os.geteuid() != 0, reason=NO_ROOT)
def test_pods_of_two_nodes_reach_each_other_and_a_dead_node_is_noticed() -> None:
    quick = {"kube-controller-manager": ["--node-monitor-grace-period=6s", "--node-monitor-period=1s"]}
    with Cluster(level="node", nodes=2, gpus=0, images=[images.python()], component_args=quick) as cluster:
        program = "import http.server as h; h.HTTPServer(('', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
        cluster.apply([pods.python(name, program, nodeName=name) for name in ("n1", "n2")])
        addresses = {name: pods.wait(cluster, name, "Running")["status"]["podIP"] for name in ("n1", "n2")}
        for near, far in (("n1", "n2"), ("n2", "n1")):
            address = addresses[far]
            reached = f"{far} to answer {near}"
            wait_until(reached, partial(answers, cluster, near, (address,)), pods.POD_TIMEOUT)
            ask = f"import urllib.request as r; print(r.urlopen('http://{address}:8000/etc/hostname').read())"
            assert far in cluster.kubectl("exec", near, "--", "python3", "-c", ask)
        cluster.nodes["n2"].end()

        def unreachable() -> bool:
            taints = cluster.get("node", "n2")["spec"].get("taints", [])
            return "node.kubernetes.io/unreachable" in [taint["key"] for taint in taints]

        wait_until("node n2 to be tainted", unreachable, pods.POD_TIMEOUT)
        assert cluster.get("pod", "n1")["status"]["phase"] == "Running"
