"""A real browser for tests: Debian's Chromium, driven by the Playwright and the Node that draw the dashboards.

Rule: a missing tool never skips a test: `require` reports it and how to install it, as for the dashboards.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster.monitored.page import NODE, packages
from tests.cluster.toolchain import require

SCRIPT = Path(__file__).with_name("browser.mjs")


class Browser:
    """One page of a browser, as a context manager."""

    def __enter__(self) -> Self:
        require("nodes")
        self._folder = tempfile.TemporaryDirectory(prefix="browser-")
        folder = Path(self._folder.name)
        shutil.copyfile(SCRIPT, folder / SCRIPT.name)
        (folder / "node_modules").symlink_to(packages() / "node_modules")
        command = [str(NODE / "bin" / "node"), SCRIPT.name, str(shutil.which("chromium"))]
        self._process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def do(self, order: str, **parameters: Any) -> Any:
        """Send a command to browser.mjs and return its answer; raise AssertionError with the browser's message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": order, **parameters}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the browser ended with {self._process.poll()} at {order}"
        answer = json.loads(line)
        assert "error" not in answer, f"{order} {parameters}: {answer['error']}"
        return answer["value"]
