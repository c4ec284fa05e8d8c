"""The process that runs the library of a service: `python -m ...service_process wandb|mlflow`.

It reads JSON lines: the settings, then iterations and evaluations, and finally the outcome of the job. It answers each
with `ok`, or with one line about the error, which ends it.
"""

import importlib
import json
import os
import queue
import re
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

MAX_MESSAGE: Final = 500
"""Longest error message, in characters."""
END_SECONDS: Final = 30.0
"""Most seconds from the end of the input to the end of the process."""
MLFLOW_BATCH: Final = 1000
"""Most metrics in one call of MLflow's interface."""
MLFLOW_REFUSES: Final = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in the name of a metric."""


class ServiceRun(ABC):
    """A run of a service; any exception ends the process."""

    def __init__(self, kind: str, settings: Mapping[str, Any]) -> None:
        self.folder = Path(settings["folder"])
        self._file = self.folder / f"{kind}.json"
        stored = json.loads(self._file.read_bytes()) if self._file.exists() else {}
        self.run_id: str = stored.get("run", "")
        self._next: int = stored.get("next", 0)
        self.open(settings)
        self._keep()

    def record(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Record an iteration, unless this one or a later one is recorded."""
        if iteration >= self._next:
            self.log(iteration, time_ns, metrics)
            self._next = iteration + 1
            self._keep()

    def _keep(self) -> None:
        partial = self._file.with_suffix(".tmp")
        partial.write_text(json.dumps({"run": self.run_id, "next": self._next}))
        partial.replace(self._file)

    @abstractmethod
    def open(self, settings: Mapping[str, Any]) -> None:
        """Begin the run, or continue `run_id`."""

    @abstractmethod
    def log(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Send metrics at a step: the number of an iteration, or an evaluated version."""

    @abstractmethod
    def close(self, phase: str) -> None:
        """End the run with the outcome of the job."""


class WandbRun(ServiceRun):
    """Weights & Biases."""

    def open(self, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self.run_id = self.run_id or uuid.uuid4().hex
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True
        )
        self._run = wandb.init(
            project=settings["project"], entity=settings["entity"], mode=settings["mode"], id=self.run_id,
            resume="allow", name=settings["name"], tags=settings["tags"], config=settings["facts"],
            dir=str(self.folder), settings=quiet,
        )  # fmt: skip

    def log(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self, phase: str) -> None:
        self._run.finish(exit_code=0 if phase == "Complete" else 1)


class MlflowRun(ServiceRun):
    """MLflow."""

    def open(self, settings: Mapping[str, Any]) -> None:
        if settings["uri"].startswith("file:"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._client = tracking.MlflowClient(tracking_uri=settings["uri"])
        if not self.run_id:
            existing = self._client.get_experiment_by_name(settings["experiment"])
            experiment = existing.experiment_id if existing else self._client.create_experiment(settings["experiment"])
            tags = {"rlhf.dev/job": settings["name"], "rlhf.dev/algorithm": settings["tags"][0]}
            self.run_id = self._client.create_run(experiment, run_name=settings["name"], tags=tags).info.run_id
            for name, value in settings["facts"].items():
                self._client.log_param(self.run_id, name, value)
        else:
            self._client.update_run(self.run_id, status="RUNNING")

    def log(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        named = {MLFLOW_REFUSES.sub("_", name): value for name, value in metrics.items()}
        values = [self._metric(name, value, time_ns // 1_000_000, iteration) for name, value in named.items()]
        for first in range(0, len(values), MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=values[first : first + MLFLOW_BATCH])

    def close(self, phase: str) -> None:
        self._client.set_terminated(self.run_id, status="FINISHED" if phase == "Complete" else "FAILED")


RUNS: Final = {"wandb": WandbRun, "mlflow": MlflowRun}


def main() -> None:
    """Answer the lines of standard input until it ends."""
    kind = sys.argv[1]
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked, lines), daemon=True).start()
    run: ServiceRun | None = None
    while (line := lines.get()) is not None:
        message = json.loads(line)
        try:
            if run is None:
                run = RUNS[kind](kind, message)
            elif "finish" in message:
                run.close(message["finish"])
            elif "evaluation" in message:
                run.log(message["evaluation"], message["time_ns"], message["metrics"])
            else:
                run.record(message["iteration"], message["time_ns"], message["metrics"])
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            answers.write(" ".join(text.split())[:MAX_MESSAGE] + "\n")
            raise
        answers.write("ok\n")


def _read(asked: Iterable[str], lines: "queue.SimpleQueue[str | None]") -> None:
    """Run on a thread: pass on every line, and end the process END_SECONDS after the end of the input."""
    for line in asked:
        lines.put(line)
    lines.put(None)
    time.sleep(END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
