"""Serves the page of a run, and deltas of the run, on this machine's loopback.

A path must begin with a random token, and Host must be 127.0.0.1 or localhost with the server's port.
"""

import http.server
import logging
import secrets
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from rlhf_coordinator.run_page.document import page, plain_json, policy
from rlhf_coordinator.run_page.run_reader import RunReader

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
MAX_PORT: Final = 65535
ANSWER_SECONDS: Final = 30.0
"""Time-out of a connection in seconds."""


class RunPageServer:
    """The page at `url`. A context manager: it serves from entry to exit."""

    def __init__(self, run_dir: Path, port: int = 0) -> None:
        """`port`: port to use, 0 for any free one. Raises OSError when it is unavailable."""
        token, reader = secrets.token_urlsafe(16), RunReader(run_dir)
        self._asked = time.monotonic()

        def answer(*arguments: Any) -> _Answer:
            self._asked = time.monotonic()
            return _Answer(reader, f"/{token}/", *arguments)

        self._server = http.server.ThreadingHTTPServer((LOOPBACK, port), answer)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="run page", daemon=True)
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/{token}/"

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last connection, or since the creation of the server."""
        return time.monotonic() - self._asked

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(ANSWER_SECONDS)


class _Answer(http.server.BaseHTTPRequestHandler):
    server_version = "rlhf"
    sys_version = ""
    timeout = ANSWER_SECONDS

    def __init__(self, reader: RunReader, root: str, *arguments: Any) -> None:
        self._reader, self._root = reader, root
        super().__init__(*arguments)

    def do_GET(self) -> None:
        name, _, port = self.headers.get("Host", "").rpartition(":")
        own = self.connection.getsockname()[1]
        if name not in (LOOPBACK, "localhost") or port != str(own):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page answers on 127.0.0.1 alone\n")
            return
        asked = urlsplit(self.path)
        if not secrets.compare_digest(asked.path[: len(self._root)].encode(), self._root.encode()):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"open the whole address that `rlhf view` printed\n")
            return
        match asked.path[len(self._root) :]:
            case "":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", page())
            case "delta":
                self._delta(parse_qs(asked.query).get("cursor", [""])[0])
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such file\n")

    def _delta(self, cursor: str) -> None:
        try:
            delta = plain_json(self._reader.delta(cursor))
        except (OSError, ValueError) as error:
            words = plain_json({"error": f"the run folder cannot be read: {error}"}).encode()
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "application/json", words)
            return
        self._send(HTTPStatus.OK, "application/json", delta.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{policy(live=True)}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""
