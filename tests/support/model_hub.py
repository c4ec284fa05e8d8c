"""A model hub on loopback: as much of the API of the Hugging Face hub as an upload asks for, kept in memory."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

TOKEN: Final = "hf_writes"
COMMIT: Final = "7" * 40


@dataclass
class ModelHub:
    """What was uploaded to it."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    """By repository."""
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """Of commits."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return what is answered to a POST."""
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
        return {"errors": [], "warnings": []}  # of the card's metadata


@contextlib.contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Yield a hub that takes TOKEN alone; it ends with the block."""
    hub = ModelHub()

    class HubHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self._send(200, hub.answer(self.path, body)) if known else self._send(401, {"error": "who are you?"})

        def do_GET(self) -> None:
            self._send(200, {"id": "team/tiny", "sha": COMMIT, "siblings": []})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            sent = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
