"""Where an engine may be reached: on loopback, or elsewhere with a key.

The routes that change weights can do anything to an engine, and vLLM's own key does not guard them. So a server of ours
listens on loopback; on any other address only with MCORE_RL_ENGINE_KEY set, which every request must then carry.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "MCORE_RL_ENGINE_KEY"
GUARD = "mcore_rl.rollout.addresses.KeyGuard"
_OPEN_PATHS = ("/health",)
_NEEDED = "an address like http://127.0.0.1:8000 is needed"
_PORTS = {"http": 80, "https": 443}

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
    """ValueError naming the setting when `url` is no http://host:port, or neither loopback nor behind a key."""
    host, _, _ = _server(setting, url)
    check_address(setting, host)


def check_urls(settings: Sequence[tuple[str, str]]) -> None:
    """As check_url for every (setting, url); ValueError also where two of them name the same server."""
    known: dict[tuple[str, int, str], str] = {}
    hosts: list[tuple[str, str]] = []
    for setting, url in settings:
        host, port, path = _server(setting, url)
        server = ("127.0.0.1" if host == "localhost" else host, port, path)
        if server in known:
            raise ValueError(f"{setting}: the same server stands there twice, first as {known[server]}")
        known[server] = url
        hosts.append((setting, host))
    for setting, host in hosts:
        check_address(setting, host)


def read_url_file(path: Path) -> list[str]:
    """One address a line; blank lines and # comments are skipped. ValueError naming the line and what is wrong."""
    setting = f"rollout.url_file={path}"
    try:
        if not path.is_file():
            raise ValueError(f"{setting}: {'is no file' if path.exists() else 'no such file'}")
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # editors of some systems put a mark in front
    except OSError as failure:
        raise ValueError(f"{setting}: cannot be read: {failure.strerror}") from failure
    except UnicodeDecodeError as failure:
        raise ValueError(f"{setting}: is no UTF-8 text (byte {failure.start}): {_NEEDED} on every line") from failure
    plain = [(number, line.split("#", 1)[0].strip().rstrip("/")) for number, line in enumerate(lines, start=1)]
    named = [(f"{setting}:{number}: {url}", url) for number, url in plain if url]
    if not named:
        raise ValueError(f"{setting}: names no address; one http://host:port a line is needed")
    check_urls(named)
    return [url for _, url in named]


def _server(setting: str, url: str) -> tuple[str, int, str]:
    """Host, port and path. ValueError for what an HTTP client could not use either."""
    if any(mark.isspace() or not mark.isprintable() for mark in url):
        raise ValueError(f"{setting}: {_NEEDED}, one by itself and without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as failure:
        raise ValueError(f"{setting}: {_NEEDED} ({failure})") from failure
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or not _is_host(host) or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"{setting}: {_NEEDED}")
    return host, port or _PORTS[parts.scheme], parts.path.rstrip("/")


def _is_host(host: str) -> bool:
    if re.fullmatch(r"[A-Za-z0-9._-]+", host) and not re.fullmatch(r"[0-9.]+", host):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
