"""The reference for a job in pods: `rlhf run` of the same manifest on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster.processes import STOP_GRACE
from tests.support.jobs import local_job
from tests.support.jobs.chaos import digest

PATIENCE = 900.0  # seconds


class Undisturbed:
    """`rlhf run` of the same job on this machine, in parallel."""

    def __init__(self, folder: Path, *options: str, **more: Any) -> None:
        """`options`: options of `rlhf run`. `more`: arguments of `write_job`."""
        self._folder, self._run = folder, folder / "run"
        manifest = local_job.write_job(folder, **more)
        module = [sys.executable, "-m", "rlhf_cli.main"]
        self._command = [*module, "run", str(manifest), f"--run-dir={self._run}", "--plain", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self._folder / "out").open("wb") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()

    def weights(self) -> str:
        """Return the digest of the actor's weights, once it is trained."""
        return digest(self.finished() / "checkpoints")

    def finished(self) -> Path:
        """Return the run folder, once it is trained."""
        assert self._process is not None
        code = self._process.wait(PATIENCE)
        assert code == 0, (self._folder / "out").read_text()[-4000:]
        return self._run
