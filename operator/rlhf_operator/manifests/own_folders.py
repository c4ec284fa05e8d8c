"""Folders of our container on which a template must not mount: the operator's, the images' code, the system's."""

import posixpath
from typing import Final

from rlhf_operator.manifests.mount_paths import RUN_PATH, USER_CODE_PATH
from rlhf_operator.manifests.pods import TERMINATION_MESSAGE

CODE_PATH: Final = "/opt/rlhf"
"""Folder of the project and its libraries in the images."""
_OWN: Final = {
    USER_CODE_PATH: "certificates and configuration",
    RUN_PATH: "the coordinator's run folder",
    CODE_PATH: "the code of the image; a folder of your own modules can be anywhere, named by PYTHONPATH",
    TERMINATION_MESSAGE: "the termination message of the process",
}
"""Folder or file that must not be covered, not even in part -> its content."""
_SYSTEM: Final = (
    *("/bin", "/dev", "/lib", "/lib64", "/proc", "/sbin", "/sys"),
    *("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib"),
)
"""Folders of the image that must not be covered as a whole; mounts below them are allowed."""
_REPLACED: Final = ("/tmp", "/dev/shm")  # noqa: S108 paths inside the pod
"""Our mounts that a template may replace at the same path."""


def mount_problem(path: str) -> str:
    """Return why nothing may be mounted at a path of our container; empty if a mount is allowed."""
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
