"""SamplingParams -> the request an engine gets, one per sample, each with a seed of its own.

One request per sample: the seed depends on (seed, prompt, sample) alone, so neither the batch nor the number of
engines changes what is drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.errors import EngineRefused
from mcore_rl.types import Completion, Prompt, SamplingParams

_FINISH_REASONS = ("stop", "length")
_ROUNDING_NATS = 1e-3  # a log-softmax in float32 over large logits may end a little above 0


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse what would not sample as it says (ValueError naming the field)."""
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise ValueError(f"sampling: temperature={sampling.temperature} must be finite and >= 0")
    if sampling.max_tokens < 1:
        raise ValueError(f"sampling: max_tokens={sampling.max_tokens} must be >= 1")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"sampling: top_p={sampling.top_p} must be in (0, 1]")
    if sampling.top_k < 0:
        raise ValueError(f"sampling: top_k={sampling.top_k} must be >= 0 (0 is off)")
    if sampling.samples_per_prompt < 1:
        raise ValueError(f"sampling: samples_per_prompt={sampling.samples_per_prompt} must be >= 1")
    if sampling.temperature == 0 and sampling.samples_per_prompt > 1:
        raise ValueError(
            f"sampling: samples_per_prompt={sampling.samples_per_prompt} at temperature=0 would be one answer repeated; use 1"
        )


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """A seed in [0, 2**63) from a stable hash; the same in every process and release of Python."""
    text = f"{seed}\x1f{prompt_id}\x1f{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def vllm_sampling(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """vLLM's own field names. `ignore_eos`: only stop_token_ids stop, never a model's own end token.

    logprobs=0 asks for the sampled token's log-prob only, of the untouched logits (raw_logprobs).
    """
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,
        "detokenize": False,
    }


def score_sampling() -> dict[str, Any]:
    """Log-probs of the prompt itself; the one generated token is thrown away."""
    return {"n": 1, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}


def top_sampling(count: int) -> dict[str, Any]:
    """Log-probs of the `count` likeliest tokens at every place of the prompt; the one generated token is thrown away."""
    return {**score_sampling(), "prompt_logprobs": count}


def completion_of(
    prompt: Prompt, index: int, output: Mapping[str, Any], *, max_tokens: int, version: int, where: str
) -> Completion:
    """An engine's output as the answer `index` of `prompt`. EngineRefused when it is no complete answer; where: for messages."""
    token_ids, logprobs = tuple(output["token_ids"]), tuple(output["logprobs"])
    if not token_ids or len(token_ids) != len(logprobs):
        raise EngineRefused(f"{where}: {len(token_ids)} tokens with {len(logprobs)} log-probs")
    if len(token_ids) > max_tokens:
        raise EngineRefused(f"{where}: token_ids has {len(token_ids)} tokens, max_tokens={max_tokens} were asked")
    for at, token in enumerate(token_ids):
        if type(token) is not int or token < 0:  # a bool is an int too
            raise EngineRefused(f"{where}: token_ids[{at}]={token!r} is no token id; an integer of at least 0 is needed")
    for at, logprob in enumerate(logprobs):
        if type(logprob) not in (int, float) or not -math.inf < logprob <= _ROUNDING_NATS:
            raise EngineRefused(f"{where}: logprobs[{at}]={logprob!r} is no log-prob; a finite number of at most 0 is needed")
    reason, ids = output["finish_reason"], prompt.token_ids
    if reason not in _FINISH_REASONS:
        raise EngineRefused(f"{where} ended with {reason!r}; only {_FINISH_REASONS} are complete answers")
    return Completion(prompt.prompt_id, index, ids, token_ids, logprobs, reason, version, output.get("routes"))


def generation_requests(prompts: Sequence[Prompt], sampling: SamplingParams, max_model_len: int) -> list[dict[str, Any]]:
    """One request per (prompt, sample), in that order. ValueError for a prompt that leaves no room for its answer."""
    check_sampling(sampling)
    requests: list[dict[str, Any]] = []
    for prompt in prompts:
        needed = len(prompt.token_ids) + sampling.max_tokens
        if not prompt.token_ids or needed > max_model_len:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} prompt tokens + max_tokens={sampling.max_tokens}"
                f" must be between 1 and rollout.max_model_len={max_model_len}"
            )
        for index in range(sampling.samples_per_prompt):
            seed = sample_seed(sampling.seed, prompt.prompt_id, index)
            requests.append({"token_ids": list(prompt.token_ids), "sampling": vllm_sampling(sampling, seed)})
    return requests
