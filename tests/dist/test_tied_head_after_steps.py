"""A head tied to an embedding on another pipeline stage: one matrix, after every optimizer step, and sent once."""

from __future__ import annotations

import policy_ranks
import pytest
import torch
from policy_cases import rollouts
from tiny_models import VOCAB, stored_tensors, write_tiny

from models.readout import output_weight
from parallel.layout import ParallelLayout

EMBEDDING = "model.embed_tokens.weight"
LAYOUTS = [ParallelLayout(world=2, pp=2), ParallelLayout(world=3, pp=3, first_stage_layers=1, last_stage_layers=1)]


def heads_and_embeddings(groups, device, folder, batch):
    """Before and after one update: this stage's embedding and head, where it has them; at the end what is sent."""
    policy = policy_ranks.make_policy(groups, folder)
    found = []
    for _ in range(2):
        model = policy._chunks[0].module
        embedding = model.embedding.word_embeddings.weight if groups.first_stage else None
        head = output_weight(policy._chunks[0]) if groups.last_stage else None
        found.append([None if value is None else value.detach().clone() for value in (embedding, head)])
        policy.update(batch)
    return found, policy_ranks.full_tensors(policy.weights())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["pp2", "pp3"])
def test_embedding_and_head_stay_one(ranks, tmp_path, layout):
    write_tiny(tmp_path, "llama_tied")
    batch = rollouts(vocab=VOCAB)
    first, *_, last = ranks.run(heads_and_embeddings, layout, tmp_path, batch)
    (before, after), sent = first
    (head_before, head_after) = (pair[1] for pair in last[0])
    stored = stored_tensors(tmp_path)[EMBEDDING]
    assert torch.equal(before[0], head_before)
    assert torch.equal(after[0], head_after)
    assert torch.equal(before[0][:VOCAB], stored)
    assert not torch.equal(after[0], before[0])
    assert "lm_head.weight" not in sent
    assert list(sent).count(EMBEDDING) == 1
