"""The model up to its last hidden states, and the output weight that turns them into logits chunk by chunk.

Megatron's own forward ends with logits [T, V]. Here it ends one step earlier, so that log-probs never need them whole
(parallel.vocab).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from models.build import forward_packed
from models.parameters import unwrapped


def forward_hidden(chunk: torch.nn.Module, token_ids: Tensor, cu_seqlens: Tensor, max_len: int) -> Tensor:
    """As `forward_packed`, but the last pipeline stage gives the normed hidden states [T, H], whole on every tp rank.

    The gradient that comes back into them must be whole on every tp rank too, as `linear_logprob_entropy` leaves it.
    """
    model = unwrapped(chunk)
    if not model.post_process:
        return forward_packed(chunk, token_ids, cu_seqlens, max_len)
    with _without_output_layer(model):
        hidden = forward_packed(chunk, token_ids, cu_seqlens, max_len)
    if model.config.sequence_parallel:
        # Backward takes this rank's slice of the gradient: adding the ranks' gradients up is done where it arises.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=model.pg_collection.tp)
    return hidden[:, 0]


def output_weight(chunk: torch.nn.Module) -> Tensor:
    """This rank's rows of the output weight [W, H] on the last pipeline stage: the embedding's own where it is tied."""
    model = unwrapped(chunk)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight
    if weight is None:
        raise RuntimeError("output_weight: only the last pipeline stage has one")
    return weight


@contextmanager
def _without_output_layer(model: GPTModel) -> Iterator[None]:
    """GPTModel hands on what its decoder gives, final norm included, when it is told not to be the last stage."""
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = True
