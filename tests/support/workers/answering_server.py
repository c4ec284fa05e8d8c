"""An HTTP server on loopback that answers posted JSON with a function of the test."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[Any, Message], tuple[int, Any]]
"""(posted JSON, headers) -> (status, answer: a text is sent unchanged, all else as JSON)."""


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Yield the address of the server; it ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, sent = answer(posted, self.headers)
            body = (sent if isinstance(sent, str) else json.dumps(sent)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client may have given up
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
