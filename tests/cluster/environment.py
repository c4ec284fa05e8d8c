"""This machine's Python environment inside pods, through static volumes.

Pure except for looking up this interpreter's folders. Worker images with torch are several GB; a pod that mounts the
environment read-only at its own path runs the same code from a small image. Rule: use a claim on a static volume and
never a hostPath in a pod, which the restricted Pod Security level forbids.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = f"{sys.prefix}/bin/python"


def folders() -> dict[str, Path]:
    """Return volume name -> folder: the outermost folders that this interpreter needs to import the project."""
    wanted = {"interpreter": Path(sys.base_prefix), "checkout": ROOT, "environment": Path(sys.prefix)}
    return {
        name: path
        for name, path in wanted.items()
        if not any(path.is_relative_to(other) for other in wanted.values() if other != path)
    }


def volumes(mounted: Mapping[str, Path], namespace: str = "default", *, writable: bool = False) -> list[dict[str, Any]]:
    """Return a PersistentVolume and a claim bound to it for each folder; a volume belongs to one namespace."""
    mode = "ReadWriteMany" if writable else "ReadOnlyMany"
    objects = []
    for name, path in mounted.items():
        volume = f"{namespace}-{name}"
        size = {"storage": "1Gi"}  # required, but not enforced on a hostPath
        spec = {"accessModes": [mode], "storageClassName": ""}
        objects += [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": spec | {"capacity": size, "hostPath": {"path": str(path), "type": "Directory"}},
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": spec | {"volumeName": volume, "resources": {"requests": size}},
            },
        ]
    return objects


def base_packages() -> dict[str, Any]:
    """Return a mount of this machine's packages as those of a Debian base image, after the image's own.

    It provides torch, which the images of workers omit here. Needs the volumes of `folders`.
    """
    packages = Path(sysconfig.get_path("purelib"))
    name, folder = next((name, path) for name, path in folders().items() if packages.is_relative_to(path))
    place = f"/usr/local/lib/python3.{sys.version_info.minor}/dist-packages"
    return {"name": name, "mountPath": place, "subPath": str(packages.relative_to(folder)), "readOnly": True}


def pod_spec(
    mounted: Mapping[str, Path], *, writable: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return `volumes` of a pod and `volumeMounts` of its containers that mount each folder at its own path."""
    claims = [
        {"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": not writable}} for name in mounted
    ]
    mounts = [{"name": name, "mountPath": str(path), "readOnly": not writable} for name, path in mounted.items()]
    return claims, mounts
