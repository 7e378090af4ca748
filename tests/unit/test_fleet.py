"""Several engines as one: who is asked what, what a death costs, and how addresses change. Engines are stubs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from mcore_rl.config.schema import SyncConfig
from mcore_rl.rollout.fleet import Fleet, deal
from mcore_rl.rollout.sampling import sample_seed
from mcore_rl.rollout.supply import OwnedSupply, UrlSupply, read_url_file
from mcore_rl.sync.digest import Region, content_digest, dtype_from_name
from mcore_rl.sync.session import WeightSync
from mcore_rl.sync.shm import Segment
from mcore_rl.types import Completion, EngineDied, Prompt, SamplingParams, StaleRollout, TensorMeta, WeightMismatch

SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), samples_per_prompt=2, seed=5)
PROMPTS = [Prompt(f"p{i}", (1, 2, i), "", "") for i in range(7)]
PROBE = [[1, 2, 3], [4, 5]]
VALUES = [[-1.0, -2.0], [-3.0]]


class Engine:
    """An engine that samples its seed, holds what it is sent, and dies when told."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.closed = name, None, False
        self.asked: list[list[str]] = []
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


def expected():
    return [(p.prompt_id, i, (sample_seed(5, p.prompt_id, i) % 1000,)) for p in PROMPTS for i in range(2)]


def drawn(completions):
    return [(c.prompt_id, c.sample_index, c.token_ids) for c in completions]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_prompts_are_spread_and_come_back_in_order(count):
    made = Made(count).synced()
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()
    shares = [engine.asked[0] for engine in made.engines if engine.asked]
    assert sorted(name for share in shares for name in share) == sorted(p.prompt_id for p in PROMPTS)
    assert len(shares) == min(count, 7) and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_deal():
    assert deal([3, 4, 5], 2) == [[3], [4, 5]]
    assert deal([3], 4) == [[3]]
    assert deal(range(10), 4) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_the_others_finish_what_a_dead_engine_was_asked():
    made = Made(3).synced()
    made.engines[1].dies_in = "generate"
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()
    lost = made.engines[1].asked[0]
    again = made.engines[0].asked[1] + made.engines[2].asked[1]
    assert sorted(again) == sorted(lost)
    assert (made.fleet.losses, made.engines[1].closed, len(made.fleet.members)) == (1, True, 2)


def test_a_replacement_gets_a_full_sync_before_its_first_sample():
    made = Made(1).synced()
    made.engines[0].dies_in = "generate"
    with pytest.raises(EngineDied, match=r"engine0\.0 died during 'generate'"):
        made.fleet.generate(PROMPTS, SAMPLING)
    [line] = made.recover()
    assert "engine0.0 died during 'generate'; replaced (death 1 of at most 3)" in line
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()
    assert [engine.version for engine in made.engines] == [3, 3]
    assert len(made.engines[1].asked) == 1


def test_a_replacement_that_was_not_synced_refuses():
    made = Made(1).synced()
    made.engines[0].dies_in = "generate"
    with pytest.raises(EngineDied):
        made.fleet.generate(PROMPTS, SAMPLING)
    made.fleet.refresh()
    assert made.fleet.version is None
    with pytest.raises(StaleRollout):
        made.fleet.generate(PROMPTS, SAMPLING)


STEPS = ["attach", "begin", "load t0", "load t4", "finish", "readback", "reset_prefix_cache", "score", "commit"]


@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_death_anywhere_in_a_sync(call, count):
    """No engine keeps a version; the retry is complete and everybody's, and nothing of the first try is left."""
    made = Made(count).synced()
    made.engines[-1].dies_in = call
    made.sync.renew()
    with pytest.raises(EngineDied, match=f"died during '{call}'"):
        made.sync.sync(Source(), lambda: VALUES)
    assert made.fleet.version is None
    made.recover()
    assert made.fleet.version == 3
    assert len(made.engines) == count + 1
    living = [engine for engine in made.engines if not engine.closed]
    assert all(torch.equal(engine.held[name], tensor) for engine in living for name, tensor in TENSORS.items())
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()


def test_engines_are_started_by_the_main_thread_alone():
    """A child dies with the thread that started it."""
    made = Made(2).synced()
    made.engines[0].dies_in = "generate"
    made.fleet.generate(PROMPTS, SAMPLING)
    made.recover()
    assert set(made.threads) == {threading.main_thread()} and len(made.threads) == 3


@pytest.mark.parametrize("most", [0, 2])
def test_deaths_are_counted_and_the_last_one_ends_the_run(most):
    made = Made(1, max_restarts=most).synced()
    for _ in range(most):
        made.engines[-1].dies_in = "generate"
        with pytest.raises(EngineDied):
            made.fleet.generate(PROMPTS, SAMPLING)
        made.recover()
    made.engines[-1].dies_in = "generate"
    with pytest.raises(EngineDied, match=rf"engine0\.{most} died during 'generate'"):
        made.fleet.generate(PROMPTS, SAMPLING)
    assert not made.fleet.survives()
    with pytest.raises(EngineDied, match=rf"engine0\.{most} died during 'generate'"):
        made.fleet.refresh()


def test_with_zero_restarts_the_others_do_not_go_on():
    made = Made(2, max_restarts=0).synced()
    made.engines[1].dies_in = "generate"
    with pytest.raises(EngineDied, match=r"engine1\.1"):
        made.fleet.generate(PROMPTS, SAMPLING)


def test_an_engine_that_cannot_start_is_not_tried_again():
    made = Made(2)
    made.engines[1].dies_in = "wait_ready"
    with pytest.raises(EngineDied, match="during 'wait_ready'"):
        made.synced()
    assert not made.fleet.survives()


def test_every_engine_is_proved_and_the_wrong_one_is_named():
    made = Made(3)
    made.engines[1].wrong = True
    with pytest.raises(WeightMismatch, match=r"^engine1\.1: 1 of 5 tensors read back differ from the trainer's: t2$"):
        made.synced()
    assert made.fleet.version is None


def test_all_engines_load_a_bucket_before_its_slot_is_written_again():
    """The slow engine sees what was sent, not what came two buckets later; both load at the same time."""
    made = Made(2)
    load, spans = made.engines[1].load, []

    def slow(slot, tensors):
        time.sleep(0.05)
        spans.append(tensors[0][0])
        load(slot, tensors)

    made.engines[1].load = slow
    made.synced()
    assert spans == [f"t{i}" for i in range(5)]
    assert all(torch.equal(made.engines[1].held[name], tensor) for name, tensor in TENSORS.items())


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


def test_a_server_is_replaced_by_a_change_of_the_file(tmp_path):
    servers = Servers(tmp_path, "http://a:1", "http://b:1")
    servers.kill("http://b:1")
    assert drawn(servers.fleet.generate(PROMPTS, SAMPLING)) == expected()
    [line] = servers.fleet.refresh()
    assert "http://b:1 died during 'generate'; not replaced (death 1 of at most 5): write the address of another into" in line
    assert servers.fleet.refresh() == []  # said once
    servers.up.add("http://c:1")
    servers.write("http://a:1", "http://c:1")
    assert [line.split(":", 2)[0] for line in servers.fleet.refresh()] == ["engine http", "engine http"]
    assert servers.names() == ["http://a:1", "http://c:1"]
    servers.sync.renew()
    servers.sync.sync(Source(), lambda: VALUES)
    assert drawn(servers.fleet.generate(PROMPTS, SAMPLING)) == expected()
    assert servers.made[-1].asked[0] == ["p3", "p4", "p5", "p6"]


def test_a_server_that_comes_back_is_taken_again(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.kill("http://a:1")
    with pytest.raises(EngineDied):
        servers.fleet.generate(PROMPTS, SAMPLING)
    threading.Timer(0.05, lambda: servers.up.add("http://a:1")).start()
    time.sleep(0.1)
    assert "replaced" in servers.fleet.refresh()[0]
    assert (servers.names(), servers.fleet.version) == (["http://a:1"], None)


def test_when_nobody_comes_the_run_ends(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.kill("http://a:1")
    with pytest.raises(EngineDied):
        servers.fleet.generate(PROMPTS, SAMPLING)
    with pytest.raises(EngineDied, match=r"no rollout engine is left at http://a:1 and none came within"):
        servers.fleet.refresh()


def test_a_file_in_the_middle_of_being_written_is_read_again(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.up.add("http://b:1")
    servers.file.write_text("")
    threading.Timer(0.3, lambda: servers.write("http://a:1", "http://b:1")).start()
    assert servers.fleet.refresh() == ["engine http://b:1 joined; it gets a complete sync before its first sample"]


def test_a_death_between_two_questions_is_noticed_before_the_sync():
    made = Made(2).synced()
    made.engines[0].dies_in = "same_process"
    [line] = made.fleet.refresh()
    assert "engine0.0 died during 'same_process'; replaced (death 1 of at most 3)" in line
    assert len(made.engines) == 3 and made.fleet.version is None


def test_a_file_of_addresses_is_read_strictly(tmp_path):
    file = tmp_path / "servers.txt"
    with pytest.raises(ValueError, match="no such file"):
        read_url_file(file)
    file.write_text("# nobody\n\n")
    with pytest.raises(ValueError, match="names no address"):
        read_url_file(file)
    file.write_text("http://a:1/ # first\nhttp://a:1\n")
    with pytest.raises(ValueError, match="stands there twice"):
        read_url_file(file)


def test_seeds_differ_by_prompt_sample_and_step_and_not_by_engine():
    """8 samples of 20 prompts at 6 steps: 960 seeds; the same again; none of them under another base seed."""

    def seeds(base):
        return [sample_seed(base * 1_000_003 + s, f"p{p}", i) for s in range(6) for p in range(20) for i in range(8)]

    assert len(set(seeds(1))) == 960
    assert seeds(1) == seeds(1)
    assert not set(seeds(2)) & set(seeds(1))
    two, one = Made(2).synced(), Made(1).synced()
    assert two.fleet.generate(PROMPTS, SAMPLING) == one.fleet.generate(PROMPTS, SAMPLING)
