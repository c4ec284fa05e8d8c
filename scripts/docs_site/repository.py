"""What there is to build from: the files of the repository, and the pages among them.

Rule: it reads and never writes. Files that git ignores are not there, so what a machine has lying about changes no
site; a copy without git has all that is not in a folder that starts with a dot, or is made by the build itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from . import addresses

MADE = {"site", "runs", "dist", "__pycache__"}
"""Folders that are no part of a copy without git."""


class Repository:
    """The files below `root`, by their paths from there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = frozenset(self._listed())
        self.folders = frozenset(str(folder) for file in self.files for folder in Path(file).parents) - {"."}

    def _listed(self) -> list[str]:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        if listed.returncode == 0 and listed.stdout:
            return [name for name in listed.stdout.split("\0") if name and (self.root / name).is_file()]
        paths = (path.relative_to(self.root) for path in self.root.rglob("*") if path.is_file())
        return [str(path) for path in paths if not any(part.startswith(".") or part in MADE for part in path.parts)]

    def text(self, path: str) -> str:
        """The text of a file. ValueError when it is none."""
        return (self.root / path).read_text()

    def pages(self) -> Mapping[str, str]:
        """Path and text of every page that the site has."""
        pages = [path for path in self.files if path.startswith("docs/") and path.endswith(".md")]
        return {path: self.text(path) for path in sorted([*pages, *(set(addresses.PAGES) & self.files)])}

    def pictures(self) -> list[str]:
        """Paths of the pictures of the documentation."""
        return sorted(path for path in self.files if path.startswith("docs/") and path.endswith(addresses.PICTURES))
