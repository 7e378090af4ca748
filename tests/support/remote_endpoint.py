"""A sync endpoint that lives in the test's process, used from a rank of the pool: calls travel as JSON over a socket."""

from __future__ import annotations

import json
from multiprocessing.connection import Client, Listener
from threading import Thread
from typing import Any

from mcore_rl import errors


class EndpointServer:
    """Answers one client at a time with the methods of `engine`, until closed."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._listener = Listener(family="AF_UNIX")
        self.address = str(self._listener.address)
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client = self._listener.accept()
            except OSError:
                return
            try:
                while True:
                    method, args = json.loads(client.recv_bytes())
                    client.send_bytes(json.dumps(self._answer(method, args)).encode())
            except EOFError:
                client.close()

    def _answer(self, method: str, args: list[Any]) -> dict[str, Any]:
        try:
            return {"result": getattr(self._engine, method)(*args)}
        except (RuntimeError, ValueError, TypeError, LookupError, OSError) as failure:
            return {"error": str(failure), "kind": type(failure).__name__}

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.close()


class RemoteEndpoint:
    """SyncEndpoint over an EndpointServer's address."""

    name = "remote engine"

    def __init__(self, address: str) -> None:
        self._client = Client(address, family="AF_UNIX")

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            self._client.send_bytes(json.dumps([method, args]).encode())
            answer = json.loads(self._client.recv_bytes())
            if "error" in answer:
                raise vars(errors).get(answer["kind"], RuntimeError)(answer["error"])
            return answer["result"]

        return call
