"""Where engines come from, and where the replacement of a lost one does: children of this run, or servers by URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mcore_rl.rollout.addresses import read_url_file
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.types import EngineDied

_POLL_S = 1.0
_WRITING_S = 2.0


class EngineSupply(Protocol):
    """Places that engines stand in. Asked by the main thread only: a child dies with the thread that started it."""

    def places(self) -> Sequence[str]:
        """The places there should be an engine at now."""
        ...

    def complaints(self) -> list[str]:
        """What the last `places` could not use, and so kept the places of before; each is said once."""
        ...

    def open(self, place: str) -> VllmEngine:
        """An engine at `place`; it may still be starting."""
        ...

    def reopen(self, place: str) -> VllmEngine | None:
        """An engine where one was lost; None while nothing answers there."""
        ...

    def wait(self, places: Sequence[str]) -> None:
        """No engine is left at `places`: block until asking again makes sense. EngineDied when it never did."""
        ...

    def advice(self) -> str:
        """What a person can do about a lost engine that is not replaced."""
        ...


class OwnedSupply:
    """Child processes, numbered from 0; a lost one is replaced by a new child at once."""

    def __init__(self, count: int, start: Callable[[int], VllmEngine]) -> None:
        """start: a new child for engine k."""
        self._count = count
        self._start = start

    def places(self) -> Sequence[str]:
        """0, 1, ..."""
        return [str(index) for index in range(self._count)]

    def complaints(self) -> list[str]:
        """None: nobody can write a wrong number."""
        return []

    def open(self, place: str) -> VllmEngine:
        """Start a child."""
        return self._start(int(place))

    def reopen(self, place: str) -> VllmEngine | None:
        """Start another."""
        return self._start(int(place))

    def wait(self, places: Sequence[str]) -> None:
        """Never needed: `reopen` always has one."""

    def advice(self) -> str:
        """It is replaced anyway."""
        return ""


class UrlSupply:
    """Servers that somebody else runs. The file of addresses is read again whenever `places` is asked."""

    def __init__(
        self, connect: Callable[[str], VllmEngine], *, urls: Sequence[str], url_file: Path | None, wait_s: float
    ) -> None:
        """urls: fixed addresses, used where there is no url_file. wait_s: how long to wait when no server is left."""
        self._connect = connect
        self._urls = list(urls)
        self._file = url_file
        self._wait_s = wait_s
        self._problem = ""
        self._untold = False

    def places(self) -> Sequence[str]:
        """The addresses of now; those of before while the file is wrong. ValueError when it is so from the beginning."""
        if self._file is None:
            return self._urls
        try:
            self._urls, self._problem = self._read(self._file), ""
        except ValueError as failure:
            if not self._urls:
                raise
            if str(failure) != self._problem:
                self._problem, self._untold = str(failure), True
        return self._urls

    def complaints(self) -> list[str]:
        """What is wrong with the file, once."""
        told = self._problem and self._untold
        self._untold = False
        return [f"{self._problem}; the addresses of before stay in force: {', '.join(self._urls)}"] if told else []

    def _read(self, file: Path) -> list[str]:
        """Read again for a moment when it is wrong: it may be in the middle of being written."""
        deadline = time.monotonic() + _WRITING_S
        while True:
            try:
                return read_url_file(file)
            except ValueError as failure:
                if str(failure) == self._problem or time.monotonic() >= deadline:
                    raise
            time.sleep(_WRITING_S / 10)

    def open(self, place: str) -> VllmEngine:
        """A link to the server; nothing is asked of it yet."""
        return self._connect(place)

    def reopen(self, place: str) -> VllmEngine | None:
        """The same address, if a server answers there again."""
        engine = self._connect(place)
        try:
            engine.health()
        except EngineDied:
            engine.close()
            return None
        return engine

    def wait(self, places: Sequence[str]) -> None:
        """Until the file changes or a server at an old address answers."""
        deadline = time.monotonic() + self._wait_s
        while time.monotonic() < deadline:
            if list(self.places()) != list(places):
                return
            for place in places:
                engine = self.reopen(place)
                if engine is not None:
                    engine.close()
                    return
            time.sleep(_POLL_S)
        raise EngineDied(f"no rollout engine is left at {', '.join(places)} and none came within {self._wait_s:.0f} s")

    def advice(self) -> str:
        """Where to write a new address, or where to start the server again."""
        return "start it again at its address" if self._file is None else f"write the address of another into {self._file}"
