"""`rlhf get, describe, logs, top, explain, suspend, resume, scale, wait` against a real API server and operator.

Most verbs run in this process, as a user types them. There are no nodes here, so pods stay Pending; test_cli_pods.py
covers logs and metrics of running pods.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.operating.job_fixture import SHARED_FILES
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

from rlhf_cli import main as command_line

ROOT = Path(__file__).parents[3]
TIMEOUT = 240.0  # seconds for any one step
NAMESPACE = "cli"
Answer = tuple[int, str, str]
Rlhf = Callable[..., Answer]


@pytest.fixture(scope="module")
def cluster(api_cluster: Cluster) -> Cluster:
    """Return the API server with the definition and one namespace."""
    api_cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
    api_cluster.add_namespace(NAMESPACE)
    return api_cluster


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator."""
    with OperatorProcess(cluster) as process:
        yield process


@pytest.fixture
def rlhf(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rlhf:
    """Return a function that runs a command line and returns (exit code, standard output, standard error)."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))

    def run(*arguments: str, program: str = "rlhf") -> Answer:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        reported = capsys.readouterr()
        return int(ended.value.code or 0), reported.out, reported.err

    return run


@pytest.fixture
def job(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the name of a job of six pods."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ppo.yaml").read_text())
    name = request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:30].rstrip("-")
    body["metadata"] = {"name": name, "namespace": NAMESPACE}
    body["spec"] |= {
        "generation": {"replicas": 2},
        "inference": {"replicas": 1},
        "training": {"parallelism": {"pipeline": 2}, "microBatchSize": 8, "template": SHARED_FILES},
    }
    cluster.apply(body)
    yield name
    cluster.kubectl("delete", "rlhfjob", name, f"-n={NAMESPACE}", "--ignore-not-found", "--wait=false")


def write_status(cluster: Cluster, name: str, status: dict[str, Any], namespace: str = NAMESPACE) -> None:
    """Write a status as an operator would."""
    patch = f"--patch={json.dumps({'status': status})}"
    cluster.kubectl("patch", "rlhfjob", name, f"-n={namespace}", "--subresource=status", "--type=merge", patch)


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    moment = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


def test_a_job_from_its_creation_to_its_suspension(
    cluster: Cluster, operator: OperatorProcess, rlhf: Rlhf, job: str
) -> None:
    where = ("-n", NAMESPACE)
    assert rlhf("wait", job, *where, "--for=phase=Starting", f"--timeout={TIMEOUT:.0f}s")[0] == 0
    code, out, _ = rlhf("get", *where)
    assert code == 0
    assert out.split()[:3] == ["NAME", "ALGORITHM", "PHASE"]
    assert "Starting" in out
    assert "\x1b" not in out
    assert NAMESPACE in rlhf("get", "-A")[1]
    assert json.loads(rlhf("get", job, *where, "-o", "json")[1])["metadata"]["name"] == job
    assert yaml.safe_load(rlhf("get", *where, "-o", "yaml")[1])["kind"] == "List"
    assert rlhf("get", job, *where, "-o", "name")[1] == f"rlhfjob.rlhf.dev/{job}\n"

    described = ("Starting: ", "Conditions", "PlanMade", "Groups", "0/2", "Pods", "generation-1", "Pending", "Events")
    code, out = 1, ""

    def whole() -> bool:
        """Return whether all is complete: events come after the status, and pods' statuses after pods."""
        nonlocal code, out
        code, out, _ = rlhf("describe", job, *where)
        return code == 0 and all(part in out for part in described)

    wait_until(f"{described} in a description", whole, TIMEOUT, every=1)
    assert out.startswith("Starting: ")
    assert f"{job}  0 of " in rlhf("top", job, *where)[1]
    assert "has logged no losses" in " ".join(rlhf("explain", job, *where)[1].split())

    assert rlhf("scale", job, *where, "generation=3", "--dry-run")[1].endswith("(dry run: nothing was changed)\n")
    assert cluster.get("rlhfjob", job, f"-n={NAMESPACE}")["spec"]["generation"]["replicas"] == 2
    assert rlhf("scale", job, *where, "generation=3", "inference=2")[1] == (
        f"{job} is scaled: generation 2 -> 3, inference 1 -> 2\n"
    )
    wait_until("the new pods", lambda: "generation-2" in rlhf("describe", job, *where)[1], TIMEOUT, every=1)
    body = cluster.get("rlhfjob", job, f"-n={NAMESPACE}", "--show-managed-fields")
    managers = {managed_field["manager"] for managed_field in body["metadata"]["managedFields"]}
    assert "kubectl-rlhf" in managers

    assert "will be suspended" in rlhf("suspend", job, *where)[1]
    code, out, _ = rlhf("wait", job, *where, "--for=condition=Suspended", f"--timeout={TIMEOUT:.0f}s")
    assert code == 0
    assert out.startswith(f"{job}: Suspended: ")
    assert rlhf("describe", job, *where)[1].startswith("Suspended")
    code, _, err = rlhf("logs", job, *where)
    assert code == 1
    assert f"{job} has no pod (Suspended" in err
    assert "is suspended already" in rlhf("suspend", job, *where)[1]
    assert "will be resumed" in rlhf("resume", job, *where)[1]
    assert rlhf("wait", job, *where, "--for=condition=Suspended=False", f"--timeout={TIMEOUT:.0f}s")[0] == 0
    # Its pods may exist again or not; the server returns an empty log of one without a node.
    code, out, err = rlhf("logs", job, *where, "--group=generation")
    assert not out
    reported = ("no log", "has no pod generation") if code else ("has written anything yet", "written nothing yet")
    assert any(item in err for item in reported)

    def ran_out() -> bool:
        """Return whether it timed out; on a busy machine the time may end before the job was read."""
        code, _, err = rlhf("wait", job, *where, "--for=iteration=1", "--timeout=2s")
        assert code == 124
        assert "iteration=1 did not come in 2s" in err
        return "; last: " in err

    wait_until("a wait that runs out to say what it saw last", ran_out, TIMEOUT)


def test_what_was_mistyped_or_cannot_be_is_said_with_a_remedy(rlhf: Rlhf, job: str) -> None:
    where = ("-n", NAMESPACE)
    code, _, err = rlhf("describe", job[:-1] + "x", *where)
    assert code == 1
    assert f"did you mean {job}" in err
    code, _, err = rlhf("suspend", job)
    assert code == 1
    assert f"in namespace default, but elsewhere: -n {NAMESPACE}" in err
    code, _, err = rlhf("scale", job, *where, "generation=9999")
    assert code == 2
    assert "spec.generation.replicas" in err
    assert rlhf("scale", job, *where, "training=3")[0] == 2
    code, _, err = rlhf("wait", job, *where, "--for=iteration=1000000")
    assert code == 2
    assert "iterations" in err
    code, _, err = rlhf("get", "--context", "other")
    assert code == 2
    assert "'other' is not in" in err
    assert "Usage: kubectl rlhf get" in rlhf("get", "--help", program="/usr/bin/kubectl-rlhf")[1]


def test_a_failed_job_ends_a_wait_with_its_code_and_is_never_changed(cluster: Cluster, rlhf: Rlhf) -> None:
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "grpo.yaml").read_text())
    body["metadata"] = {"name": "failed", "namespace": NAMESPACE}
    body["spec"]["operatorClass"] = (
        "of-nobody"  # otherwise the operator's first status and that of this test would race
    )
    cluster.apply(body)
    message = "the coordinator ended with exit code 22: prompts.jsonl cannot be read"
    write_status(
        cluster,
        "failed",
        {
            "conditions": [
                condition("Failed", "True", "BadPrompts", message),
                condition("Running", "False", "Failed", message),
            ]
        },
    )
    where = ("-n", NAMESPACE)
    code, _, err = rlhf("wait", "failed", *where, f"--timeout={TIMEOUT:.0f}s")
    assert code == 22
    assert message in err
    assert rlhf("wait", "failed", *where, "--for=condition=Failed", f"--timeout={TIMEOUT:.0f}s")[0] == 0
    assert rlhf("describe", "failed", *where)[1].startswith(f"Failed (BadPrompts): {message}.")
    for verb in ("suspend", "resume"):
        code, _, err = rlhf(verb, "failed", *where)
        assert code == 1
        assert "create a new one" in err
    cluster.kubectl("delete", "rlhfjob", "failed", f"-n={NAMESPACE}")
    assert rlhf("wait", "failed", *where, "--for=delete", f"--timeout={TIMEOUT:.0f}s")[0] == 0


def test_rights_that_lack_are_named(cluster: Cluster, rlhf: Rlhf, job: str) -> None:
    kubeconfig = str(cluster.user("alice"))
    arguments = ("-n", NAMESPACE, "--kubeconfig", kubeconfig)
    code, _, err = rlhf("get", *arguments)
    assert code == 1
    assert f"user alice may not list rlhfjobs.rlhf.dev in namespace {NAMESPACE}" in err
    assert "ClusterRole view" in err
    rule = {"apiGroups": ["rlhf.dev"], "resources": ["rlhfjobs"], "verbs": ["get", "list", "watch"]}
    meta = {"name": "jobs", "namespace": NAMESPACE}
    kind = "rbac.authorization.k8s.io"
    subject = {"kind": "User", "name": "alice", "apiGroup": kind}
    role = {"apiVersion": f"{kind}/v1", "kind": "Role", "metadata": meta, "rules": [rule]}
    ref = {"apiGroup": kind, "kind": "Role", "name": "jobs"}
    binding = {
        "apiVersion": f"{kind}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "subjects": [subject],
        "roleRef": ref,
    }
    cluster.apply([role, binding])
    wait_until("the right", lambda: rlhf("get", job, *arguments)[0] == 0, TIMEOUT)
    code, out, _ = rlhf("describe", job, *arguments)
    assert code == 0
    assert f"not shown: its pods: user alice may not list pods in namespace {NAMESPACE}" in out
    code, _, err = rlhf("suspend", job, *arguments)
    assert code == 1
    assert "user alice may not patch rlhfjobs.rlhf.dev" in err
    assert "ClusterRole edit" in err

    labels = {"rlhf.dev/job-name": job, "rlhf.dev/group": "generation", "rlhf.dev/index": "77"}
    meta_of_pod = {"name": "by-hand", "namespace": NAMESPACE, "labels": labels}
    spec = {"containers": [{"name": "worker", "image": "none"}]}
    role["rules"] = [rule, {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    cluster.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": meta_of_pod, "spec": spec}, role])
    running = {
        "name": "worker",
        "image": "none",
        "imageID": "",
        "ready": True,
        "restartCount": 0,
        "containerID": "c://1",
    }
    patch = f"--patch={json.dumps({'status': {'containerStatuses': [running]}})}"
    cluster.kubectl("patch", "pod", "by-hand", f"-n={NAMESPACE}", "--subresource=status", "--type=merge", patch)
    wait_until("the right to list pods", lambda: "pods/log" in rlhf("logs", job, *arguments)[2], TIMEOUT)
    for more in ((), ("--follow",)):
        code, _, err = rlhf("logs", job, *arguments, *more, "--index=77")
        assert code == 1
        assert f"user alice may not get pods/log in namespace {NAMESPACE}" in err


@pytest.fixture(scope="module")
def bare() -> Iterator[Cluster]:
    """Yield a separate API server, without the definition at first; it may be restarted."""
    with Cluster(level="api") as cluster:
        yield cluster


def test_a_server_without_the_definition_says_what_to_install(bare: Cluster, rlhf: Rlhf) -> None:
    code, _, err = rlhf("get", "--kubeconfig", str(bare.kubeconfig))
    assert code == 1
    assert "context test does not know RLHFJob (rlhf.dev/v1alpha1): install the operator there" in err
    assert "install the operator" in rlhf("describe", "x", "--kubeconfig", str(bare.kubeconfig))[2]


def test_a_wait_outlives_the_api_server(bare: Cluster, tmp_path: Path) -> None:
    bare.define(ROOT / "crds" / "rlhfjobs.yaml")
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "grpo.yaml").read_text())
    body["metadata"] = {"name": "lasting", "namespace": "default"}
    bare.apply(body)
    arguments = ["wait", "lasting", f"--timeout={2 * TIMEOUT:.0f}s", f"--kubeconfig={bare.kubeconfig}"]
    said = tmp_path / "said"
    with said.open("w") as output:
        command = [sys.executable, "-m", "rlhf_cli.main", *arguments]
        waiting = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until("the wait", lambda: "lasting: Pending" in said.read_text(), TIMEOUT)
        bare.component("kube-apiserver").restart("kube-apiserver", grace=0)
        bare.wait_ready()
        bare.wait_defined("rlhfjobs.rlhf.dev")
        reported = condition("Complete", "True", "AllIterationsTrained", "all 100 iterations are trained")
        write_status(bare, "lasting", {"conditions": [reported]}, "default")
        assert waiting.wait(TIMEOUT) == 0
    finally:
        waiting.kill()
    assert said.read_text().endswith("lasting: Complete: all 100 iterations are trained\n")


def test_a_server_that_does_not_answer_is_named(cluster: Cluster, rlhf: Rlhf, tmp_path: Path) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    code, _, err = rlhf("get", "--kubeconfig", str(path))
    assert code == 1
    assert "the API server https://127.0.0.1:9 (context test) cannot be reached" in err
    assert "--context" in err
