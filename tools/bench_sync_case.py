"""One trainer rank of `bench_sync.py` (two of them, EP=2): python tools/bench_sync_case.py CHECKPOINT TMPFS FOLDER ROUNDS.

Rank 0 owns the engine. Rounds go floor, sync, files, in turns; then full read-backs. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from bench_convert_case import VOCAB
from safetensors.torch import save_file

from mcore_rl.config.schema import DType, RolloutConfig, SyncConfig
from mcore_rl.guard import die_with_parent
from mcore_rl.policy_weights import PolicyWeights
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.sync import stream
from mcore_rl.sync.buckets import plan_buckets
from mcore_rl.sync.digest import wire_digest
from mcore_rl.sync.endpoint import SyncEndpoint
from mcore_rl.sync.engine_side import Asked, EngineSide
from mcore_rl.sync.proof import ProbeResult
from mcore_rl.sync.session import WeightSync
from mcore_rl.sync.shm import SLOTS, Segment
from models.build import BuildOptions, build_model, forward_packed
from models.registry import read_spec
from models.router import router_pass
from models.weights import ModelWeights, load_hf_weights
from parallel.collectives import gather_builtins, on_rank0
from parallel.groups import initialize_groups
from parallel.layout import ParallelLayout
from parallel.packing import pack_micro_batch
from parallel.runtime import start_runtime

MARK = "BENCH "
PROBE = [[(row * 977 + place * 131) % VOCAB for place in range(16)] for row in range(4)]
BUCKET_BYTES = 256 * 1024**2  # three layers
NEVER = 10**9  # one tensor is read back
KINDS = {"unproved": NEVER, "sync": NEVER, "sync_sampled": SyncConfig().readback_every}
EXTENSION = "bench_sync_worker.BenchExtension"


@dataclass
class Figures:
    """Seconds per kind of round, the stages of the syncs, bytes of extra anonymous memory per process in a whole sync and of
    all ranks together while buckets are written."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    stages: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    extra_bytes: dict[str, float] = field(default_factory=dict)
    sending_bytes: float = 0.0

    def timed(self, kind: str, work: Callable[[], object]) -> None:
        """Run `work` on all ranks at once; its seconds are those until the last one is done."""
        dist.barrier()
        started = time.perf_counter()
        work()
        dist.barrier()
        self.seconds.setdefault(kind, []).append(time.perf_counter() - started)
        if dist.get_rank() == 0:
            print(f"{kind:20s} {self.seconds[kind][-1]:6.2f} s", file=sys.stderr, flush=True)  # stdout is the parent's


class Trainer:
    """This rank's share of the model in bfloat16, and its log-probs of the probe."""

    def __init__(self, checkpoint: Path) -> None:
        self.groups = initialize_groups(ParallelLayout(world=2, ep=2), seed=0)
        spec = read_spec(checkpoint)
        self.chunks = build_model(spec, self.groups, BuildOptions(dtype=torch.bfloat16))
        load_hf_weights(self.chunks, spec, self.groups, checkpoint)
        self.weights = PolicyWeights(ModelWeights(self.chunks, spec, self.groups), lambda: 0)
        mine = PROBE[dist.get_rank() :: dist.get_world_size()]
        self._row = pack_micro_batch([torch.tensor(row) for row in mine], range(len(mine)), multiple=1)

    @torch.no_grad()
    def probe(self) -> list[list[float]]:
        """Each rank scores its share of the rows, as a policy on two data-parallel ranks does."""
        row = self._row
        with router_pass(self.chunks, "probe", torch.ones(row.num_tokens, dtype=torch.bool)):
            logits = forward_packed(self.chunks[0], row.token_ids, row.cu_seqlens, row.max_len)[:, :VOCAB]
        found = logits.float().log_softmax(-1)[:-1].gather(-1, row.token_ids[1:, None])[:, 0].split(len(PROBE[0]))
        shares = gather_builtins([part[: len(PROBE[0]) - 1].tolist() for part in found])
        return [shares[index % len(shares)][index // len(shares)] for index in range(len(PROBE))]

    def held(self) -> dict[str, torch.Tensor]:
        """What this rank would write."""
        return dict(self.weights.bucket([meta.name for meta in self.weights.metadata()]))


def no_digest(_: torch.Tensor) -> str:
    """Of a sync that is not proved: the engine says the same."""
    return ""


class Unproved(EngineSide):
    """Closes the update and asks nothing."""

    def ask(self, endpoint: SyncEndpoint) -> None:
        """As without a proof."""
        endpoint.finish()


class BenchSync(WeightSync):
    """A sync whose digests, probe and read-back can be left out, to see what they cost."""

    proved = True
    sent = Event()

    @property
    def segment_bytes(self) -> int:
        """Of the shared segment, both slots."""
        return 0 if self._channel is None else SLOTS * self._channel.segment.slot_bytes

    def show(self, proved: bool) -> None:
        """Collective: prove from now on, or not."""
        self.sent.clear()
        self.proved, stream.wire_digest = proved, wire_digest if proved else no_digest
        if isinstance(self._engine, VllmEngine):
            self._engine.link.rpc("mcore_bench_digests", [proved])
        dist.barrier()

    def _engine_side(self, asked: Asked, given_up: Event) -> EngineSide:
        self.sent.set()
        return (EngineSide if self.proved else Unproved)(asked, given_up)

    def _compare(
        self, theirs: EngineSide, expected: Mapping[str, Sequence[str]], trainer: Sequence[Sequence[float]]
    ) -> tuple[ProbeResult, dict[str, float]]:
        return super()._compare(theirs, expected, trainer) if self.proved else (ProbeResult(0.0, 0.0), {})


class Floor:
    """The whole model in one segment, filled before any clock runs."""

    def __init__(self, trainer: Trainer, engine: VllmEngine | None) -> None:
        [bucket] = plan_buckets(trainer.weights.metadata(), sum(meta.nbytes + 64 for meta in trainer.weights.metadata()))
        created: list[Segment] = []
        path = Path(on_rank0(lambda: str((created.append(Segment.create(bucket.nbytes)), created[0].path)[1])))
        segment = created[0] if created else Segment.attach(path, bucket.nbytes)
        held = trainer.held()
        for slot in bucket.slots:
            if slot.meta.name in held:
                segment.view(0, slot.offset, slot.meta.dtype, slot.meta.shape).copy_(held[slot.meta.name])
        rows = [[s.meta.name, str(s.meta.dtype).removeprefix("torch."), list(s.meta.shape), s.offset] for s in bucket.slots]
        self._engine, self._rows, self._segment = engine, rows, segment
        dist.barrier()
        if engine is not None:
            engine.link.rpc("mcore_bench_attach", [str(path), bucket.nbytes])
            path.unlink()

    def load(self) -> None:
        """Rank 0's engine loads it."""
        if self._engine is not None:
            self._engine.link.rpc("mcore_bench_load", [self._rows])


@contextmanager
def watching(pids: dict[str, int], figures: Figures, sent: Event) -> Iterator[None]:
    """The most anonymous memory above the start that each process takes inside; keeps the largest ever seen.

    sent: set once everything is written.
    """
    before, stop = {name: anonymous(pid) for name, pid in pids.items()}, threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            extra = {name: float(anonymous(pid) - before[name]) for name, pid in pids.items()}
            for name, value in extra.items():
                figures.extra_bytes[name] = max(figures.extra_bytes.get(name, 0.0), value)
            if not sent.is_set():
                ranks = sum(value for name, value in extra.items() if name.startswith("rank"))
                figures.sending_bytes = max(figures.sending_bytes, ranks)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    stop.set()
    watcher.join()


def anonymous(pid: int) -> int:
    """RssAnon of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def start_engine(checkpoint: Path, folder: Path) -> VllmEngine:
    """One thread, bfloat16, with the benchmark's extension."""
    rollout = RolloutConfig(dtype=DType.bfloat16, max_num_seqs=8, max_model_len=64)
    environment = engine_environment(rollout, device="cpu")
    environment["PYTHONPATH"] = f"{Path(__file__).parent}:{environment['PYTHONPATH']}"
    arguments = engine_arguments(rollout, str(checkpoint), device="cpu", extension=EXTENSION)
    link = OwnedLink(arguments, environment, log_path=folder / "engine.log", start_timeout_s=300, request_timeout_s=300)
    return VllmEngine(link, max_model_len=64)


def measure(trainer: Trainer, engine: VllmEngine | None, tmpfs: Path, rounds: int) -> dict[str, Any]:
    """All rounds. The first sync sets the segment up and reads everything back; the floor's segment exists only here."""
    figures, config = Figures(), SyncConfig(probe_max_nats=1.0, bucket_bytes=BUCKET_BYTES)
    session = BenchSync(engine, config, probe_sequences=PROBE)

    def sync(kind: str) -> None:
        session.show(kind != "unproved")
        probe = trainer.probe if session.proved else lambda: [[0.0]]
        figures.timed(kind, lambda: keep(figures, kind, session.sync(trainer.weights, probe)))

    session.sync(trainer.weights, trainer.probe)
    floor = Floor(trainer, engine)
    pids = dict(zip(("rank0", "rank1"), gather_builtins(os.getpid()), strict=True)) | engine_pid(engine)
    for _ in range(rounds):
        figures.timed("floor", floor.load)
        for kind, every in KINDS.items():
            config.readback_every = every
            with watching(pids if dist.get_rank() == 0 else {}, figures, session.sent):
                sync(kind)
        figures.timed("files", lambda: save_and_reload(trainer, engine, tmpfs))
    for _ in range(3):
        session.request_full_readback()
        sync("sync_full_readback")
    metas = trainer.weights.metadata()
    return {
        **vars(figures),
        "bytes": sum(meta.nbytes for meta in metas),
        "tensors": len(metas),
        "bucket_bytes": config.bucket_bytes,
        "segment_bytes": session.segment_bytes,
    }


def engine_pid(engine: VllmEngine | None) -> dict[str, int]:
    """Its process, where it is owned."""
    link = engine.link if engine is not None else None
    return {"engine": link.pid} if isinstance(link, OwnedLink) else {}


def keep(figures: Figures, kind: str, report: Any) -> None:
    """Stages of a sync."""
    figures.stages.setdefault(kind, []).append(dict(report.seconds))


def save_and_reload(trainer: Trainer, engine: VllmEngine | None, folder: Path) -> None:
    """Each rank writes what it holds to a tmpfs that already has the pages; then the engine reads the files."""
    save_file(trainer.held(), folder / f"rank{dist.get_rank()}.safetensors")
    dist.barrier()
    if engine is not None:
        engine.link.rpc("mcore_bench_reload", [[str(folder / f"rank{rank}.safetensors") for rank in range(2)]])


def main() -> None:
    """Command line."""
    checkpoint, tmpfs, folder = (Path(argument) for argument in sys.argv[1:4])
    die_with_parent()
    runtime = start_runtime("cpu", timeout_s=600)
    engine = start_engine(checkpoint, folder) if runtime.rank == 0 else None
    try:
        found = measure(Trainer(checkpoint), engine, tmpfs, int(sys.argv[4]))
        if runtime.rank == 0:
            sys.stdout.write(MARK + json.dumps(found) + "\n")
            sys.stdout.flush()
    finally:
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    main()
