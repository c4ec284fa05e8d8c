"""Identifies the source that runs: the commit if git is available, and always a digest of its Python files.

Owns the note that `prepare` writes: a bare machine gets the working tree without git, so the note has commit and
digest.
Must say so if the sources no longer have the noted digest.
"""

import hashlib
import json
import subprocess
from pathlib import Path

FOLDERS = ("common", "api", "planner", "coordinator", "operator", "cli", "workers", "scripts")
"""Folders from which modules are imported."""
STEPS = ("tests/gpu", "tests/support")
"""Folders of the steps, and of code that they share with other tests."""
NOTE = "source.json"
"""File name in the folder of the wheels."""


def digest(root: Path) -> str:
    """Return a digest of the Python files in FOLDERS and STEPS."""
    whole = hashlib.sha256()
    for folder in (*FOLDERS, *STEPS):
        for path in sorted((root / folder).rglob("*.py")):
            whole.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:12]


def commit(root: Path) -> str | None:
    """Return the commit, with `+changes` if the working tree differs; None without git."""
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def source_of(root: Path, prepared: Path) -> str:
    """Return a description of the source."""
    found, now = commit(root), digest(root)
    if found is None and (prepared / NOTE).exists():
        note = json.loads((prepared / NOTE).read_text())
        found = note["commit"] if note["digest"] == now else f"near {note['commit']}, but with other sources"
    return f"commit {found or 'unknown'}, digest of sources {now}"
