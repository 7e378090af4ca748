"""A vLLM engine behind the RolloutEngine seam, whatever link reaches it, and the endpoint of a weight sync.

The engine refuses to sample until a complete sync has been proved, and every completion must echo the proved version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.link import EngineLink
from mcore_rl.rollout.route_reader import RouteReader
from mcore_rl.rollout.sampling import completion_of, generation_requests, score_sampling
from mcore_rl.rollout.sleep import SleepCycle
from mcore_rl.types import Completion, EngineDied, Prompt, SamplingParams, StaleRollout, WeightMismatch

UNPROVED = "unproved"


class VllmEngine:
    """Implements types.RolloutEngine and sync.endpoint.SyncEndpoint over an EngineLink."""

    def __init__(self, link: EngineLink, *, max_model_len: int, routes: RouteReader | None = None, sleep_level: int = 0) -> None:
        """Nothing is asked of the engine yet; it may still be starting. sleep_level: how deep `rest` is."""
        self.link = link
        self._max_model_len = max_model_len
        self._routes = routes
        self._cycle = SleepCycle(link, sleep_level)
        self._version: int | None = None
        self._processes: list[int] = []

    @property
    def name(self) -> str:
        """Placement and address."""
        return self.link.name

    @property
    def version(self) -> int | None:
        """Version of the weights loaded and proved; None before the first proved sync and after a failed one."""
        return self._version

    def wait_ready(self) -> None:
        """Block until the engine has started."""
        self.link.wait_ready()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """samples_per_prompt completions per prompt, in (prompt, sample) order.

        StaleRollout when no proved weights are loaded or an output echoes another version.
        """
        requests = generation_requests(prompts, sampling, self._max_model_len)
        self._cycle.require_usable(self.name)
        if self._version is None:
            raise StaleRollout(f"{self.name} holds no proved weights: a complete weight sync must come first")
        outputs = self._generated(requests)
        owners = [(prompt, index) for prompt in prompts for index in range(sampling.samples_per_prompt)]
        return [
            self._completion(prompt, index, output, sampling.max_tokens)
            for (prompt, index), output in zip(owners, outputs, strict=True)
        ]

    def _generated(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The link's outputs, with the routes of each where they are read."""
        if self._routes is None:
            return self.link.generate(requests)
        self._routes.begin()
        outputs = self.link.generate(requests)
        routes = self._routes.collect(outputs)
        return [{**output, "routes": one} for output, one in zip(outputs, routes, strict=True)]

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats) of every token after the first, at temperature 1. Sequences of at least 2 tokens."""
        for index, ids in enumerate(token_ids):
            if not 2 <= len(ids) < self._max_model_len:
                raise ValueError(f"score: sequence {index} has {len(ids)} tokens; 2 to {self._max_model_len - 1} are possible")
        requests = [{"token_ids": list(ids), "sampling": score_sampling()} for ids in token_ids]
        return self.link.score(requests)

    def rest(self) -> None:
        """Give the GPU memory back, where a sleep level is set; at level 2 the version goes with the weights."""
        self._cycle.rest()
        if self._cycle.empty:
            self._version = None

    def wake(self) -> None:
        """Take the memory again. At level 2 a complete sync must follow before the first sample."""
        self._cycle.wake()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Usable inside, at rest outside; always usable where no sleep level is set."""
        self.wake()
        try:
            yield
        finally:
            self.rest()

    def health(self) -> None:
        """EngineDied when it does not answer."""
        self.link.health()

    def close(self) -> None:
        """Stop what the run owns."""
        self.link.close()

    def same_process(self) -> None:
        """EngineDied when the engine does not answer, or another process answers in its place: that holds other weights."""
        found = [info["pid"] for info in self._ask("mcore_info", [])]
        if self._processes and found != self._processes:
            raise EngineDied(f"rollout engine {self.name} was started again: process {found[0]} answers for {self._processes[0]}")
        self._processes = found

    def facts(self) -> dict[str, Any]:
        """What model the engine runs, by its first worker."""
        return self._ask("mcore_facts", [])[0]

    def layout(self) -> dict[str, dict[str, Any]]:
        """HF name -> {shape, regions}: what the engine's model is made of, regions of all workers in worker order."""
        merged: dict[str, dict[str, Any]] = {}
        for worker in self._ask("mcore_layout", []):
            for name, entry in worker.items():
                known = merged.setdefault(name, {"shape": entry["shape"], "regions": []})
                known["regions"] += entry["regions"]
        return merged

    def attach(self, path: str, slot_bytes: int) -> None:
        """Let the engine map the trainer's shared-memory segment; from now on this process and no other is the engine."""
        self.same_process()
        self._native("init", {"path": path, "slot_bytes": slot_bytes})

    def begin(self) -> None:
        """Open an update. From here until `commit` the engine has no version."""
        self._version = None
        self.link.set_version(UNPROVED)
        # vLLM raises for a second start, and an exception costs workers their answers: vllm_transfer.
        if any(outcome.get("active") for outcome in self._ask("mcore_outcome", ["start"])):
            self._ask("mcore_abort", [])
        if not all(outcome.get("active") for outcome in self._native("start", {})):
            raise WeightMismatch(f"{self.name}: no update is open: start_weight_update must be called before update_weights")

    def load(self, slot: int, tensors: list[list[Any]]) -> None:
        """One bucket: (name, dtype, shape, offset, wire digest) per tensor in `slot`. WeightMismatch naming a bad one."""
        self._native("update", {"slot": slot, "tensors": tensors})

    def finish(self) -> list[str]:
        """Close the update; returns the names received. WeightMismatch naming what is missing."""
        self._native("finish", {})
        statuses = self._ask("mcore_status", [])
        if any(status["active"] for status in statuses):
            raise WeightMismatch(f"{self.name}: the update was never closed: the engine is still waiting for tensors")
        received = [status["names"] for status in statuses]
        if any(names != received[0] for names in received):
            raise WeightMismatch(f"{self.name}: the engine's workers received different tensors")
        return received[0]

    def abort(self) -> None:
        """End an update that failed; the engine stays without a version."""
        self._version = None
        self.link.set_version(UNPROVED)
        self._ask("mcore_abort", [])

    def readback(self, names: Sequence[str]) -> dict[str, list[str]]:
        """HF name -> digest per region (all workers, in layout order) of what the kernels compute with."""
        merged: dict[str, list[str]] = {name: [] for name in names}
        for worker in self._ask("mcore_readback", [list(names)]):
            for name, digests in worker.items():
                merged[name] += digests
        return merged

    def reset_prefix_cache(self) -> None:
        """Drop keys and values of the old weights. WeightMismatch when the engine could not."""
        if not self.link.reset_prefix_cache():
            raise WeightMismatch(f"{self.name}: the prefix cache was not emptied (requests are running); its entries are stale")

    def commit(self, version: int) -> None:
        """Set the proved version in the engine and read it back."""
        self.link.set_version(str(version))
        found = self.link.get_version()
        if found != str(version):
            raise WeightMismatch(f"{self.name}: version was set to {version}, the engine says {found!r}")
        self._cycle.proved()
        self._version = version

    def _completion(self, prompt: Prompt, index: int, output: dict[str, Any], max_tokens: int) -> Completion:
        where = f"{self.name}: completion {prompt.prompt_id}/{index}"
        if output["versions"] != [str(self._version)]:
            self.same_process()
            raise StaleRollout(f"{where} was sampled with weights {output['versions']}, version {self._version} was proved")
        version = int(output["versions"][0])
        return completion_of(prompt, index, output, max_tokens=max_tokens, version=version, where=where)

    def _native(self, step: str, payload: dict[str, Any]) -> list[Any]:
        """What became of the step, per worker. WeightMismatch when one refused it."""
        try:
            self.link.native(step, payload)
        except EngineRefused as failure:  # by vLLM itself
            raise WeightMismatch(str(failure)) from failure
        outcomes = self._ask("mcore_outcome", [step])
        self._heard(WeightMismatch, [outcome.get("error", f"it says {outcome} of '{step}'") for outcome in outcomes])
        return outcomes

    def _ask(self, method: str, args: list[Any]) -> list[Any]:
        answers = self.link.rpc(method, args)
        self._heard(EngineRefused, [answer.get("mcore_refused", "") for answer in answers])
        return answers

    def _heard(self, kind: type[Exception], reasons: list[str]) -> None:
        """The first worker's reason that there is, raised."""
        for worker, reason in enumerate(reasons):
            if reason:
                where = f"{self.name}: worker {worker} of {len(reasons)}" if len(reasons) > 1 else self.name
                raise kind(f"{where}: {reason}")
