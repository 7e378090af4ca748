"""A proxy in front of a vLLM server, that may answer in its place."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


class Proxy(ThreadingHTTPServer):
    """`instead(path, count)` answers the count-th request for a path (from 1), with status 200; where it is None, it goes on."""

    daemon_threads = True

    def __init__(self, upstream: str, instead: Callable[[str, int], Any]) -> None:
        """Serves at once, on a port of its own."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.instead = upstream, instead
        self.counts: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """No further answers."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self._pass_on("GET", b"")

    def do_POST(self) -> None:
        self._pass_on("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _pass_on(self, method: str, body: bytes) -> None:
        self.server.counts[self.path] += 1
        said = self.server.instead(self.path, self.server.counts[self.path])
        if said is not None:
            return self._send(200, json.dumps(said).encode())
        found = httpx.request(
            method, self.server.upstream + self.path, content=body, headers={"Content-Type": "application/json"}, timeout=100
        )
        return self._send(found.status_code, found.content)

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
