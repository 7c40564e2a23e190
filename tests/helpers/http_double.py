"""An HTTP server with chosen answers, for tests of what reads other processes.

What lives here: the server. What must not: what any process answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

#: An answer: bytes as they are, and everything else as JSON; or a function of the request's body that returns it.
Page = Any


class HttpDouble:
    """Answers with pages by path, and 404 elsewhere. date_off_s: how far its clock is ahead. status: of its answers."""

    def __init__(self, pages: Mapping[str, Page], *, date_off_s: float = 0.0, status: int = 200) -> None:
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(b"")

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, sent: bytes) -> None:
                page = double.pages.get(self.path)
                if callable(page):
                    page = page(json.loads(sent) if sent else None)
                body = page if isinstance(page, bytes) else json.dumps(page).encode()
                self.send_response(404 if page is None else status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate((timestamp or time.time()) + date_off_s, usegmt=True)

            def log_message(self, *_: object) -> None:
                pass

        self.pages = dict(pages)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
