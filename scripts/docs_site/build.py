"""The build: sources are staged, the generator runs strictly, what it made is checked and put in place.

Rule: the site is replaced only by one that has no problem, so a build that fails leaves the earlier one. A generator
that hangs is ended after TIMEOUT.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .built_pages import problems_of
from .problems import SiteError
from .repository import Repository
from .staging import stage

TIMEOUT = 600.0
"""Seconds for the generator; three on an idle machine."""
COLORS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Built:
    """What a build made."""

    pages: int
    bytes: int


def build(root: Path, site: Path) -> Built:
    """Builds the documentation of the repository at `root` into the folder `site`.

    Raises SiteError with all that is wrong.
    """
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=site.parent) as scratch:
        folder = Path(scratch)
        stage(Repository(root), folder)
        generate(folder)
        made = folder / "site"
        # A page for what is not found can only name its parts by paths of the host, and the site may be anywhere.
        (made / "404.html").unlink(missing_ok=True)
        problems = problems_of(made)
        if problems:
            raise SiteError(problems)
        if site.exists():
            shutil.rmtree(site)
        made.rename(site)
    files = [path for path in site.rglob("*") if path.is_file()]
    return Built(sum(path.suffix == ".html" for path in files), sum(path.stat().st_size for path in files))


def generate(folder: Path) -> None:
    """Runs the generator on staged sources."""
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    environment = os.environ | {"NO_COLOR": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise SiteError([f"zensical has not built the site within {TIMEOUT:.0f} s"]) from None
    except FileNotFoundError:
        raise SiteError([f"{command[0]} is not there: `make env` installs it"]) from None
    if done.returncode or not (folder / "site" / "index.html").is_file():
        raise SiteError([COLORS.sub("", done.stdout + done.stderr)])
