"""Folders of our container over which a template mounts nothing: the operator's own, the images' code, the system's.

Rule: pure; paths are compared as a kernel reads them, so `/etc/`, `//etc` and `/x/../etc` are one folder.
"""

import posixpath
from typing import Final

from rlhf_operator.manifests.mount_paths import RUN_PATH, USER_CODE_PATH
from rlhf_operator.manifests.pods import TERMINATION_MESSAGE

CODE_PATH: Final = "/opt/rlhf"
"""Where the images have the project and its libraries."""
_OWN: Final = {
    USER_CODE_PATH: "certificates and configuration",
    RUN_PATH: "the coordinator's run folder",
    CODE_PATH: "the code of the image; a folder of your own modules can be anywhere, named by PYTHONPATH",
    TERMINATION_MESSAGE: "the last words of the process",
}
"""Folders that are covered neither as a whole nor in part -> what they have."""
_SYSTEM: Final = (
    *("/bin", "/dev", "/lib", "/lib64", "/proc", "/sbin", "/sys"),
    *("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib"),
)
"""Folders without which no process starts; below them mounts are fine."""
_REPLACED: Final = ("/tmp", "/dev/shm")  # noqa: S108 paths inside the pod
"""Mounts of ours that a template may replace, under their own name."""


def mount_problem(path: str) -> str:
    """Return why nothing may be mounted at a path of our container; empty when something may."""
    place = posixpath.normpath(f"/{path.lstrip('/')}")
    for folder, content in _OWN.items():
        if _within(place, folder):
            return f"is the operator's own folder, with {content}: mount it elsewhere"
        if _within(folder, place):
            return f"covers {folder}, the operator's own folder, with {content}: mount it elsewhere"
    for folder in _SYSTEM:
        if _within(folder, place):
            return f"covers {folder} of the image, without which no process starts: mount it elsewhere"
    if place in _REPLACED and path != place:
        return f"is {place}, which a template replaces under that name alone: write {place}"
    return ""


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
