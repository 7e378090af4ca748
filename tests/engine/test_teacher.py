"""A real vLLM engine as a teacher: its likeliest tokens are those of transformers, place by place."""

import pytest
import torch

from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.teacher import Teacher
from mcore_rl.types import Completion, Prompt, SamplingParams

K = 6


@pytest.fixture(scope="module")
def taught(moe_ready):
    """The MoE engine holding model `a`, and transformers' model `a`."""
    moe_ready.renew()
    moe_ready.sync("a", version=0)
    return moe_ready.link, moe_ready.models["a"]


def answer(index: int, length: int) -> Completion:
    ids = tuple((7 * place + index) % 300 + 3 for place in range(length))
    return Completion(f"p{index}", 0, tuple(range(3 + index, 9 + 2 * index)), ids, (0.0,) * length, "length", 0)


def completions():
    return [answer(0, 4), answer(1, 5), answer(2, 6)]


def test_what_it_would_have_chosen(taught):
    link, model = taught
    answers = completions()
    for answer, judged in zip(answers, Teacher(link, max_model_len=256, top_k=K, vocab_size=320).judge(answers), strict=True):
        ids = torch.tensor([*answer.prompt_token_ids, *answer.token_ids])
        with torch.no_grad():
            table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        first = len(answer.prompt_token_ids)
        wanted = table[first - 1 : -1].topk(K, -1)
        assert judged.ids.shape == (len(answer.token_ids), K)
        torch.testing.assert_close(judged.logprobs, wanted.values, rtol=0, atol=1e-4)
        # A tie may be listed either way: each id must have the log-prob that stands beside it.
        own = table[first - 1 : -1].gather(1, judged.ids)
        torch.testing.assert_close(judged.logprobs, own, rtol=0, atol=1e-4)


def test_answers_without_a_proved_sync(taught):
    """Nobody syncs a teacher: it answers at once, with one version for all."""
    link, _ = taught
    prompts = [Prompt(f"q{i}", tuple(range(5, 20 + i)), "", "") for i in range(2)]
    sampling = SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=(2,))
    found = Teacher(link, max_model_len=256, top_k=K, vocab_size=320).generate(prompts, sampling)
    assert [one.prompt_id for one in found] == ["q0", "q1"]
    assert {one.version for one in found} == {0}


def test_a_token_that_the_student_does_not_have(taught):
    with pytest.raises(EngineRefused, match=r"the student has 4 tokens; use a smaller distill.top_k"):
        Teacher(taught[0], max_model_len=256, top_k=K, vocab_size=4).judge(completions())
