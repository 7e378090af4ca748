"""Hugging Face weights into a rank's Megatron modules, and out again as full tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.hf_file import DTYPES
from models.hf_io import CheckpointReader, check_names, fuse_experts
from models.hf_write import write_checkpoint
from models.ownership import holder_of, in_gather, shard_of
from models.parameters import canonical_parameters
from models.registry import carried_names, weight_map
from models.spec import ModelSpec, TensorMeta
from models.weight_map import Rule
from parallel.gather import collect_shards
from parallel.groups import ProcessGroups


def load_hf_weights(chunks: Sequence[nn.Module], spec: ModelSpec, groups: ProcessGroups, checkpoint: Path) -> None:
    """Fill this rank's parameters from the Hugging Face folder; call it before the optimizer copies them.

    Every parameter is filled with NaN first and written exactly once. ValueError naming the tensor when the checkpoint
    lacks one, has one too many, or one does not fit; RuntimeError naming a parameter that no tensor is mapped to.
    """
    rules = weight_map(spec)
    reader = CheckpointReader(checkpoint)
    _check_checkpoint(reader, spec, rules)
    waiting = canonical_parameters(chunks, spec, groups.layout, dist.get_rank())
    for parameter in waiting.values():
        parameter.data.fill_(torch.nan)
    for rule in rules:
        parameter = waiting.pop(rule.megatron, None)
        if parameter is not None:
            _load(parameter, rule, reader, shard_of(rule, groups.layout, dist.get_rank()))
    if waiting:
        raise RuntimeError(f"no tensor of the checkpoint is mapped to {', '.join(sorted(waiting))}")


def _check_checkpoint(reader: CheckpointReader, spec: ModelSpec, rules: Sequence[Rule]) -> None:
    expected = frozenset(t.name for rule in rules for t in rule.tensors)
    found = frozenset(name for name in reader.names() if not name.endswith("rotary_emb.inv_freq"))
    found -= carried_names(spec.architecture, found)
    embedding = f"{spec.text_prefix}embed_tokens.weight"
    if spec.tied_embeddings and "lm_head.weight" in found:
        if not torch.equal(reader.read("lm_head.weight"), reader.read(embedding)):
            raise ValueError(f"{reader.folder}: tie_word_embeddings is true, but lm_head.weight is not {embedding}")
        found -= {"lm_head.weight"}
    check_names(found, expected, reader.folder)
    for name in sorted(expected):
        if reader.dtype(name) is not spec.dtype_of(name):
            raise ValueError(f"{reader.path_of(name)}: {name} is {reader.dtype(name)}, the spec says {spec.dtype_of(name)}")


def _load(parameter: nn.Parameter, rule: Rule, reader: CheckpointReader, place: tuple[int, int]) -> None:
    name = rule.tensors[0].name
    where = f"{reader.path_of(name)}: {name} -> {rule.megatron}"
    try:
        whole = rule.op.fuse([reader.read(t.name) for t in rule.tensors])
        piece = rule.op.shard(whole, *place)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if piece.shape != parameter.shape:
        raise ValueError(f"{where}: {tuple(piece.shape)} into {tuple(parameter.shape)}")
    parameter.data.copy_(piece)


class ModelWeights:
    """The decoder's weights as full tensors under their Hugging Face names.

    dtype: what they are exported in; None keeps the checkpoint's dtypes. A parameter that is always fp32 (GatedDeltaNet's
    A_log and dt_bias) stays so. Padding rows of the vocabulary never leave; tensors that are only carried are not here.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], spec: ModelSpec, groups: ProcessGroups, *, dtype: torch.dtype | None = None
    ) -> None:
        """Look the parameters up; tensors are read when they are asked for."""
        self.groups = groups
        self._spec = spec
        self._rank = dist.get_rank()
        self._parameters = canonical_parameters(chunks, spec, groups.layout, self._rank)
        self._rules = tuple(rule for rule in weight_map(spec) if rule.exported)
        self._rule_of = {t.name: rule for rule in self._rules for t in rule.tensors}
        self._metadata = {
            t.name: TensorMeta(t.name, t.dtype if rule.float32 or dtype is None else dtype, t.shape)
            for rule in self._rules
            for t in rule.tensors
        }

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Every tensor of the whole model in iteration order, from the spec alone: the same on every rank."""
        return tuple(self._metadata.values())

    def held_names(self) -> frozenset[str]:
        """Names this rank hands out; each name is held by exactly one rank."""
        return frozenset(t.name for rule in self._rules if self._holder(rule) == self._rank for t in rule.tensors)

    def _holder(self, rule: Rule) -> int:
        return holder_of(rule, self._spec, self.groups.layout)

    def bucket(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of those `names` that this rank holds, in that order.

        Collective over the tensor-parallel groups: every rank calls it with the same names and runs it to the end.
        ValueError for an unknown name. Give a layer's names in metadata order: parts of one parameter are gathered once.
        """
        unknown = [name for name in names if name not in self._rule_of]
        if unknown:
            raise ValueError(f"the model has no tensor {unknown[0]}")
        for _, group in groupby(names, key=lambda name: id(self._rule_of[name])):
            wanted = list(group)
            tensors = self._gather(self._rule_of[wanted[0]])
            yield from ((name, tensors[name]) for name in wanted if name in tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the whole model on every rank, in metadata order. Collective over all ranks."""
        device = next(iter(self._parameters.values())).device
        for rule in self._rules:
            tensors, holder = self._gather(rule), self._holder(rule)
            for part in rule.tensors:
                meta = self._metadata[part.name]
                tensor = tensors[part.name] if tensors else torch.empty(meta.shape, dtype=meta.dtype, device=device)
                if self.groups.layout.world > 1:
                    dist.broadcast(tensor, src=holder)
                yield part.name, tensor

    def _gather(self, rule: Rule) -> dict[str, Tensor]:
        """The parameter's Hugging Face tensors on its holder; {} elsewhere. Collective over the holder's shard group."""
        if not in_gather(rule, self._spec, self.groups.layout, self._rank):
            return {}
        local = self._parameters[rule.megatron].detach()
        shards: list[Tensor] | None = [local]
        if rule.op.sharded:
            shards = collect_shards(local, self.groups.tp if rule.expert is None else self.groups.etp, owner=0)
        if shards is None or self._holder(rule) != self._rank:
            return {}
        parts = rule.op.split(rule.op.join(shards))
        dtypes = [self._metadata[t.name].dtype for t in rule.tensors]
        return {t.name: part.to(dtype).contiguous() for t, part, dtype in zip(rule.tensors, parts, dtypes, strict=True)}


def export_checkpoint(weights: ModelWeights, spec: ModelSpec, *, source: Path, target: Path) -> None:
    """Write the model as a Hugging Face folder, laid out as `source` is, whose carried tensors are copied bit by bit.

    Collective; rank 0 writes. Each layer's experts are written as the source stores them, fused or one by one.
    """
    if dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    reader = CheckpointReader(source)
    tensors = iter(weights) if spec.moe is None else _as_stored(weights, reader, spec.moe.num_experts)
    carried = sorted(carried_names(spec.architecture, reader.stored_names()))
    everything = chain(tensors, ((name, reader.read_stored(name)) for name in carried))
    write_checkpoint(target, everything, source=source, metas=_stored_metas(weights, reader, carried))


def _stored_metas(weights: ModelWeights, reader: CheckpointReader, carried: Sequence[str]) -> list[TensorMeta]:
    """What will be written, under the names the source stores it by."""
    metas: dict[str, TensorMeta] = {}
    for meta in weights.metadata():
        fused = reader.entry(meta.name) if reader.is_fused(meta.name) else None
        stored = meta if fused is None else TensorMeta(fused.name, meta.dtype, fused.shape)
        metas[stored.name] = stored
    for entry in (reader.entry(name) for name in carried):
        metas[entry.name] = TensorMeta(entry.name, DTYPES[entry.dtype], entry.shape)
    return list(metas.values())


def _as_stored(tensors: Iterable[tuple[str, Tensor]], reader: CheckpointReader, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """A layer's experts follow each other: those that the source stores fused are fused."""
    for fused, group in groupby(tensors, key=lambda named: reader.is_fused(named[0])):
        if fused:
            yield from fuse_experts(group, num_experts)
        else:
            yield from group
