"""The documented commands that need only one machine run unchanged, on a real run.

Their names are those of the pages: job.yaml is a small job, RUN its folder. Invented iterations, samples and ports of a
page are replaced by those of the run, and a command that serves until Ctrl-C is interrupted.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
import yaml
from tests.support.jobs.documented_commands import ROOT, documented_commands, register
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

RUN_COMMAND: Final = "rlhf run job.yaml --set spec.iterations=5"
"""The command that creates RUN for all others."""
ITERATION: Final = 2
SAMPLE: Final = 3
"""Sample number of the run, which replaces a page's invented one."""
TIMEOUT_SECONDS: Final = 600.0
INSTANCE: Final = {
    "devices": 2,
    "pipelines": [
        {"name": "actor", "stageDevices": [0, 1], "microbatches": 3, "forward": 2, "backward": 4, "activation": 1.5},
        {"name": "critic", "stageDevices": [1, 0], "microbatches": 3, "forward": 1, "backward": 2, "activation": 1},
    ],
}
LEAVES: Final = {
    "--picture fusion.svg": "fusion.svg",
    "--write plan.yaml": "plan.yaml",
    "--to DIR": "DIR/config.json",
    "--output page": "page/index.html",
    "--parquet samples.parquet": "samples.parquet",
}
"""Option -> file that a command with it writes."""


def given_to_this_file() -> list[str]:
    """Return the commands, each once."""
    this_file = str(Path(__file__).relative_to(ROOT))
    ours = [entry for entry in register() if entry.run_by == this_file]
    found = dict.fromkeys(item.text for item in documented_commands() if any(entry.holds(item) for entry in ours))
    return list(found)


COMMANDS: Final = given_to_this_file()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which a reader types them, with the run in runs/."""
    folder = tmp_path_factory.mktemp("documented")
    manifest = write_job(folder, iterations=8, every=2)
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["samples"] = {"every": 1}
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
    (folder / "instance.json").write_text(json.dumps(INSTANCE))
    ended = typed(RUN_COMMAND, folder)
    assert ended.returncode == 0, ended.stdout[-3000:]
    return folder


def written(command: str, folder: Path) -> str:
    """Return a command as this reader types it."""
    runs = folder / "runs"
    run = min(runs.iterdir()) if runs.is_dir() else folder
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    replaced = {r"\bRUN\b": str(run), "-i 40": f"-i {ITERATION}", "-s 24": f"-s {SAMPLE}", "8080": str(port)}
    for of_page, of_run in replaced.items():
        command = re.sub(of_page, of_run, command)
    return command.partition(" | ")[0]


def started(command: str, folder: Path) -> "subprocess.Popen[str]":
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        written(command, folder).split(),
        cwd=folder,
        env=os.environ | {"PATH": path, "BROWSER": "true", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def typed(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Return how a command ended; a hanging one is ended, and fails."""
    running = started(command, folder)
    try:
        said, _ = running.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        running.kill()
    return subprocess.CompletedProcess(command, running.returncode, said)


@pytest.mark.parametrize(
    "command", [item for item in COMMANDS if ("rlhf view" not in item or "--output" in item) and item != RUN_COMMAND]
)
def test_a_command_ends_well_and_leaves_what_it_says(command: str, folder: Path) -> None:
    ended = typed(command, folder)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert ended.stdout.strip()
    for option, left in LEAVES.items():
        assert option not in command or (folder / left).is_file(), left


@pytest.mark.parametrize("command", [item for item in COMMANDS if "rlhf view" in item and "--output" not in item])
def test_a_command_that_serves_a_page_says_where_until_ctrl_c(command: str, folder: Path) -> None:
    running = started(command, folder)
    try:
        assert running.stdout is not None
        said, until = "", time.monotonic() + TIMEOUT_SECONDS
        while " is shown at http://127.0.0.1:" not in said:
            assert time.monotonic() < until, f"no address in {TIMEOUT_SECONDS:.0f} s: {said}"
            if select.select([running.stdout], [], [], 1.0)[0]:
                line = running.stdout.readline()
                assert line, said
                said += line
        running.send_signal(signal.SIGINT)
        assert running.wait(TIMEOUT_SECONDS) == 0, "Ctrl-C is a clean end"
    finally:
        running.kill()


def test_all_of_them_are_here() -> None:
    assert RUN_COMMAND in COMMANDS
    assert len(COMMANDS) > 15
