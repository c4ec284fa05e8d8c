"""A tracker that is a service, in a separate process, so that its library cannot end the coordinator.

A thread passes data on from a bounded queue. After an error of the process or a full queue, the next record raises
OSError.
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
"""Folder below the run folder for the output of the services' libraries, their logs, and the ids of their runs."""
LIBRARY_FOLDERS: Final = ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
"""Variables of the process's environment that name this folder."""
QUEUED: Final = 256
"""Most queued messages."""
ANSWER_SECONDS: Final = 120.0
"""Time-out of an answer in seconds."""
FINISH_SECONDS: Final = 20.0
"""Time-out in seconds for queued data at the end of the job."""


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
        """`kind`: name of the library and of the extra; `settings`: first message to the process."""
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # a folder of that name, such as wandb leaves, is no library
            raise ModuleNotFoundError(f"there is no module {kind}: pip install 'rlhf-operator[{kind}]'")
        self._kind, self._next, self._clock = kind, next_iteration, clock
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{kind}.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 our own module, of a kind that the manifest can only choose
                [*command, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=folder,
                start_new_session=True,  # Ctrl-C is for the coordinator, which ends it; its children end with it
                env={**os.environ, **{name: str(folder.absolute()) for name in LIBRARY_FOLDERS}},
            )  # fmt: skip
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUED)
        self._asked: float | None = None
        """Moment of the request that the process has not answered yet; None without one."""
        self._failure = ""
        self._queue.put({"folder": str(folder.absolute()), **settings})
        self._thread = threading.Thread(target=self._hand_over, name=f"tracker-{kind}", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Number of messages that the process has not answered yet."""
        return self._queue.qsize() + (self._asked is not None)

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Queue the finite values, unless the iteration is below the next one to record. Raises OSError."""
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
        """Give the service FINISH_SECONDS to take the remaining data. Raises OSError."""
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
        """Run on the thread: pass items to the process one by one, until the last one, an error, or its end."""
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
