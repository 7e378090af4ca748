"""A stand-in for vllm that starts in a moment: one worker, float32 tensors kept as bytes, and a fault on order.

Put its folder before site-packages in the PYTHONPATH of an owned engine. Arguments of LLM: `tensors` (name -> shape) and
`fault` (`at`: init, start, update0, update1, ..., finish, readback, score, version; `how`: die, hang, oom, refuse, tell).
refuse: raised by vLLM. tell: kept by the last of two workers until it is asked.
Reads the segment and hashes as the protocol says, on its own: nothing of the project is imported here.
"""

import math
import mmap
import os
import signal
import time
from types import SimpleNamespace

import xxhash


class SamplingParams:
    """Whatever is asked for."""

    def __init__(self, **arguments):
        vars(self).update(arguments)


class LLM:
    """What vllm_child calls, and nothing more."""

    def __init__(self, tensors, fault):
        self._tensors, self._fault = tensors, fault
        self._held, self._names, self._updates, self._version, self._error = {}, [], 0, "", ""
        self._active = False

    def init_weight_transfer_engine(self, request):
        self._reach("init")
        info = request["init_info"]
        with open(info["path"], "r+b") as file:  # noqa: PTH123
            self._memory = mmap.mmap(file.fileno(), 0)
        self._slot_bytes = info["slot_bytes"]

    def start_weight_update(self):
        if self._active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._error = ""
        self._reach("start")
        self._names, self._updates, self._active = [], 0, True

    def update_weights(self, request):
        self._reach(f"update{self._updates}")
        self._updates += 1
        info = request["update_info"]
        for name, _, shape, offset, digest in info["tensors"]:
            start = info["slot"] * self._slot_bytes + offset
            data = bytes(self._memory[start : start + 4 * math.prod(shape)])
            if xxhash.xxh3_64_hexdigest(data) != digest:
                self._error = f"{name} was damaged on the way"
                raise ValueError(self._error)
            self._held[name] = data
            self._names.append(name)

    def finish_weight_update(self):
        self._reach("finish")
        self._active = False

    def collective_rpc(self, method, args):
        if method == "mcore_info":
            return [{"pid": os.getpid()}]
        if method == "mcore_layout":
            return [{name: {"shape": shape, "regions": [["float32", None, 0, 0]]} for name, shape in self._tensors.items()}]
        if method == "mcore_outcome":
            return [{"error": error, "active": self._active} for error in ("", self._error)]
        if method == "mcore_status":
            return [{"names": self._names, "parameters": 0, "error": self._error, "active": self._active}]
        if method == "mcore_readback":
            self._reach("readback")
            return [{name: [self._digest(name)] for name in args[0]}]
        self._active = False
        return [{"aborted": True}]

    def _digest(self, name):
        hasher = xxhash.xxh3_64(f"torch.float32{tuple(self._tensors[name])}".encode())
        hasher.update(self._held[name])
        return hasher.hexdigest()

    def reset_prefix_cache(self):
        return True

    def update_weight_version(self, version):
        self._version = version

    def get_weight_version(self):
        self._reach("version")
        return self._version

    def generate(self, prompts, sampling, use_tqdm):
        self._reach("score")
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        return [SimpleNamespace(prompt_logprobs=[None, *({t: SimpleNamespace(logprob=-1.0)} for t in row[1:])]) for row in rows]

    def _reach(self, place):
        if place != self._fault.get("at"):
            return
        how = self._fault["how"]
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(3600)
        if how == "oom":
            raise MemoryError(f"no memory in {place}")
        self._error = "" if place == "init" else f"no in {place}"
        if how == "refuse":
            raise RuntimeError(f"no in {place}")
