"""Trivial processes of a local run: they run until they are stopped, or until they exit."""

import sys
from pathlib import Path

from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_common.names import Group

FOREVER = "import time\nwhile True: time.sleep(0.05)"
STOPS = (
    "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('ready', flush=True)\n"
    "while True: time.sleep(0.01)"
)
EXITS = "import time; time.sleep({seconds}); raise SystemExit({code})"


def process(folder: Path, name: str, code: str, cores: frozenset[int] | None = None) -> LocalProcess:
    """Return a process `<group>-<index>` or `coordinator` that runs `code`, with its log below `folder`."""
    group = Group(name.partition("-")[0])
    return LocalProcess(
        name, group, (sys.executable, "-S", "-c", code), {}, folder, folder / "logs" / f"{name}.log", cores
    )
