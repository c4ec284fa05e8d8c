"""`scripts/gpu-check prepare`: downloads the wheels that a bare machine lacks, on a machine with network.

Rule: versions are those of uv.lock, one each, checked against its hashes. Existing wheels are not downloaded again,
and unneeded ones are removed. kopf and the Kubernetes client, which the steps do not need, are left out.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from gpu_check.source import NOTE, commit, digest

PROJECT = "rlhf-operator"
EXTRAS = ("coordinator", "cli", "workers", "megatron")
"""Extras of the project that a job on one machine uses."""
BESIDES = ("cryptography", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
"""Packages for the certificates of a local job, for the steps and for the unit tests."""
NEVER = frozenset({"kopf", "kubernetes", "torch"})
"""Packages that are never included: the first two are for the operator; torch comes with the rented machine."""
LIMIT_MEGABYTES = 45
"""Maximum size of the wheels in MB, so that they and the working tree fit into 64 MiB."""
DISPENSABLE = {
    "numba": "schedules are searched in Python, which looks at fewer",
    "ortools": "nothing is proven about schedules, and some come out longer",
    "matplotlib": "runs draw no pictures",
    "tensorboard": "runs write no TensorBoard files",
    "hypothesis": "the unit tests do not run",
}
"""Optional packages -> effect of leaving them out. If the wheels are too large, the first are left out first."""
NEWEST_GLIBC, OLDEST_GLIBC = 39, 5
"""Range of minor versions of glibc 2 for wheels: Ubuntu 24.04, which has Python 3.12, has the newest."""
GENERATED = {
    "protobuf": ("common/rlhf_common/control_pb2.py", r"Protobuf Python Version: ([\d.]+)"),
    "grpcio": ("common/rlhf_common/control_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
}
"""Generated code that rejects an older library at import."""


def prepare(root: Path, folder: Path, python: str, have_file: Path) -> int:
    """Fill `folder` with wheels and a note about them; return 0 if they are within the size limit."""
    packages = locked(tomllib.loads((root / "uv.lock").read_text()), python)
    have, tags, wheels = read_have(have_file), tags_of(python), folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    fetched = {name: fetch(root, packages[name], tags, python, wheels) for name in needed(packages, python, have)}
    for name, lost in DISPENSABLE.items():
        if name not in fetched or megabytes(fetched) <= LIMIT_MEGABYTES:
            continue
        have |= {name}
        fetched = {package: fetched[package] for package in needed(packages, python, have)}
        sys.stdout.write(f"          left out, as all would be too large: {name}; without it {lost}\n")
    for stale in set(wheels.iterdir()) - set(fetched.values()):
        stale.unlink()
    note = {"commit": commit(root), "digest": digest(root), "python": python, "minimum": minimum(root, fetched)}
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    return show(folder, fetched, python)


def read_have(path: Path) -> frozenset[str]:
    """Return the package names in a list of packages."""
    lines = (re.split(r"[#=<>!~ @]", line, maxsplit=1)[0].strip() for line in path.read_text().splitlines())
    return frozenset(canonicalize_name(line) for line in lines if line)


def locked(lock: Mapping[str, Any], python: str) -> dict[str, Mapping[str, Any]]:
    """Return the package of each name that uv.lock selects for a version of Python."""
    chosen: dict[str, Mapping[str, Any]] = {}
    for package in lock["package"]:
        if any(holds(marker, python) for marker in package.get("resolution-markers", [""])):
            chosen[package["name"]] = package
    return chosen


def holds(marker: str, python: str) -> bool:
    """Return whether a marker holds on Linux with that Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_python_implementation": "CPython", "platform_machine": "x86_64", "extra": ""}
    return not marker or Marker(marker).evaluate(environment)


def needed(packages: Mapping[str, Mapping[str, Any]], python: str, have: frozenset[str]) -> list[str]:
    """Return the packages that the project needs and the machine lacks.

    Packages on the machine are assumed to have their dependencies.
    """
    project = packages[PROJECT]
    queue = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    queue += [{"name": name} for name in BESIDES]
    found: set[str] = set()
    while queue:
        wanted = queue.pop()
        name = wanted["name"]
        if name in found or name in have | NEVER | {PROJECT} or not holds(wanted.get("marker", ""), python):
            continue
        found.add(name)
        queue += packages[name].get("dependencies", [])
    return sorted(found)


def tags_of(python: str) -> list[Tag]:
    """Return the tags of wheels that run on Linux x86-64 with that Python, best first."""
    version = tuple(int(part) for part in python.split("."))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    interpreter = f"cp{python.replace('.', '')}"
    return [*cpython_tags(version, [interpreter], platforms), *compatible_tags(version, interpreter, platforms)]


def choose(package: Mapping[str, Any], tags: Sequence[Tag]) -> tuple[str, str]:
    """Return file name and sha256 of the package's best wheel. Raises SystemExit if no wheel runs there."""
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    able: list[tuple[int, str, str]] = []
    for wheel in package.get("wheels", []):
        file = wheel["url"].rpartition("/")[2]
        rank = min((ranks[tag] for tag in parse_wheel_filename(file)[3] if tag in ranks), default=None)
        if rank is not None:
            able.append((rank, file, wheel["hash"].removeprefix("sha256:")))
    if not able:
        raise SystemExit(
            f"gpu-check: {package['name']} {package['version']} has no wheel for that Python on Linux x86-64"
        )
    _, file, sha256 = min(able)
    return file, sha256


def fetch(root: Path, package: Mapping[str, Any], tags: Sequence[Tag], python: str, folder: Path) -> Path:
    """Return the wheel of a package; download it if missing. Raises SystemExit unless it has uv.lock's hash."""
    file, sha256 = choose(package, tags)
    path = folder / file
    if not path.exists():
        platforms = sorted({tag.platform for tag in parse_wheel_filename(file)[3]} - {"any"})
        command = [*pip(root), "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        command += ["--python-version", python, "--implementation", "cp"]
        command += [part for platform in platforms for part in ("--platform", platform)]
        subprocess.run([*command, f"{package['name']}=={package['version']}"], check=True)
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise SystemExit(f"gpu-check: {path} is not the file that uv.lock names; remove it and try again")
    return path


def pip(root: Path) -> list[str]:
    """Return the command for pip: this Python's own, or else that of uv, of the machine or of the tree (`make env`)."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "pip"]
    uvx = shutil.which("uvx", path=f"{os.environ.get('PATH', os.defpath)}:{root / '.uv' / 'bin'}")
    if uvx is not None:
        return [uvx, "pip"]
    raise SystemExit("gpu-check: prepare needs pip (python3 -m pip) or uv (`make env` gets it), and neither is there")


def minimum(root: Path, fetched: Mapping[str, Path]) -> dict[str, str]:
    """Return the oldest version of each included package that generated code and the other packages accept."""
    lowest: dict[str, str] = {}
    for name, (file, pattern) in GENERATED.items():
        found = re.search(pattern, (root / file).read_text())
        if found is None:
            raise SystemExit(f"gpu-check: {file} names no version by {pattern!r}")
        lowest[name] = found[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    texts += [each for each in extras["dev"] if Requirement(each).name in BESIDES]
    for wheel in fetched.values():
        texts += [text for text in requirements_of(wheel) if "extra ==" not in text]
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        for bound in requirement.specifier:
            if name in fetched and bound.operator in (">=", "~=", "==") and older(lowest.get(name, "0"), bound.version):
                lowest[name] = bound.version
    return {name: version for name, version in sorted(lowest.items()) if name in fetched}


def older(version: str, than: str) -> bool:
    """Return whether `version` is older than `than`."""
    from packaging.version import Version

    return Version(version) < Version(than.removesuffix(".*"))


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def megabytes(wheels: Mapping[str, Path]) -> float:
    """Return the total size in MB."""
    return sum(path.stat().st_size for path in wheels.values()) / 1e6


def show(folder: Path, fetched: Mapping[str, Path], python: str) -> int:
    """Print the wheels with their sizes, largest first; return 1 if they exceed the size limit, else 0."""
    sizes = sorted(((path.stat().st_size / 1e6, path.name) for path in fetched.values()), reverse=True)
    for size, name in sizes:
        sys.stdout.write(f"{size:8.2f} MB  {name}\n")
    total = megabytes(fetched)
    sys.stdout.write(f"{total:8.2f} MB  in all, for Python {python}, in {folder}\n")
    if total > LIMIT_MEGABYTES:
        sys.stdout.write(
            f"gpu-check: more than {LIMIT_MEGABYTES} MB: a machine that takes 64 MiB in all takes no more\n"
        )
        return 1
    return 0
