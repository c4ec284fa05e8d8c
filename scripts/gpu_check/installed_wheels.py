"""Unpacks the prepared wheels that a machine needs into a separate folder, next to its installed packages.

Rule: standard library only, no pip, no network; never changes installed packages. A wheel that fits this Python is used
if the machine lacks the package, or has a version older than the project accepts. A new enough installed version stays
in use.
"""

import importlib.metadata
import json
import re
import sys
import zipfile
from pathlib import Path

from gpu_check.source import NOTE

DATA = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/(.+)$")
OTHER_DATA = re.compile(r"^[^/]+\.data/")
"""Scripts and headers, which no module imports."""


def install(prepared: Path, site: Path) -> list[str]:
    """Unpack the needed wheels into `site`; return descriptions of these, and of needed ones that do not fit."""
    wheels = sorted((prepared / "wheels").glob("*.whl"))
    if not wheels:
        return []
    note = json.loads((prepared / NOTE).read_text())
    done = []
    for wheel in wheels:
        name, version, tags = wheel.stem.split("-")[0], wheel.stem.split("-")[1], wheel.stem.split("-")[-3]
        name = re.sub(r"[-_.]+", "-", name).lower()
        installed = installed_version(name)
        if installed is not None and numbers(installed) >= numbers(note["minimum"].get(name, "0")):
            continue
        if not fits(tags, wheel.stem):
            done.append(f"{name} {version} was brought for Python {note['python']} and does not fit this one")
        else:
            unpack(wheel, site)
            done.append(f"{name} {version} was brought" + (f", {installed} is too old" if installed else ""))
    return done


def installed_version(name: str) -> str | None:
    """Return the version of a package of this Python; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparing releases."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def fits(python_tags: str, stem: str) -> bool:
    """Return whether a wheel with those Python tags runs on this Python."""
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return any(tag.startswith("py") or tag == mine or "-abi3-" in stem for tag in python_tags.split("."))


def unpack(wheel: Path, site: Path) -> None:
    """Unpack the importable files and the package's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            found = DATA.match(member.filename)
            if found:
                member.filename = found[1]
            elif OTHER_DATA.match(member.filename):
                continue
            archive.extract(member, site)
