"""A file that a command will write, checked before the command does any work.

Rule: the check never opens or creates the file.
"""

from pathlib import Path
from typing import Final

from rlhf_cli.local.errors import RunError

PICTURES: Final = (".svg", ".png")
"""File extensions of pictures that can be drawn."""


def check_output_file(option: str, path: Path, endings: tuple[str, ...] = ()) -> None:
    """Raise RunError for a path that is a folder or has no parent folder, or whose extension is not one of `endings`,
    if there are any.
    """
    if endings and path.suffix.lower() not in endings:
        raise RunError(f"{option} {path}: must end in {' or '.join(endings)}")
    if path.is_dir():
        raise RunError(f"{option} {path}: is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise RunError(f"{option} {path}: there is no folder {path.parent}; make it first, or give another")
