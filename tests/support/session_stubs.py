"""A source and an engine for one weight sync, without processes: `session(Stub()).sync(Source(), lambda: VALUES)`."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rl.config.schema import SyncConfig
from mcore_rl.sync.digest import Region, content_digest, dtype_from_name, wire_digest
from mcore_rl.sync.session import WeightSync
from mcore_rl.sync.shm import Segment
from mcore_rl.types import TensorMeta

PROBE = [[1, 2, 3], [4, 5]]
VALUES = [[-1.0, -2.0], [-3.0]]


class Source:
    """Five float32 tensors filled with `value`."""

    def __init__(self, version: int = 0, value: float = 1.0) -> None:
        self.version = version
        self.tensors = {f"t{i}": torch.full((i + 1, 8), value + i) for i in range(5)}

    def metadata(self):
        return tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items())

    def held_names(self):
        return frozenset(self.tensors)

    def bucket(self, names):
        return iter([(name, self.tensors[name]) for name in names])

    def __iter__(self):
        return iter(self.tensors.items())


class Stub:
    """Keeps what it is sent, as an engine would; `fail` names the call that fails, and how."""

    name = "stub"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.fail: tuple[str, Exception] | None = None
        self.ignores: str | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail is not None and self.fail[0] == name:
            raise self.fail[1]

    def wait_ready(self):
        self._call("wait_ready")

    def layout(self):
        regions = [Region(torch.float32).as_json()]
        return {f"t{i}": {"shape": [i + 1, 8], "regions": regions} for i in range(5)}

    def attach(self, path, slot_bytes):
        self._call("attach")
        self.segment = Segment.attach(Path(path), slot_bytes)

    def begin(self):
        self.version, self.received = None, []
        self._call("begin")

    def load(self, slot, tensors):
        self._call(f"load{len(self.received)}")
        for name, dtype, shape, offset, digest in tensors:
            value = self.segment.view(slot, offset, dtype_from_name(dtype), tuple(shape))
            assert wire_digest(value) == digest
            self.received.append(name)
            if name != self.ignores:
                self.held[name] = value.clone()

    def finish(self):
        self._call("finish")
        return self.received

    def abort(self):
        self.version = None
        self._call("abort")

    def readback(self, names):
        self._call("readback")
        return {name: [content_digest(self.held[name], Region(torch.float32))] for name in names}

    def reset_prefix_cache(self):
        self._call("reset_prefix_cache")

    def score(self, token_ids):
        self._call("score")
        assert token_ids == PROBE
        return VALUES

    def commit(self, version):
        self._call("commit")
        self.version = version


def session(stub, **config):
    return WeightSync(stub, SyncConfig(**{"bucket_bytes": 64} | config), probe_sequences=PROBE)
