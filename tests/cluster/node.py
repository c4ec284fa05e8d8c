"""One real node: containerd, kubelet and kube-proxy in separate network, mount and PID namespaces.

Owns the node's namespaces, cable, folder and control group. Rule: inside these namespaces /run, /var/log, /var/lib,
containerd's images and the few global kernel settings that a kubelet writes are private. So mounts, iptables rules,
interfaces and container processes end with process 1 of the node, and the machine outside keeps its settings. It must
never run a component of the node outside.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from tests.cluster import images, leftovers, network_policies
from tests.cluster.control_plane import ControlPlane
from tests.cluster.faults.memory_pressure import exhaust
from tests.cluster.processes import ClusterError, Processes, wait_until
from tests.cluster.settings import ClusterSettings
from tests.cluster.slots import Slot
from tests.cluster.toolchain import binary

START_TIMEOUT = 240.0  # seconds for containerd's socket and for Ready
COMMAND_TIMEOUT = 120.0  # seconds for a command such as ip or iptables, which waits for a lock

# Kernel settings that a kubelet writes if they have another value.
# It finds these values in files bound over the real ones, and writes nothing.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}

ENTER = """
folder=$1; shift
mount --make-rshared /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs "$folder/containerd"
mount --bind "$folder/log" /var/log
mount -t tmpfs tmpfs "$folder/var-lib"
mkdir "$folder/var-lib/changes" "$folder/var-lib/work"
mount -t overlay -o "lowerdir=/var/lib,upperdir=$folder/var-lib/changes,workdir=$folder/var-lib/work" overlay /var/lib
mkdir -p /var/lib/kubelet /var/lib/cni
mount --bind "$folder/kubelet" /var/lib/kubelet
for setting in $(cd "$folder/settings" && find . -type f); do
    mount --bind "$folder/settings/$setting" "/proc/sys/$setting"
done
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link set lo up
exec "$@"
"""


class Node:
    """Node `index` (from 0) of a cluster, named n<index + 1>."""

    def __init__(self, slot: Slot, settings: ClusterSettings, control_plane: ControlPlane, index: int) -> None:
        self.name = f"n{index + 1}"
        self.index = index
        self.address = slot.addresses.node(index)
        self.folder = slot.folder / self.name
        self._slot = slot
        self._settings = settings
        self._control_plane = control_plane
        # containerd's images are in memory: they import faster, and are deleted at once even if the disk is slow.
        for item in ("log", "cni", "containerd", "kubelet", "settings", "var-lib"):
            (self.folder / item).mkdir(parents=True)
        for setting, value in KERNEL_SETTINGS.items():
            path = self.folder / "settings" / setting
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        self._make_cgroup()
        unshare = [
            "unshare",
            "--net",
            "--mount",
            "--propagation=private",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        prefix = [*unshare, "--", "sh", "-ec", ENTER, "enter", str(self.folder)]
        name = f"{self.name}-supervisor"
        self.processes = Processes(slot, self.folder / "log", prefix=prefix, name=name, recorded=False)
        self._plug_in()

    def start(self) -> None:
        """Start the node's components and import the images; `wait_ready` waits for the API server to see the node."""
        self._start_containerd()
        for archive in (images.pause(), *self._settings.images):
            self.import_image(archive)
        self._start_kubelet()
        self._start_kube_proxy()
        if self._settings.network_policies:
            self._start_enforcer()
        self._start_device_plugin()

    def set_gpus(self, count: int, unhealthy: int = 0) -> None:
        """Set `count` GPUs, the last `unhealthy` of them broken; the API server learns of it later."""
        lines = [f"gpu-{index} {'Healthy' if index < count - unhealthy else 'Unhealthy'}" for index in range(count)]
        partial = self.folder / "gpus.partial"
        partial.write_text("\n".join(lines))
        partial.replace(self._gpus)

    def import_image(self, archive: Path) -> None:
        """Import an OCI or docker archive into the node's containerd."""
        argv = ["ctr", f"--address={self._socket}", "--namespace=k8s.io", "images", "import", str(archive)]
        run(argv, timeout=300)

    def run(self, argv: Sequence[str]) -> str:
        """Run a command in the node's namespaces, for instance iptables or ctr; return its output."""
        return run(["nsenter", f"--target={self._init}", "--net", "--mount", "--pid", "--", *argv])

    def exhaust(self, container: str) -> None:
        """Limit a running container to its present memory, and let a process in it ask for more."""
        exhaust(self._slot.addresses.cgroup(self.index), container)

    def serves(self) -> bool:
        """Return whether kube-proxy has written the node's rules, which include those of service kubernetes."""
        return 'comment "default/kubernetes:https' in self.run(["iptables-save", "--table=nat"])

    def end(self) -> None:
        """End every process of the node, pods included, and remove its control group."""
        self.processes.end()
        leftovers.delete_cgroup(self._slot.addresses.cgroup(self.index))

    @property
    def _socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def _gpus(self) -> Path:
        return self.folder / "gpus"

    @property
    def _init(self) -> int:
        """Return process 1 of the node, in the host's numbering."""
        pid = self.processes.supervisor.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise ClusterError(f"node {self.name} has ended")
        return int(children[0])

    def _make_cgroup(self) -> None:
        name = self._slot.addresses.cgroup(self.index)
        self._slot.record(cgroup=name)
        for hierarchy in leftovers.cgroup_hierarchies():
            (hierarchy / name).mkdir(exist_ok=True)
            if hierarchy.name == "cpuset":  # version 1 starts empty, and a task cannot join an empty set
                for entry in ("cpuset.cpus", "cpuset.mems"):
                    (hierarchy / name / entry).write_text((hierarchy / entry).read_text())
            control = hierarchy / "cgroup.subtree_control"
            if control.exists() and hierarchy == leftovers.CGROUPS:
                available = (hierarchy / "cgroup.controllers").read_text().split()
                for group in (control, hierarchy / name / "cgroup.subtree_control"):
                    group.write_text(" ".join(f"+{item}" for item in available))

    def _plug_in(self) -> None:
        addresses = self._slot.addresses
        veth = addresses.veth(self.index)
        self._slot.record(link=veth)
        pid = str(self.processes.supervisor.pid)
        run(["ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", pid])
        run(["ip", "link", "set", veth, "master", addresses.bridge, "up"])
        inside = ["nsenter", f"--target={pid}", "--net", "ip"]
        run([*inside, "address", "add", f"{self.address}/{addresses.links.prefixlen}", "dev", "eth0"])
        run([*inside, "link", "set", "eth0", "up"])
        run([*inside, "route", "add", "default", "via", addresses.host])
        for other in range(self._settings.nodes):
            if other != self.index:
                run([*inside, "route", "add", str(addresses.pods(other)), "via", addresses.node(other)])
        run(["ip", "route", "add", str(addresses.pods(self.index)), "via", self.address, "dev", addresses.bridge])

    def _start_containerd(self) -> None:
        path = self.folder / "containerd.toml"
        path.write_text(CONTAINERD.format(folder=self.folder, pause=images.PAUSE))
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    # Routed cables rather than a bridge: pod to service to pod on one node works without br_netfilter.
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/var/lib/cni/networks",
                        "ranges": [[{"subnet": str(self._slot.addresses.pods(self.index))}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        self.processes.start("containerd", ["containerd", "--config", path])
        wait_until("containerd's socket", self._socket.exists, START_TIMEOUT, check=self.processes.check, every=0.05)

    def _start_kubelet(self) -> None:
        user = f"system:node:{self.name}"
        kubeconfig = self._control_plane.kubeconfig(f"kubelet-{self.name}", user, "system:nodes")
        (self.folder / "resolv.conf").write_text("")
        configuration = kubelet_configuration(
            self.folder,
            cgroup=self._slot.addresses.cgroup(self.index),
            dns=self._slot.addresses.host,
            authority=self._slot.folder / "pki" / "ca.crt",
        )
        path = self.folder / "kubelet.yaml"
        path.write_text(yaml.safe_dump(configuration))
        argv = [
            f"--config={path}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--cert-dir={self.folder / 'kubelet-pki'}",
            *self._settings.gates(),
            *self._settings.extra("kubelet"),
        ]
        self.processes.start("kubelet", [binary("kubelet"), *argv])

    def _start_kube_proxy(self) -> None:
        kubeconfig = self._control_plane.kubeconfig(f"kube-proxy-{self.name}", "system:kube-proxy")
        argv = [
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--cluster-cidr={self._slot.addresses.all_pods}",
            "--proxy-mode=iptables",
            "--iptables-min-sync-period=100ms",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--oom-score-adj=0",
            *self._settings.extra("kube-proxy"),
        ]
        self.processes.start("kube-proxy", [binary("kube-proxy"), *argv])

    def _start_enforcer(self) -> None:
        name = network_policies.NAME
        kubeconfig = self._control_plane.kubeconfig(f"{name}-{self.name}", name, "system:masters")
        argv = [*network_policies.arguments(kubeconfig, self.name), *self._settings.extra(name)]
        self.processes.start(name, [binary(name), *argv])
        for rule in network_policies.rules():
            self.run(rule)

    def _start_device_plugin(self) -> None:
        self.set_gpus(self._settings.gpus)
        program = Path(__file__).parent / "gpus" / "device_plugin.py"
        folder = "/var/lib/kubelet/device-plugins"  # the kubelet uses this fixed path
        self.processes.start("device-plugin", [sys.executable, program, folder, self._gpus])


def run(argv: Sequence[str], timeout: float = COMMAND_TIMEOUT) -> str:
    """Run a short command on the machine; raises ClusterError with its output if it fails."""
    done = subprocess.run(list(argv), capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def kubelet_configuration(folder: Path, *, cgroup: str, dns: str, authority: Path) -> dict[str, object]:
    """Return the kubelet's configuration file."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{folder / 'containerd.sock'}",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(authority)}},
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # the default of -999 needs CAP_SYS_RESOURCE
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "log" / "pods"),
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # The test does not depend on free space of the machine's disk.
        "evictionHard": {"memory.available": "64Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        "shutdownGracePeriod": "0s",
    }


CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-run"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]

[grpc]
  address = "{folder}/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Without CAP_SYS_RESOURCE a sandbox may not lower its score.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
