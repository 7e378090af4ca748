"""What a policy hands to the sync is what it trains with: the trainer's precision, not the checkpoint's."""

import policy_ranks
import pytest
import torch
from policy_cases import rollouts, save_checkpoint
from safetensors.torch import load_file, save_file

from parallel.layout import ParallelLayout


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory):
    """A checkpoint stored in bf16."""
    folder = tmp_path_factory.mktemp("bf16")
    save_checkpoint(folder)
    (path,) = folder.glob("*.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(world=2, ep=2)], ids=["one", "ep2"])
def test_fp32_training_of_a_bf16_checkpoint_syncs_fp32(ranks, bf16_folder, layout):
    for got in ranks.run(policy_ranks.one_update, layout, bf16_folder, rollouts(), {"sgd": 0.1}):
        assert {tensor.dtype for tensor in got["after"].values()} == {torch.float32}
        name = "model.layers.0.mlp.gate.weight"
        after = got["after"][name]
        assert not torch.equal(after, after.bfloat16().float())  # a bf16 export would have lost the update's low bits
