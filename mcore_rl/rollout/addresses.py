"""Where an engine may be reached: on loopback, or elsewhere with a key.

The routes that change weights can do anything to an engine, and vLLM's own key does not guard them. So a server of ours
listens on loopback; on any other address only with MCORE_RL_ENGINE_KEY set, which every request must then carry.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "MCORE_RL_ENGINE_KEY"
GUARD = "mcore_rl.rollout.addresses.KeyGuard"
_OPEN_PATHS = ("/health",)

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach `host`. A name that is no address counts as outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def engine_key() -> str:
    """The key of this environment; "" without one."""
    return os.environ.get(KEY_VARIABLE, "")


def check_address(setting: str, host: str) -> None:
    """ValueError naming the setting when `host` is not loopback and there is no key."""
    if not is_loopback(host) and not engine_key():
        raise ValueError(f"{setting}: {host} is not loopback; set {KEY_VARIABLE} for server and run, or use 127.0.0.1")


def check_url(setting: str, url: str) -> None:
    """As check_address, for http://host:port."""
    check_address(setting, urlsplit(url).hostname or "")


def key_headers() -> dict[str, str]:
    """What a request must carry."""
    return {"Authorization": f"Bearer {engine_key()}"} if engine_key() else {}


class KeyGuard:
    """ASGI middleware of a server: 401 for every route but /health without the key. For `--middleware` of vLLM's server."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        """ValueError without a key: a guard that lets everybody in would be worse than none."""
        if not engine_key():
            raise ValueError(f"{KEY_VARIABLE} is not set: there is no key to ask for")
        self._app = app
        self._expected = f"Bearer {engine_key()}".encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass on what carries the key."""
        if scope["type"] == "lifespan" or scope.get("path") in _OPEN_PATHS or self._carries_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": {"message": "the engine key is missing or wrong"}}'
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _carries_key(self, scope: _Scope) -> bool:
        found = [value for name, value in scope.get("headers", []) if name == b"authorization"]
        return len(found) == 1 and hmac.compare_digest(found[0], self._expected)
