"""Which source runs: the commit where git is at hand, and a digest of the source tree everywhere.

Owns the note that `prepare` leaves: a bare machine gets the working tree without git, so commit and digest are noted
together. It must never name a commit there unless the sources are still those of that commit.
"""

import hashlib
import json
import subprocess
from pathlib import Path

FOLDERS = ("common", "api", "planner", "coordinator", "operator", "cli", "workers", "scripts")
"""Folders that modules are imported from."""
STEPS = ("tests/gpu", "tests/support")
"""Folders of the steps, and of what they share with other tests."""
NOTE = "source.json"
"""In the folder of the wheels."""


def digest(root: Path) -> str:
    """Return a digest over every Python file of the product and of the steps."""
    whole = hashlib.sha256()
    for folder in (*FOLDERS, *STEPS):
        for path in sorted((root / folder).rglob("*.py")):
            whole.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:12]


def commit(root: Path) -> str | None:
    """Return the commit, with `+changes` when the working tree differs; None without git."""
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def source_of(root: Path, prepared: Path) -> str:
    """Return in words which source this is."""
    found, now = commit(root), digest(root)
    if found is None and (prepared / NOTE).exists():
        note = json.loads((prepared / NOTE).read_text())
        found = note["commit"] if note["digest"] == now else f"near {note['commit']}, but with other sources"
    return f"commit {found or 'unknown'}, digest of sources {now}"
