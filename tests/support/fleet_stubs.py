"""Engines of stubs, as children and as servers, behind a fleet and a weight sync."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from mcore_rl.config.schema import SyncConfig
from mcore_rl.rollout.fleet import Fleet
from mcore_rl.rollout.sampling import sample_seed
from mcore_rl.rollout.supply import OwnedSupply, UrlSupply
from mcore_rl.sync.digest import Region, content_digest, dtype_from_name
from mcore_rl.sync.session import WeightSync
from mcore_rl.sync.shm import Segment
from mcore_rl.types import Completion, EngineDied, Prompt, SamplingParams, StaleRollout, TensorMeta

SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), samples_per_prompt=2, seed=5)
PROMPTS = [Prompt(f"p{i}", (1, 2, i), "", "") for i in range(7)]
PROBE = [[1, 2, 3], [4, 5]]
VALUES = [[-1.0, -2.0], [-3.0]]


class Engine:
    """An engine that samples its seed, holds what it is sent, and dies when told."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.closed = name, None, False
        self.asked: list[list[str]] = []
        self.emptied: list[tuple[int, int | None]] = []  # tensors received and version, whenever the prefix cache was emptied
        self.held: dict[str, torch.Tensor] = {}
        self.dies_in: str | None = None
        self.wrong = False

    def _step(self, call: str) -> None:
        if self.dies_in == call:
            self.dies_in = "everything"
        if self.dies_in == "everything":
            raise EngineDied(f"{self.name} died during '{call}'")

    def wait_ready(self):
        self._step("wait_ready")

    def same_process(self):
        self._step("same_process")

    def generate(self, prompts, sampling):
        self.asked.append([prompt.prompt_id for prompt in prompts])
        if self.version is None:
            raise StaleRollout(f"{self.name} holds no proved weights")
        self._step("generate")
        return [
            Completion(p.prompt_id, i, p.token_ids, (sample_seed(sampling.seed, p.prompt_id, i) % 1000,), (-1.0,), "stop", 0)
            for p in prompts
            for i in range(sampling.samples_per_prompt)
        ]

    def layout(self):
        return {f"t{i}": {"shape": [i + 1, 8], "regions": [Region(torch.float32).as_json()]} for i in range(5)}

    def attach(self, path, slot_bytes):
        self._step("attach")
        self.segment = Segment.attach(Path(path), slot_bytes)

    def begin(self):
        self.version, self.received = None, []
        self._step("begin")

    def load(self, slot, tensors):
        for name, dtype, shape, offset, _ in tensors:
            self._step(f"load {name}")
            self.received.append(name)
            self.held[name] = self.segment.view(slot, offset, dtype_from_name(dtype), tuple(shape)).clone()

    def finish(self):
        self._step("finish")
        return self.received

    def abort(self):
        self._step("abort")
        self.version = None

    def readback(self, names):
        self._step("readback")
        held = {**self.held, "t2": torch.zeros(3, 8)} if self.wrong else self.held
        return {name: [content_digest(held[name], Region(torch.float32))] for name in names}

    def reset_prefix_cache(self):
        self._step("reset_prefix_cache")
        self.emptied.append((len(self.received), self.version))

    def score(self, token_ids):
        self._step("score")
        return VALUES

    def commit(self, version):
        self._step("commit")
        self.version = version

    def health(self):
        self._step("health")

    def close(self):
        self.closed = True


TENSORS = {f"t{i}": torch.full((i + 1, 8), 1.0 + i) for i in range(5)}


class Source:
    version = 3

    def metadata(self):
        return tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items())

    def held_names(self):
        return frozenset(TENSORS)

    def bucket(self, names):
        return iter([(name, TENSORS[name]) for name in names])


class Made:
    """An owned fleet over stubs; `engines` are all that were ever started."""

    def __init__(self, count: int, max_restarts: int = 3) -> None:
        self.engines: list[Engine] = []
        self.threads: list[threading.Thread] = []
        self.fleet = Fleet(OwnedSupply(count, self._start), max_restarts=max_restarts)
        self.sync = WeightSync(self.fleet, SyncConfig(bucket_bytes=64), probe_sequences=PROBE)

    def _start(self, index):
        self.threads.append(threading.current_thread())
        self.engines.append(Engine(f"engine{index}.{len(self.engines)}"))
        return self.engines[-1]

    def synced(self):
        self.sync.sync(Source(), lambda: VALUES)
        return self

    def recover(self):
        """What the run does after a death."""
        assert self.fleet.survives()
        lines = self.fleet.refresh()
        self.sync.renew()
        report = self.sync.sync(Source(), lambda: VALUES)
        assert report.readback_tensors == report.tensors
        return lines


class Servers:
    """Addresses that answer, and a fleet over a file of addresses."""

    def __init__(self, folder, *names, wait_s=0.2) -> None:
        self.up = set(names)
        self.made: list[Engine] = []
        self.file = folder / "servers.txt"
        self.write(*names)
        self.fleet = Fleet(UrlSupply(self._connect, urls=[], url_file=self.file, wait_s=wait_s), max_restarts=5)
        self.sync = WeightSync(self.fleet, SyncConfig(bucket_bytes=64), probe_sequences=PROBE)
        self.sync.sync(Source(), lambda: VALUES)

    def write(self, *names):
        self.file.write_text("# engines of this run\n" + "\n".join(f"{name}/" for name in names) + "\n")

    def _connect(self, url):
        engine = Engine(url)
        engine.dies_in = None if url in self.up else "everything"
        self.made.append(engine)
        return engine

    def kill(self, name):
        self.up.discard(name)
        for engine in self.made:
            if engine.name == name:
                engine.dies_in = "everything"

    def names(self):
        return [engine.name for engine in self.fleet.members]


def expected():
    return [(p.prompt_id, i, (sample_seed(5, p.prompt_id, i) % 1000,)) for p in PROMPTS for i in range(2)]


def drawn(completions):
    return [(c.prompt_id, c.sample_index, c.token_ids) for c in completions]
