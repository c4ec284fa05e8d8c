"""`rlhf view`: the page of one run, served on this machine's loopback, or written as a file to store or send.

Rule: a run folder is read and never changed.
"""

import contextlib
import signal
import threading
import webbrowser
from pathlib import Path
from typing import Final

from rich.text import Text

from rlhf_cli.console import output
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import RUNS, holds_run, why_no_run
from rlhf_common.names import ExitCode
from rlhf_coordinator.run_page.document import embedded, page, plain_json
from rlhf_coordinator.run_page.run_reader import RunReader
from rlhf_coordinator.run_page.server import LOOPBACK, MAX_PORT, RunPageServer

PAGE: Final = "index.html"
DATA: Final = "run.json"


def view_run(run_dir: Path | None, *, port: int | None, browser: bool, target: Path | None) -> int:
    """Serve the page until Ctrl-C or SIGTERM, or write it. Return the exit code.

    Raises RunError for invalid options, a folder without a run, and files that cannot be written.
    """
    folder = run_dir or _newest_run()
    if not holds_run(folder):
        raise RunError(f"RUN {folder}: {why_no_run(folder)}")
    if target is not None:
        if port is not None:
            raise RunError(f"--port {port}: nothing is served with --output; leave one of them out")
        return _write(folder, target)
    if port is not None and not 1 <= port <= MAX_PORT:
        raise RunError(f"--port {port}: must be 1 to {MAX_PORT}; leave it out for a free one")
    return _serve(folder, port or 0, browser=browser)


def _serve(folder: Path, port: int, *, browser: bool) -> int:
    ended = threading.Event()
    try:
        server = RunPageServer(folder, port)
    except OSError as error:
        words = f"--port {port}: {LOOPBACK}:{port} cannot be used ({error.strerror}); leave it out for a free one"
        raise RunError(words, ExitCode.ADDRESS_IN_USE) from error
    with server:
        before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            output().print(Text(f"{folder} is shown at {server.url} until Ctrl-C"), soft_wrap=True)
            if browser:
                with contextlib.suppress(webbrowser.Error):
                    webbrowser.open(server.url)
            while not ended.wait(1.0):
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return int(ExitCode.OK)


def _write(folder: Path, target: Path) -> int:
    if target.exists() and not target.is_dir():
        raise RunError(f"--output {target}: is a file; give a folder, which is made where there is none")
    names = {PAGE, DATA, f"{PAGE}.tmp", f"{DATA}.tmp"}
    strange = [path.name for path in target.iterdir() if path.name.strip(".") not in names] if target.is_dir() else []
    if strange:
        raise RunError(f"--output {target}: holds {strange[0]!r}; give a new or empty folder")
    try:
        deltas = list(RunReader(folder).deltas())
    except OSError as error:
        raise RunError(f"RUN {folder}: cannot be read ({error})", ExitCode.STORAGE) from error
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in ((DATA, plain_json(deltas).encode()), (PAGE, page(embedded(deltas)))):
            partial = target / f".{name}.tmp"
            partial.write_bytes(content)
            partial.replace(target / name)
    except OSError as error:
        raise RunError(f"--output {target}: cannot be written ({error})", ExitCode.STORAGE) from error
    output().print(Text(f"{target / PAGE} is the page, {target / DATA} its data for programs"), soft_wrap=True)
    return int(ExitCode.OK)


def _newest_run() -> Path:
    runs = [path for path in RUNS.glob("*") if holds_run(path)]
    if not runs:
        raise RunError(f"no run in {RUNS.absolute()}; give a run folder")
    return max(runs, key=lambda path: path.stat().st_mtime)
