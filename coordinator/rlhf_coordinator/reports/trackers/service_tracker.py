"""A tracker that is a service, behind a process of its own: its library can neither hold up nor end the coordinator.

Rule: what is to be recorded goes into a bounded queue, from which a thread hands it to the process, one iteration at a
time, and waits for its word. `iteration` never waits. A process that died, said no, has not answered for
ANSWER_SECONDS, or is QUEUED iterations behind, is an OSError, after which `RunTrackers` gives it up. When the
coordinator dies, the process reads the end of its input and ends, too.
"""

import contextlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_coordinator.reports.trackers.tracker import Tracker

PROCESS: Final = (sys.executable, "-P", "-m", "rlhf_coordinator.reports.trackers.service_process")
FOLDER: Final = "trackers"
"""Below the run folder: what the services' libraries write, their logs, and which runs they have begun."""
LIBRARY_FOLDERS: Final = ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
"""Where libraries would write to the home folder, which a pod does not have."""
QUEUED: Final = 256
"""Iterations that wait; each is a few kilobytes."""
ANSWER_SECONDS: Final = 120.0
"""For one iteration, or the start: far beyond what a service needs that is there."""
FINISH_SECONDS: Final = 20.0
"""For what is still under way when the job is over; its end waits no longer."""


class ServiceTracker(Tracker):
    """One service. Raises ModuleNotFoundError where its library is missing, and OSError."""

    def __init__(
        self,
        kind: str,
        run_dir: Path,
        next_iteration: int,
        settings: Mapping[str, Any],
        *,
        command: Sequence[str] = PROCESS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kind`: name of the library and of the extra; `settings`: what the process is given at its start."""
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # a folder of that name, such as wandb leaves, is no library
            raise ModuleNotFoundError(f"there is no module {kind}: pip install 'rlhf-operator[{kind}]'")
        self._kind, self._next, self._clock = kind, next_iteration, clock
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{kind}.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 our own module, of a kind that the manifest can only choose
                [*command, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=folder,
                start_new_session=True,  # Ctrl-C is for the coordinator, which ends it; and its children end with it
                env={**os.environ, **{name: str(folder.absolute()) for name in LIBRARY_FOLDERS}},
            )  # fmt: skip
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUED)
        self._asked: float | None = None
        """When the process was given what it has not answered."""
        self._failure = ""
        self._queue.put({"folder": str(folder.absolute()), **settings})
        self._thread = threading.Thread(target=self._hand_over, name=f"tracker-{kind}", daemon=True)
        self._thread.start()

    @property
    def behind(self) -> int:
        """Iterations that it has not taken yet."""
        return self._queue.qsize() + (self._asked is not None)

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Queue the finite values, unless the iteration is there already. Raises OSError."""
        if iteration >= self._next:
            self._next = iteration + 1
            self._enqueue({"iteration": iteration}, time_ns, metrics)

    def evaluation(self, version: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Queue the finite values of the evaluation of the job's last version. Raises OSError."""
        self._enqueue({"evaluation": version}, time_ns, metrics)

    def _enqueue(self, number: Mapping[str, int], time_ns: int, metrics: Mapping[str, float]) -> None:
        asked = self._asked
        if not self._failure and asked is not None and self._clock() - asked > ANSWER_SECONDS:
            self._failure = f"it has not answered for {ANSWER_SECONDS:.0f} s"
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        try:
            self._queue.put_nowait({**number, "time_ns": time_ns, "metrics": values})
        except queue.Full:
            self._failure = self._failure or f"it is {QUEUED} iterations behind"
        self._refuse()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Let the service take what is left, for FINISH_SECONDS at most. Raises OSError."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait({"finish": str(summary.get("phase", ""))})
            self._queue.put_nowait(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._failure = self._failure or f"it took more than {FINISH_SECONDS:.0f} s to end"
        self._refuse()

    def _refuse(self) -> None:
        if self._failure:
            self._kill()
            raise OSError(f"{self._failure}; {FOLDER}/{self._kind}.log in the run folder has more")

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _hand_over(self) -> None:
        """Run on the thread: give the process one thing after the other, until it ends or is no good."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            while (item := self._queue.get()) is not None:
                self._asked = self._clock()
                stdin.write(json.dumps(item).encode() + b"\n")
                stdin.flush()
                answer = stdout.readline().decode(errors="replace").strip()
                self._asked = None
                if answer != "ok":
                    self._failure = self._failure or answer or "its process has ended"
                    self._kill()
                    break
            with contextlib.suppress(OSError):
                stdin.close()
        except OSError as error:
            self._failure = self._failure or f"its process has ended: {error.strerror}"
            self._kill()
        self._process.wait()
