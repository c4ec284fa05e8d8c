"""Checks that checkpoints outlast the pods that write them, from the mounts below spec.checkpoints.path.

Rule: pure. A volume that may be suitable is accepted.
"""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.problems import Problem
from rlhf_common.names import Group
from rlhf_operator.manifests.pods import CONTAINER
from rlhf_operator.manifests.rendering import Images, pod

Json = Mapping[str, Any]

FIELD: Final = "spec.checkpoints.path"
_LOST: Final = frozenset({"emptyDir", "ephemeral"})
"""Volume sources of which every pod has its own, deleted with the pod."""
_READ_ONLY: Final = frozenset({"configMap", "secret", "projected", "downwardAPI", "image"})


def problems_of(job: RLHFJob) -> Iterator[Problem]:
    """Yield at most one problem of a resolved job's checkpoint folder; its templates must be valid."""
    if job.spec.checkpoints is None:
        return
    path = posixpath.normpath(job.spec.checkpoints.path)
    ranks = job.spec.rank_group
    remedy = f"mount a persistentVolumeClaim there in spec.{ranks}.template; the coordinator's pod gets it too"
    for group in (ranks, Group.COORDINATOR):
        if wrong := _wrong(pod(job, group, 0, Images()), path):
            yield Problem(FIELD, path, f"in {group} pods {wrong}: {remedy}")
            return


def _wrong(manifest: Json, path: str) -> str:
    """Return why writes of our container to `path` fail or are lost; empty if the manifest does not show that."""
    spec = manifest["spec"]
    [container] = [container for container in spec["containers"] if container.get("name") == CONTAINER]
    mounts = [mount for mount in container.get("volumeMounts") or [] if _within(path, str(mount.get("mountPath", "")))]
    if not mounts:
        return "nothing is mounted there, and the root file system is read-only"
    mount = max(mounts, key=lambda mount: len(str(mount["mountPath"])))
    place = mount["mountPath"]
    volume: Json = next((volume for volume in spec["volumes"] if volume.get("name") == mount.get("name")), {})
    if lost := _LOST & volume.keys():
        return f"{place} is an {next(iter(lost))} volume, which each pod has for itself and which ends with the pod"
    claim = volume.get("persistentVolumeClaim") or {}
    if mount.get("readOnly") or claim.get("readOnly") or _READ_ONLY & volume.keys():
        return f"{place} is mounted read-only"
    return ""


def _within(path: str, folder: str) -> bool:
    folder = posixpath.normpath(folder)
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
