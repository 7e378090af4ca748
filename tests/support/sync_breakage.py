"""Ways to break a weight sync between a stand-in trainer and a real engine. Each `inject(trained, patch)` breaks it until
the patch is undone, and returns the source to sync, or None for the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hf_trainer
import torch

LAYER = "model.layers.1"
EXPERT = f"{LAYER}.mlp.experts.%d.down_proj.weight"
SQUARE = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
ALWAYS = -1


class Faulty(hf_trainer.HfSource):
    """A source of the trainer's that does wrong. `alter` sees every (name, tensor) and yields what is handed out."""

    def __init__(self, source: hf_trainer.HfSource, alter: Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]):
        super().__init__(source.tensors, source.version)
        self.alter = alter

    def bucket(self, names):
        for name in names:
            yield from self.alter(name, self.tensors[name])


def handed_out(wrong: Callable[[str, torch.Tensor], Any]) -> Callable[[Any, Any], Faulty]:
    """The source hands out wrong(name, tensor): a tensor, or a list of pairs."""

    def alter(name, tensor):
        found = wrong(name, tensor)
        yield from found if isinstance(found, list) else [(name, found)]

    return lambda trained, patch: Faulty(trained.source("b", 1), alter)


def only(target: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Any, Any], Faulty]:
    """The source changes one tensor."""
    return handed_out(lambda name, tensor: change(tensor) if name == target else tensor)


def valued(change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], Any]) -> Callable[[Any, Any], Any]:
    """The source holds other values than the trainer computes with; change(right, those before the step)."""

    def inject(trained, patch):
        source = trained.source("b", 1)
        source.tensors.update(change(source.tensors, trained.source("a").tensors))
        return source

    return inject


def engine(kind: str, name: str) -> Callable[[Any, Any], None]:
    """The engine's own loader does wrong."""
    return lambda trained, patch: trained.damage(kind, name)


def wire(step: str, wrong: Callable[[Callable[..., Any], str, dict[str, Any]], Any], at: int = ALWAYS) -> Any:
    """The call `step` (its at-th; all of them without) goes wrong between trainer and engine."""

    def inject(trained, patch):
        native, seen = trained.link.native, {"count": 0}

        def broken(called, payload):
            hit = called == step and at in (ALWAYS, seen["count"])
            seen["count"] += called == step
            return wrong(native, called, payload) if hit else native(called, payload)

        patch.setattr(trained.link, "native", broken)

    return inject


def answer(method: str, result: Callable[[Callable[..., Any], Any], Any]) -> Callable[[Any, Any], None]:
    """A call of the link that answers result(the call, its arguments)."""

    def inject(trained, patch):
        original = getattr(trained.link, method)
        patch.setattr(trained.link, method, lambda *args: result(original, args))

    return inject


def rpc(method: str, change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """A worker's answer, changed."""
    return answer("rpc", lambda call, args: [change(found) for found in call(*args)] if args[0] == method else call(*args))


def swapped(right, before):
    """Every expert of the two halves in the other's place, as if expert-parallel ranks were exchanged."""
    places = {f".experts.{e}.": f".experts.{(e + 4) % 8}." for e in range(8)}
    moved = {old: new for old in right for mark, new in [(m, old.replace(m, p)) for m, p in places.items()] if mark in old}
    return {old: right[new] for old, new in moved.items()}


def half_old(right, before):
    """The second half of every matrix as before the step, as if a data-parallel shard had not been gathered."""
    return {name: torch.cat([t[: len(t) // 2], before[name][len(t) // 2 :]]) for name, t in right.items() if t.dim() == 2}


def flip(trained, patch):
    """One bit of the segment changes after the sender has hashed it."""
    native = trained.link.native

    def broken(called, payload):
        if called == "update":
            _, dtype, shape, offset, _ = payload["tensors"][0]
            view = trained.session._channel.segment.view(payload["slot"], offset, getattr(torch, dtype), tuple(shape))
            view.view(torch.int32).flatten()[0] ^= 1
        return native(called, payload)

    patch.setattr(trained.link, "native", broken)


def changing(trained, patch):
    """The trainer's own parameter moves on after it was handed out."""
    parameter = trained.models["b"].get_parameter(NORM)

    def alter(name, tensor):
        yield name, tensor
        if name == NORM:
            patch.setattr(parameter, "data", parameter.data * 1.5)

    return Faulty(trained.source("b", 1), alter)


def stepping(trained, patch):
    """An optimizer step in the middle of the sync."""
    source = trained.source("b", 1)

    def alter(name, tensor):
        if name == NORM:
            source._version = faulty._version = 2
        yield name, tensor

    faulty = Faulty(source, alter)
    return faulty


def listed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Any, Any], Any]:
    """Another list of tensors than the engine's model, from the first sync on."""

    def inject(trained, patch):
        trained.renew()
        source = trained.source("b", 1)
        change(source.tensors)
        return source

    return inject


def fails(error: Exception) -> Callable[..., Any]:
    """A call that raises."""

    def raising(*args: Any) -> Any:
        raise error

    return raising


def renamed(tensors):
    tensors["model.norm.wait"] = tensors.pop(NORM)


def nothing(call, step, payload):
    return None


def twice(call, step, payload):
    call(step, payload)
    call(step, payload)


def other_slot(call, step, payload):
    call(step, payload | {"slot": 1 - payload["slot"]})


def shifted(call, step, payload):
    call(step, payload | {"tensors": [[*row[:3], row[3] + 64, row[4]] for row in payload["tensors"][:1]]})


def less(call, step, payload):
    call(step, payload | {"tensors": payload["tensors"][:-1]})
