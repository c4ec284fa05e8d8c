"""Nothing remains after a stop or a crash, and no foreign process is harmed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster import images, leftovers
from tests.cluster.cluster import Cluster
from tests.cluster.fixture import NO_ROOT
from tests.cluster.leftovers import LeftoverError, start_time
from tests.cluster.machine import Machine, processes_of
from tests.cluster.processes import wait_until
from tests.cluster.slots import Addresses, State, boot_id, lock_path, try_lock

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason=NO_ROOT)

ROOT = Path(__file__).parents[2]
CRASH_TIMEOUT = 120.0  # seconds for the processes of a killed owner to end
OWNER = """
import json, sys, time
from tests.cluster import Cluster, images, pods
cluster = Cluster(level="node", images=[images.python()]).start()
cluster.apply(pods.python("sleeper", "import time; time.sleep(600)"))
pods.wait(cluster, "sleeper", "Running")
supervisors = [each.supervisor.pid for each in (cluster._processes, cluster.nodes["n1"].processes)]
print(json.dumps({"folder": str(cluster.folder), "supervisors": supervisors}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does not belong to any cluster."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def left_beside(other: Cluster, before: Machine) -> dict[str, list[str]]:
    """Return what was added since `before`, without the other cluster's own resources.

    Its links get their IPv6 routes seconds after they are up, when the kernel has checked for duplicate addresses.
    """
    its = re.compile(rf"\b{Addresses(int(other.folder.name)).bridge}(n\d+)?\b")
    left = Machine.now().left_since(before)
    ours = {kind: [line for line in lines if not its.search(line)] for kind, lines in left.items()}
    return {kind: lines for kind, lines in ours.items() if lines}


@pytest.mark.alone
@needs_root
def test_stop_leaves_nothing_behind_while_another_cluster_runs(node_cluster: Cluster) -> None:
    before = Machine.now()
    with Cluster(level="node", nodes=2) as cluster:
        slot = int(cluster.folder.name)
        addresses = Addresses(slot)
        folder, cgroup = cluster.folder, f"rlhf-cluster-{slot}-"
        assert folder != node_cluster.folder
        assert addresses.bridge in Machine.now().left_since(before)["links"]
        assert any("kubelet" in command for command in processes_of(folder, cgroup).values())
        assert "KUBE-SERVICES" in cluster.nodes["n1"].run(["iptables-save"]), "start waits for kube-proxy's rules"
    assert left_beside(node_cluster, before) == {}
    assert processes_of(folder, cgroup) == {}
    assert not folder.exists()
    node_cluster.check()
    assert node_cluster.kubectl("get", "--raw=/readyz") == "ok"


@pytest.mark.alone
@needs_root
@pytest.mark.parametrize("supervisors_too", [False, True], ids=["owner", "owner-and-supervisors"])
def test_after_a_crash_processes_end_and_the_next_start_removes_the_rest(supervisors_too: bool) -> None:
    leftovers.sweep()
    images.python()  # buildah keeps a small cache on the machine, which does not belong to the cluster
    before = Machine.now()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    document = json.loads(owner.stdout.readline())
    folder = Path(document["folder"])
    cgroup = f"rlhf-cluster-{folder.name}-"

    def sleeps() -> bool:
        return any("time.sleep(600)" in command for command in processes_of(folder, cgroup).values())

    wait_until("the program of the pod, which is Running, to begin", sleeps, CRASH_TIMEOUT)
    for pid in [owner.pid, *(document["supervisors"] if supervisors_too else [])]:
        os.kill(pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until("every process of the crashed run to end", lambda: not processes_of(folder, cgroup), CRASH_TIMEOUT)
    assert Addresses(int(folder.name)).bridge in Machine.now().left_since(before)["links"]
    with Cluster(level="api") as following:
        assert Machine.now().left_since(before) == {}
        assert following.folder == folder
    assert not folder.exists()


def test_two_clusters_of_one_user_never_share_a_slot(api_cluster: Cluster) -> None:
    with Cluster(level="api") as second:
        assert second.folder != api_cluster.folder
        assert second.server != api_cluster.server
        second.kubectl("create", "namespace", "only-here")
        assert "only-here" not in api_cluster.kubectl("get", "namespaces", "--output=name")


def test_a_sweep_ends_recorded_processes_and_no_reused_pid(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    ours = subprocess.Popen(["sleep", "600"])
    for process in (ours, sleeper):
        assert start_time(process.pid) is not None
    crashed(tmp_path, [(ours.pid, start_time(ours.pid) or 0), (sleeper.pid, (start_time(sleeper.pid) or 0) - 1)])
    assert leftovers.sweep(tmp_path) == [5]
    assert ours.wait(CRASH_TIMEOUT) == -signal.SIGKILL
    unharmed(sleeper)
    assert not tmp_path.exists()


def test_a_sweep_ends_nothing_of_an_earlier_boot(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    crashed(tmp_path, [(sleeper.pid, start_time(sleeper.pid) or 0)], boot="another boot")
    assert leftovers.sweep(tmp_path) == [5]
    unharmed(sleeper)


def test_a_sweep_leaves_a_running_instance_alone(tmp_path: Path) -> None:
    crashed(tmp_path, [])
    slot = try_lock(tmp_path, 5)
    assert slot is not None
    assert leftovers.sweep(tmp_path) == []
    assert slot.folder.exists()
    slot.leave()
    assert leftovers.sweep(tmp_path) == [5]


def test_a_state_file_cut_short_is_no_reason_to_fail(tmp_path: Path) -> None:
    crashed(tmp_path, [])
    (tmp_path / "5" / "state.json").write_text('{"boot": "x", "proce')
    assert leftovers.sweep(tmp_path) == [5]
    assert not lock_path(tmp_path, 5).exists()


def test_a_folder_is_not_deleted_through_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "5" / "volume" / "data"
    file.parent.mkdir(parents=True)
    file.write_text("kept")
    monkeypatch.setattr(leftovers, "mounts_below", lambda folder: [str(folder / "volume")])
    with pytest.raises(LeftoverError, match="has mounts in it"):
        leftovers.remove_folder(tmp_path / "5")
    assert file.read_text() == "kept"


def unharmed(process: subprocess.Popen[bytes]) -> None:
    """Assert that no SIGKILL was sent: a pending one wins over this SIGTERM."""
    process.terminate()
    assert process.wait(CRASH_TIMEOUT) == -signal.SIGTERM


def crashed(root: Path, processes: list[tuple[int, int]], boot: str | None = None) -> None:
    """Create slot 5 in the state that a crashed run leaves."""
    (root / "5").mkdir()
    State(boot=boot or boot_id(), processes=processes).write(root / "5" / "state.json")
