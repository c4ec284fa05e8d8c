"""The binaries of the cluster: built once from pinned Go modules into a cache folder, or taken from KUBEBUILDER_ASSETS.

Owns the Go module, the flags and the cache layout `~/.cache/rlhf-operator/cluster/<key>/bin`. The key covers the
module's files and the flags: a change of either rebuilds the binaries. There is one module because most of the build
time goes to shared libraries, which are compiled once if their versions agree. No prebuilt binaries are downloaded. An
interrupted build leaves a `.partial` file that the next one overwrites; a lock file keeps two runs from building at the
same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MODULE = Path(__file__).parent / "binaries"

KUBERNETES = "1.36.3"
# Without gitVersion the server reports v0.0.0, which clients refuse.
LDFLAGS = " ".join(
    ["-s", "-w"]
    + [
        f"-X k8s.io/component-base/version.{name}={value}"
        for name, value in (("gitVersion", f"v{KUBERNETES}"), ("gitMajor", "1"), ("gitMinor", KUBERNETES.split(".")[1]))
    ]
)

PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "coredns": "./coredns",  # with the plug-ins that are used: all of them need the libraries of several clouds
    "helm": "helm.sh/helm/v4/cmd/helm",
    "kube-network-policies": "sigs.k8s.io/kube-network-policies/cmd/kube-network-policies/standard",
    "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
    "promtool": "github.com/prometheus/prometheus/cmd/promtool",
    "alertmanager": "github.com/prometheus/alertmanager/cmd/alertmanager",
}
TAGS = dict.fromkeys(
    ("prometheus", "promtool", "alertmanager"), "remove_all_sd,enable_kubernetes_sd"
)  # a large part of Prometheus discovers targets in clouds
MONITOR_DEFINITIONS = ("podmonitors", "prometheusrules", "servicemonitors")
KWOK_STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-complete.yaml",
    "pod/fast/pod-delete.yaml",
)
ASSETS = ("etcd", "kube-apiserver", "kubectl")  # what a KUBEBUILDER_ASSETS folder holds by convention


class ToolchainError(RuntimeError):
    """A tool, binary or image can be neither found nor built; the message says why."""


def cache_folder() -> Path:
    """Return the folder of the pinned versions, with their binaries in `bin/`; images are beside it."""
    key = hashlib.sha256((LDFLAGS + repr(TAGS)).encode())
    for name in ("go.mod", "go.sum", "coredns/main.go"):
        key.update((MODULE / name).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return root / "rlhf-operator" / "cluster" / key.hexdigest()[:16]


def binary(name: str) -> Path:
    """Return the path of one binary, building it if necessary.

    Raises ToolchainError if `name` is unknown or missing in KUBEBUILDER_ASSETS, Go is missing, or the build fails.
    """
    if name not in PACKAGES:
        raise ToolchainError(f"no binary named {name!r}; known: {', '.join(PACKAGES)}")
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and name in ASSETS:
        path = Path(assets) / name
        if not path.is_file():
            raise ToolchainError(f"KUBEBUILDER_ASSETS={assets} holds no {name}; unset it to build {name} from source")
        return path
    path = cache_folder() / "bin" / name
    return path if path.is_file() else _build(name, path)


def require(level: str) -> None:
    """Raise ToolchainError naming everything that `level` of install.sh needs and this machine lacks."""
    command = ["sh", str(Path(__file__).with_name("install.sh")), "--check", level]
    python = {"PYTHON": sys.executable}  # the running interpreter is sufficient, whatever python3 is
    looked = subprocess.run(command, env=os.environ | python, capture_output=True, text=True, check=False)
    if looked.returncode:
        raise ToolchainError(f"{looked.stderr}tests/cluster/install.sh installs what it can")


def kwok_stages() -> list[Path]:
    """Return kwok's own descriptions of the life of fake nodes and pods, copied from its Go module into the cache."""
    return _copied("stages", "sigs.k8s.io/kwok", [f"kustomize/stage/{stage}" for stage in KWOK_STAGES])


def monitor_definitions() -> list[Path]:
    """Return the Prometheus operator's definitions of the chart's objects for it, copied from its Go module."""
    files = [f"example/prometheus-operator-crd/monitoring.coreos.com_{name}.yaml" for name in MONITOR_DEFINITIONS]
    return _copied("definitions", "github.com/prometheus-operator/prometheus-operator", files)


def _copied(name: str, dependency: str, files: Sequence[str]) -> list[Path]:
    """Return folder `name` of the cache with these files of a module that ours requires, downloading it if needed."""
    folder = cache_folder() / name
    if not folder.is_dir():
        command = [_go(), "mod", "download", "-json", dependency]
        result = subprocess.run(command, cwd=MODULE, capture_output=True, text=True, check=False)
        source = Path(json.loads(result.stdout).get("Dir", "")) if result.stdout else Path()
        if result.returncode or not all((source / file).is_file() for file in files):
            raise ToolchainError(f"{' '.join(command)} got no {' '.join(files)}: {result.stdout}{result.stderr}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        for file in files:
            shutil.copyfile(source / file, partial / Path(file).name)
        try:
            partial.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return sorted(folder.iterdir())


def _build(name: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return path
        print(f"building {name} (once; cached in {path.parent})", file=sys.stderr, flush=True)
        partial = path.with_suffix(".partial")
        command = ["nice", "-n", "15", _go(), "build", "-mod=readonly", "-trimpath", "-buildvcs=false"]
        command += ["-tags", TAGS.get(name, ""), "-ldflags", LDFLAGS, "-o", str(partial), PACKAGES[name]]
        environment = {"GOFLAGS": "-p=2"} | os.environ | {"CGO_ENABLED": "0"}
        built = subprocess.run(command, cwd=MODULE, env=environment, capture_output=True, text=True, check=False)
        if built.returncode:
            raise ToolchainError(f"building {name} failed: {' '.join(command)}\n{built.stderr[-4000:]}")
        partial.rename(path)
    return path


def _go() -> str:
    own = Path(sys.prefix) / "bin" / "go"  # make installs it there if the machine has none, or one that is too old
    result = str(own) if own.is_file() else shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if not result:
        raise ToolchainError("no Go toolchain found: `make go` gets one, or install Go 1.26 or later")
    return result
