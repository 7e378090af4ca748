"""Routes on their way from an engine to a batch: plain bytes with a completion, tensors with a batch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.routes import Routes


@dataclass(frozen=True)
class EncodedRoutes:
    """Routes of one sequence's first tokens, as builtins: they travel through pipes, HTTP and collectives.

    layers: 0-based numbers, in the whole model, of the layers with experts. experts: [tokens, layers, top_k] in C order, the
    most probable expert first, one byte each or, `wide`, two (little-endian int16). missing: tokens nothing is known of.
    """

    layers: tuple[int, ...]
    top_k: int
    wide: bool
    experts: bytes
    missing: tuple[int, ...] = ()

    @staticmethod
    def from_answer(head: Mapping[str, Any], request: Mapping[str, Any]) -> EncodedRoutes:
        """From what a worker hands out: mcore_rl.rollout.vllm_routes."""
        return EncodedRoutes(
            layers=tuple(head["layers"]),
            top_k=int(head["top_k"]),
            wide=bool(head["wide"]),
            experts=base64.b64decode(request["experts"], validate=True),
            missing=tuple(request["missing"]),
        )

    def decoded(self, tokens: int) -> Routes:
        """Routes of a sequence of `tokens` tokens; those beyond the recorded ones are not known.

        ValueError when the bytes are not whole tokens, or more tokens than the sequence has.
        """
        dtype = torch.int16 if self.wide else torch.uint8
        row_bytes = len(self.layers) * self.top_k * dtype.itemsize
        found, rest = divmod(len(self.experts), row_bytes)
        if rest or found > tokens:
            raise ValueError(f"routes: {len(self.experts)} bytes, {row_bytes} a token, for a sequence of {tokens} tokens")
        experts = torch.zeros(tokens, len(self.layers), self.top_k, dtype=dtype)
        if found:
            rows = torch.frombuffer(bytearray(self.experts), dtype=dtype)
            experts[:found] = rows.view(found, len(self.layers), self.top_k)
        known = torch.arange(tokens) < found
        known[list(self.missing)] = False
        experts[~known] = 0
        return Routes(self.layers, experts, known)


def batch_routes(
    encoded: Sequence[EncodedRoutes | None], tokens: Sequence[int], names: Sequence[str]
) -> tuple[Routes, ...] | None:
    """Routes of a batch's sequences; None when no completion brought any. ValueError naming a sample that alone has none."""
    without = [name for name, one in zip(names, encoded, strict=True) if one is None]
    if len(without) == len(names):
        return None
    if without:
        raise ValueError(f"sample {without[0]} came back without routes, {len(names) - len(without)} others with")
    return tuple(one.decoded(count) for one, count in zip(encoded, tokens, strict=True) if one is not None)
