"""The control plane: etcd, API server, controllers, scheduler, as processes of the calling user.

Owns their command lines and start order. Rule: everything listens on loopback or on the instance's own bridge, never on
an address of the machine, and nothing is written outside the instance's folder. All processes die with their owner
(processes.py).
"""

from __future__ import annotations

import ssl
import urllib.request
from pathlib import Path

import yaml
from tests.cluster.certificates import ClusterAuthority
from tests.cluster.processes import Processes, wait_until
from tests.cluster.settings import ClusterSettings
from tests.cluster.slots import Slot
from tests.cluster.toolchain import binary

ETCD_CLIENT, ETCD_PEER, API_PORT = 0, 1, 2  # ports of the slot, by index
START_TIMEOUT = 240.0  # seconds for one wait of a start, such as that for /readyz


class ControlPlane:
    """One etcd, one API server, and from level control-plane one controller manager and one scheduler."""

    def __init__(
        self, slot: Slot, settings: ClusterSettings, processes: Processes, authority: ClusterAuthority
    ) -> None:
        self._slot = slot
        self._settings = settings
        self._processes = processes
        self._authority = authority
        self._host = slot.addresses.host if settings.level == "node" else "127.0.0.1"
        self.server = f"https://{self._host}:{slot.addresses.port(API_PORT)}"

    def start(self) -> None:
        """Start everything of the level and wait for /readyz."""
        self._start_etcd()
        self._start_api_server()
        wait_until("the API server's /readyz", self.ready, START_TIMEOUT, check=self._processes.check, every=0.05)
        if self._settings.level != "api":
            self._start_controllers()
            self._start_scheduler()

    def ready(self) -> bool:
        """Return whether the API server answers /readyz with 200."""
        context = ssl.create_default_context(cafile=str(self._authority.certificate))
        try:
            with urllib.request.urlopen(f"{self.server}/readyz", timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kubeconfig(self, file: str, user: str, *groups: str) -> Path:
        """Return a kubeconfig for `user`; components' names have Kubernetes' bootstrap roles."""
        return self._authority.kubeconfig(file, self.server, user, groups)

    def _start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self._slot.addresses.port(ETCD_CLIENT)}"
        peer = f"http://127.0.0.1:{self._slot.addresses.port(ETCD_PEER)}"
        argv = [
            f"--data-dir={self._slot.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--quota-backend-bytes=8589934592",
            "--log-level=warn",
        ]
        self._processes.start("etcd", [binary("etcd"), *argv, *self._settings.extra("etcd")])

    def _start_api_server(self) -> None:
        addresses = self._slot.addresses
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        names += ["localhost", "127.0.0.1", addresses.host, str(addresses.services[1])]
        serving = self._authority.issue("kube-apiserver", "kube-apiserver", names=names)
        to_kubelet = self._authority.issue("kubelet-client", "kube-apiserver", ["system:masters"])
        argv = [
            f"--etcd-servers=http://127.0.0.1:{addresses.port(ETCD_CLIENT)}",
            f"--bind-address={self._host}",
            f"--advertise-address={self._host}",
            f"--secure-port={addresses.port(API_PORT)}",
            f"--tls-cert-file={serving[0]}",
            f"--tls-private-key-file={serving[1]}",
            f"--client-ca-file={self._authority.certificate}",
            f"--cert-dir={self._slot.folder / 'pki'}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self._authority.service_account_key}",
            f"--service-account-key-file={self._authority.service_account_key}",
            f"--service-cluster-ip-range={addresses.services}",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={to_kubelet[0]}",
            f"--kubelet-client-key={to_kubelet[1]}",
            "--max-requests-inflight=20000",
            "--max-mutating-requests-inflight=10000",
        ]
        if self._settings.level == "api":
            # Without controllers there are no service accounts, and loopback is no endpoint of a service.
            argv += ["--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"]
        if self._settings.runtime_config:
            argv.append(f"--runtime-config={','.join(self._settings.runtime_config)}")
        extra = [*self._settings.gates(), *self._settings.extra("kube-apiserver")]
        self._processes.start("kube-apiserver", [binary("kube-apiserver"), *argv, *extra])

    def _start_controllers(self) -> None:
        kubeconfig = self.kubeconfig("kube-controller-manager", "system:kube-controller-manager")
        argv = [
            f"--kubeconfig={kubeconfig}",
            f"--root-ca-file={self._authority.certificate}",
            f"--cluster-signing-cert-file={self._authority.certificate}",
            f"--cluster-signing-key-file={self._authority.key}",
            f"--service-account-private-key-file={self._authority.service_account_key}",
            "--use-service-account-credentials",
            f"--flex-volume-plugin-dir={self._slot.folder / 'volume-plugins'}",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=5000",
            "--kube-api-burst=5000",
        ]
        extra = [*self._settings.gates(), *self._settings.extra("kube-controller-manager")]
        self._processes.start("kube-controller-manager", [binary("kube-controller-manager"), *argv, *extra])

    def _start_scheduler(self) -> None:
        kubeconfig = self.kubeconfig("kube-scheduler", "system:kube-scheduler")
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 5000, "burst": 5000},
        }
        path = self._slot.folder / "kube-scheduler.yaml"
        path.write_text(yaml.safe_dump(configuration))
        extra = [*self._settings.gates(), *self._settings.extra("kube-scheduler")]
        self._processes.start(
            "kube-scheduler", [binary("kube-scheduler"), f"--config={path}", "--secure-port=0", *extra]
        )
