"""A model hub on this machine, with the part of the Hugging Face hub's API that uploads and downloads use.

Uploads stay in memory. Downloads read the folders of `models`, so a test may change a folder and the hub serves the
change.
"""

import base64
import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

TOKEN: Final = "hf_writes"
COMMIT: Final = "7" * 40


def etag(content: bytes) -> str:
    """Return the hash of a file's content, as in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class ModelHub:
    """The uploads and the served models of a hub."""

    address: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    """Repository -> folder that it serves."""
    private: dict[str, bool] = field(default_factory=dict)
    """Repository -> whether it is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """Messages of commits."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.private[name] = asked.get("private") or asked.get("visibility") == "private"
            return {"url": f"{self.address}/{name}", "id": name}
        if "/preupload/" in path:
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
            }
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                elif line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            repository = path.removeprefix("/api/models/").split("/commit/")[0]
            return {"commitUrl": f"{self.address}/{repository}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
        return {"errors": [], "warnings": []}  # problems of the card's metadata

    def described(self, path: str) -> dict[str, Any] | list[dict[str, Any]] | None:
        """Return the description of a served model, or the list of its files; None if the path names neither."""
        for name, folder in self.models.items():
            rest = path.removeprefix(f"/api/models/{name}")
            if rest == path:
                continue
            if not rest.startswith("/tree/"):
                return {"id": name, "sha": COMMIT, "siblings": []}
            inner = folder / rest.removeprefix("/tree/").partition("/")[2]
            files = sorted(file for file in inner.rglob("*") if file.is_file())
            listed = [
                {
                    "type": "file",
                    "path": str(file.relative_to(folder)),
                    "size": file.stat().st_size,
                    "oid": etag(file.read_bytes()),
                }
                for file in files
            ]
            return listed or None
        return None

    def file(self, path: str) -> bytes | None:
        """Return the bytes of a file of a served model; None if there is none."""
        for name, folder in self.models.items():
            begin = f"/{name}/resolve/"
            if path.startswith(begin):
                file = folder / path.removeprefix(begin).partition("/")[2]
                return file.read_bytes() if file.is_file() else None
        return None


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests from the content of one hub."""

    def __init__(self, hub: ModelHub, *request: Any) -> None:
        self._hub = hub
        super().__init__(*request)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self._send(200, self._hub.answer(self.path, body)) if authorized else self._send(401, {"error": "who are you?"})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._hub.models:
            self._send(200, {"id": "team/tiny", "sha": COMMIT, "siblings": []})
        elif path.startswith("/api/") and (found := self._hub.described(path)):
            self._send(200, found)
        else:
            self._send_file(self._hub.file(path))

    def _model(self) -> bool:
        return any(f"/{name}/" in self.path for name in self._hub.models)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_file(self, content: bytes | None) -> None:
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound" if self._model() else "RepoNotFound")
        else:
            self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if content and self.command == "GET":
            self.wfile.write(content)

    def _send(self, status: int, answer: dict[str, Any] | list[dict[str, Any]]) -> None:
        sent = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def model_hub(host: str = "127.0.0.1") -> Iterator[ModelHub]:
    """Yield a hub on an address of this machine, which ends with the block; uploads need TOKEN."""
    hub = ModelHub()

    server = ThreadingHTTPServer((host, 0), functools.partial(HubHandler, hub))
    hub.address = f"http://{host}:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
