"""`python -m rlhf_coordinator.run_page`: the page of the job in whose coordinator's container it is started.

Use it by `kubectl exec`, with `kubectl port-forward` to the same port. It ends after IDLE_SECONDS without a request.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from rlhf_common.names import Env, ExitCode
from rlhf_coordinator.run_page.server import LOOPBACK, MAX_PORT, RunPageServer

PORT: Final = 8080
"""Default port."""
IDLE_SECONDS: Final = 900.0
"""Seconds without a request after which the server ends."""


def main() -> int:
    """Serve the page until the end; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_coordinator.run_page", description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=PORT, help="of the pod, and of your machine (%(default)s)")
    port = int(parser.parse_args().port)
    run_dir = os.environ.get(Env.RUN_DIR, "")
    if not run_dir:
        return _refused(f"{Env.RUN_DIR} is not set: start this in the container of a job's coordinator", ExitCode.USAGE)
    if not 1 <= port <= MAX_PORT:
        return _refused(f"--port {port}: must be 1 to {MAX_PORT}", ExitCode.USAGE)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = RunPageServer(Path(run_dir), port)
    except OSError as error:
        said = f"--port {port}: {LOOPBACK}:{port} cannot be used in this pod ({error.strerror}): give another"
        return _refused(said, ExitCode.ADDRESS_IN_USE)
    with server:
        print(f"{run_dir} is shown at {server.url} until Ctrl-C, where port {port} is forwarded to you", flush=True)
        while not ended.wait(1.0) and server.idle_seconds < IDLE_SECONDS:
            pass
    return int(ExitCode.OK)


def _refused(words: str, code: ExitCode) -> int:
    print(words, file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
