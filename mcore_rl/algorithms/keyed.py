"""Random numbers that belong to a token, not to a place in a batch.

The number of a token is a function of (seed, step, prompt occurrence id, sample, token index): the same on every rank and
in every order, packing and split of the batch.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def token_uniforms(seed: int, step: int, sample_id: str, tokens: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [tokens], one per token of the sample `prompt_id/sample_index`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{sample_id}".encode(), digest_size=8).digest()
    # torch takes a signed 64-bit seed; the top bit is dropped.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.rand(tokens, generator=generator, dtype=torch.float64)
