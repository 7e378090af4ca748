"""The exported checkpoint against the engine's answers: identical, a near tie, or different."""

import math

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mcore_rl.export_check import Scored, check_export, judge, score_answers
from mcore_rl.types import Completion


def answer(*tokens, prompt=(1, 2)):
    return Completion(
        prompt_id="p0",
        sample_index=0,
        prompt_token_ids=prompt,
        token_ids=tokens,
        logprobs=(0.0,) * len(tokens),
        finish_reason="length",
        version=0,
    )


def test_every_answer_is_one_of_three():
    same = Scored([5, 6], [0.0, 0.0])
    tie = Scored([5, 7], [0.0, 0.01])
    wrong = Scored([5, 7], [0.0, 0.03])
    broken = Scored([5, 7], [0.0, math.nan])
    found = judge([answer(5, 6)] * 4, [same, tie, wrong, broken], tie_nats=0.02)
    assert (found.prompts, found.matched, found.near_ties) == (4, 1, 1)
    assert found.first_difference == "p0, token 1: engine 6, transformers 7, 0.03 nats likelier (a tie: 0.02)"
    assert judge([answer(5, 6)], [broken], tie_nats=0.02).first_difference is not None
    assert judge([answer(5, 6)], [tie], tie_nats=0.0).first_difference is not None
    assert judge([answer(5, 6)], [same], tie_nats=0.0).first_difference is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=64, num_key_value_heads=1, initializer_range=0.3, **sizes)
    folder = tmp_path_factory.mktemp("export")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_scores_are_transformers_own_choices(checkpoint):
    model = Qwen2ForCausalLM.from_pretrained(checkpoint).eval()
    prompt = torch.tensor([[3, 14, 15]])
    greedy = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)[0, 3:].tolist()
    [row] = score_answers(checkpoint, [{"prompt": prompt[0].tolist(), "answer": greedy}])
    assert row.choices == greedy and row.gaps == [0.0] * 8
    [other] = score_answers(checkpoint, [{"prompt": prompt[0].tolist(), "answer": [*greedy[:4], (greedy[4] + 1) % 64]}])
    assert other.choices == greedy[:5] and other.gaps[:4] == [0.0] * 4 and other.gaps[4] > 0


def test_the_child_reads_the_checkpoint(checkpoint, tmp_path):
    prompt = (3, 14, 15)
    [row] = score_answers(checkpoint, [{"prompt": list(prompt), "answer": [0]}])
    right, wrong = answer(row.choices[0], prompt=prompt), answer((row.choices[0] + 1) % 64, prompt=prompt)
    found = check_export(checkpoint, [right, wrong], tmp_path / "requests.json", tie_nats=1e-6)
    assert (found.matched, found.near_ties) == (1, 0) and found.first_difference is not None
    with pytest.raises(RuntimeError, match="transformers could not answer from"):
        check_export(tmp_path, [right], tmp_path / "requests.json", tie_nats=1e-6)
