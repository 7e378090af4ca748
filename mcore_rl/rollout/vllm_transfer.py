"""vLLM weight-transfer engine `mcore_shm`: tensors arrive through a shared-memory segment, bucket by bucket.

Registered with vLLM's own factory when this module is imported (the worker extension does that in every worker), so
the lifecycle is vLLM's: init once; start, update per bucket, finish. Runs inside vLLM's process.

Nothing here raises a refusal through vLLM: of several workers it hears out those before the first that failed, and takes
the others' answers for those to its next call, for ever. A refusal is kept for `mcore_outcome`, which the trainer asks of
every worker after each call.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from mcore_rl.rollout.vllm_child import REFUSALS
from mcore_rl.rollout.vllm_cpu_patches import (
    check_version,
    drop_partial_reload,
    map_expert_ids,
    refresh_tied_heads,
    reset_moe_prepack,
    rewind_discarded_draws,
)
from mcore_rl.rollout.vllm_layout import Layout, describe, module_elements
from mcore_rl.sync.background import Background
from mcore_rl.sync.digest import dtype_from_name, wire_digest
from mcore_rl.sync.shm import Segment
from mcore_rl.types import WeightMismatch

BACKEND = "mcore_shm"


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where the segment is."""

    path: str
    slot_bytes: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: its slot, and per tensor (name, dtype, shape, offset, wire digest)."""

    slot: int
    tensors: list[list[Any]]


@dataclass
class Received:
    """What has arrived since the start of the update."""

    names: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


class ShmTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Checks every tensor it takes and every tensor it should have got."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    received = Received()
    init_error = ""
    last_error = ""
    """Why the current or last update was refused; it stays so until the next start."""
    _segment: Segment | None = None
    _layout: Layout | None = None
    _parameters: set[str] | frozenset[str] = frozenset()

    @property
    def layout(self) -> Layout:
        """The HF tensors this model is made of (computed once, on the loaded model)."""
        if self._layout is None:
            self._layout = describe(self.model)
            # Taken here, on the loaded model: during an update a tied parameter is two.
            self._parameters = {name for name, _ in self.model.named_parameters()}
        return self._layout

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the trainer's segment. Refused when it is not on this host."""
        self._segment = None
        self.init_error = refusal_of(lambda: self._attach(init_info))

    def start_weight_update(self) -> None:
        """Open an update: whatever an earlier one left behind is dropped first."""
        self.received = Received()
        self.last_error = refusal_of(self._open)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """One bucket; none after one that was refused. The base class would synchronize an accelerator, which a CPU has not."""
        self.last_error = self.last_error or refusal_of(lambda: self.receive_weights(self.parse_update_info(update_info)))

    def finish_weight_update(self) -> None:
        """Close the update. Refused, naming it, when something never arrived, before any of it is used."""
        self.last_error = self.last_error or refusal_of(self._close)

    def _attach(self, init_info: ShmInitInfo) -> None:
        self._segment = Segment.attach(Path(init_info.path), init_info.slot_bytes)

    def _open(self) -> None:
        _ = self.layout
        drop_partial_reload(self.model)
        reset_moe_prepack(self.model)
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load one bucket, hash it on another thread meanwhile, then own whatever the loader still holds: the sender
        reuses the slot. A bucket that is not what was sent is refused after it was loaded: only `finish` puts it to use.
        """
        if self._segment is None:
            raise WeightMismatch("an update arrived before init_weight_transfer_engine")
        hashing = Background(partial(_first_damaged, self._segment, update_info), "weight sync: digests")
        tensors = self._known(self._segment, update_info)
        model: Any = self.model  # torch types an unknown attribute of a module as a tensor
        try:
            self.received.parameters |= set(model.load_weights(tensors) or ())
        finally:
            hashing.outcome()
        for name, _ in tensors:
            raise WeightMismatch(f"the loader stopped before {name!r}")
        damaged = hashing.result()
        if damaged is not None:
            raise WeightMismatch(f"tensor {damaged!r} was damaged on the way: its bytes do not match the sender's digest")
        self._own_buffered()

    @torch.no_grad()
    def _close(self) -> None:
        self._check_names()
        self._check_elements()
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_heads(self.model)

    @torch.no_grad()
    def abort(self) -> None:
        """Put the old kernel tensors back where nothing complete arrived. The model is a mixture until the next update."""
        drop_partial_reload(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        self.received = Received()

    def shutdown(self) -> None:
        """Let go of the segment."""
        self._segment = None

    def _known(self, segment: Segment, update_info: ShmUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        seen = set(self.received.names)
        for row in update_info.tensors:
            name, shape = str(row[0]), tuple(row[2])
            if name not in self.layout:
                raise WeightMismatch(f"unknown tensor {name!r}: the engine's model has no such weight")
            if shape != self.layout[name].shape:
                raise WeightMismatch(
                    f"tensor {name!r} arrived as {list(shape)}, the engine's model needs {list(self.layout[name].shape)}"
                )
            if name in seen:
                raise WeightMismatch(f"tensor {name!r} arrived twice in one update")
            seen.add(name)
            self.received.names.append(name)
            yield name, _value(segment, update_info.slot, row)

    def _check_names(self) -> None:
        received = set(self.received.names)
        missing = [name for name in self.layout if name not in received]
        if missing:
            raise WeightMismatch(f"{len(missing)} of {len(self.layout)} tensors never arrived: {', '.join(missing[:5])}")
        untouched = self._parameters - self.received.parameters
        if untouched:
            raise WeightMismatch(f"the loader skipped {len(untouched)} parameters: {', '.join(sorted(untouched)[:5])}")

    def _check_elements(self) -> None:
        """A layer still waiting for numbers got a tensor that its loader dropped; unloaded padding is none of them."""
        expected = module_elements(self.layout)
        for path, module in self.model.named_modules():
            info = get_layerwise_info(module)
            if info.can_load() and info.load_numel < expected.get(path, 0):
                names = sorted(name for name, entry in self.layout.items() if any(piece.module == path for piece in entry.pieces))
                some = ", ".join(names[:5])
                raise WeightMismatch(f"the loader took {info.load_numel} of {expected[path]} numbers of {path}, made of {some}")

    def _own_buffered(self) -> None:
        for module in self.model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, Tensor) and self._segment is not None and self._segment.owns(value):
                        bound.arguments[key] = value.clone()


def refusal_of(call: Callable[[], object]) -> str:
    """Why the call was refused, "" when it was not. The traceback goes to the engine's log.

    Memory that ran out too: the worker goes on, and raised through vLLM it would cost the other workers their answers.
    """
    try:
        call()
    except WeightMismatch as failure:
        return str(failure)
    except (*REFUSALS, MemoryError) as failure:
        traceback.print_exc()
        return f"{type(failure).__name__}: {failure}"
    return ""


def _value(segment: Segment, slot: int, row: Sequence[Any]) -> Tensor:
    return segment.view(slot, int(str(row[3])), dtype_from_name(str(row[1])), tuple(row[2]))


def _first_damaged(segment: Segment, update_info: ShmUpdateInfo) -> str | None:
    """Name of the first tensor whose bytes are not the sender's."""
    rows = update_info.tensors
    return next((str(row[0]) for row in rows if wire_digest(_value(segment, update_info.slot, row)) != str(row[4])), None)


def register() -> None:
    """Make `mcore_shm` known to vLLM; a second call changes nothing."""
    check_version()
    map_expert_ids()
    rewind_discarded_draws()
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, ShmTransferEngine)
