"""The parts of tools/gpu_check.py. Each returns its figures, or raises: MissingPackage, or ValueError when a number is off."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.algorithms.aggregate import token_weights
from mcore_rl.algorithms.losses import policy_loss
from mcore_rl.config.schema import Aggregation, AlgorithmConfig, BuildConfig, OptimizerConfig
from mcore_rl.policy import MegatronPolicy, PolicySettings
from mcore_rl.tiny_model import build_tiny
from mcore_rl.types import TokenBatch, TrainBatch, UpdateReport
from models.attention import packed_causal_attention
from models.build import BuildOptions, build_model
from models.delta_net_kernel import load_kernel, preflight
from models.gated_delta_rule import DeltaRuleInputs, chunked_gated_delta_rule
from models.registry import read_spec
from models.weights import ModelWeights, load_hf_weights
from parallel.groups import ProcessGroups
from parallel.vocab import Readout, linear_logprob_entropy

Figures = dict[str, float | int | str]
LENGTHS = (1, 2, 63, 64, 65, 130, 300)
MOE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
HYBRID: dict[str, object] = MOE | {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 128,
}


class MissingPackage(Exception):
    """A part cannot run here; the message names the package."""


@dataclass(frozen=True)
class Setup:
    """A world of one rank, and where files may go."""

    device: torch.device
    groups: ProcessGroups
    scratch: Path

    @property
    def small(self) -> bool:
        """On the CPU everything runs, in small."""
        return self.device.type == "cpu"

    def wait(self) -> None:
        """Until the device is done."""
        if not self.small:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Best of some runs after a warm-up."""
        work()
        best = math.inf
        for _ in range(repeats):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            best = min(best, time.perf_counter() - started)
        return best


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    wide = want.detach().double().cpu()
    return float((got.detach().double().cpu() - wide).norm() / wide.norm())


def demand(value: float, limit: float, what: str) -> float:
    """The value; ValueError when it is not below the limit (NaN is not)."""
    if not value <= limit:
        raise ValueError(f"{what} is {value:.3g}; at most {limit:g} is right")
    return value


def gated_delta_net(setup: Setup) -> Figures:
    """Kernel against the rule token by token (values, gradients, packed), and its speed against the chunked reference."""
    if not setup.small and find_spec("fla") is None:
        raise MissingPackage("fla-core (flash-linear-attention) is not installed")
    figures: Figures = {"worst_relative": preflight(setup.device)}
    tokens, heads, channels = (256, 2, 32) if setup.small else (8192, 16, 128)
    dtype = torch.float32 if setup.small else torch.bfloat16
    shape = (tokens, heads, channels)
    q, k, v = (torch.randn(shape, device=setup.device, dtype=dtype) for _ in range(3))
    decay, beta = -torch.rand(shape[:2], device=setup.device), torch.rand(shape[:2], device=setup.device)
    for leaf in (q, k, v, decay, beta):
        leaf.requires_grad_()
    inputs = DeltaRuleInputs(q, k, v, decay, beta)
    borders = (0, tokens // 3, tokens)
    cu_seqlens = torch.tensor(borders, device=setup.device)

    def run(rule: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(rule().float().square().sum(), tuple(inputs))

    figures |= {"tokens": tokens, "reference_s": setup.seconds(run(lambda: chunked_gated_delta_rule(inputs, borders)), 1)}
    if not setup.small:
        kernel = load_kernel()
        figures["kernel_s"] = setup.seconds(run(lambda: kernel.rule(inputs, cu_seqlens)))
    return figures


def packed_attention(setup: Setup) -> Figures:
    """Packed rows against softmax(q k / sqrt(d)) v written out per sequence in float64: values and gradients."""
    generator = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    query = torch.randn(tokens, 8, 64, generator=generator)
    key, value = (torch.randn(tokens, 2, 64, generator=generator) for _ in range(2))
    borders = tuple(sum(LENGTHS[:count]) for count in range(len(LENGTHS) + 1))
    exact = [t.double().requires_grad_() for t in (query, key, value)]
    wanted = torch.cat([_softmax_attention(*(t[a:b] for t in exact)) for a, b in pairwise(borders)])
    wanted_grads = torch.autograd.grad(wanted.square().sum(), exact)
    figures: Figures = {}
    for name, dtype, limit in (("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 2e-2)):
        leaves = [t.to(setup.device, dtype).requires_grad_() for t in (query, key, value)]
        out = packed_causal_attention(leaves[0], leaves[1], leaves[2], borders, None)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        pairs = [(out, wanted), *zip(grads, wanted_grads, strict=True)]
        worst = max(relative(got, want) for got, want in pairs)
        figures[f"worst_relative_{name}"] = demand(worst, limit, f"packed attention in {name}, relative difference")
    return figures


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence by its definition; each key head serves the same number of query heads."""
    shared = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), values)


def moe_step(setup: Setup) -> Figures:
    """One GSPO update of a small Qwen3-MoE, bf16 against fp32."""
    return _train_step(setup, "Qwen3MoeForCausalLM", MOE)


def hybrid_step(setup: Setup) -> Figures:
    """One GSPO update of a small Qwen3-Next (GatedDeltaNet, gated attention, shared expert), bf16 against fp32."""
    if not setup.small and find_spec("fla") is None:
        raise MissingPackage("fla-core (flash-linear-attention) is not installed")
    return _train_step(setup, "Qwen3NextForCausalLM", HYBRID)


def _train_step(setup: Setup, architecture: str, sizes: dict[str, object]) -> Figures:
    folder = build_tiny(setup.scratch / architecture, BuildConfig(architecture, dict(sizes)), seed=7)
    started = time.perf_counter()
    wide = _update(setup, folder, torch.float32)
    narrow = _update(setup, folder, torch.bfloat16)
    gaps = torch.cat([a - b for a, b in zip(wide.values.logprobs, narrow.values.logprobs, strict=True)]).abs()
    return {
        "two_steps_s": time.perf_counter() - started,
        "grad_norm_fp32": wide.grad_norm,
        "grad_norm_relative": demand(abs(narrow.grad_norm / wide.grad_norm - 1), 0.1, "gradient norm, bf16 against fp32"),
        "logprob_mean_abs_nats": demand(float(gaps.mean()), 0.05, "mean |log-prob difference|, bf16 against fp32"),
        "logprob_max_abs_nats": float(gaps.max()),
    }


def _update(setup: Setup, folder: Path, dtype: torch.dtype) -> UpdateReport:
    spec = read_spec(folder)
    chunks = build_model(spec, setup.groups, BuildOptions(dtype=dtype, impl="local", device=setup.device))
    load_hf_weights(chunks, spec, setup.groups, folder)
    loss = policy_loss(AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean))
    settings = PolicySettings(loss, OptimizerConfig(lr=1e-4), total_steps=10, tokens_per_micro_batch=512)
    return MegatronPolicy(chunks, spec, setup.groups, settings).update(_batch(spec.vocab_size))


def _batch(vocab_size: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(11)
    ids = tuple(torch.randint(0, vocab_size, (max(length, 2),), generator=generator) for length in LENGTHS)
    masks = tuple(torch.arange(len(row)) >= max(1, len(row) // 3) for row in ids)
    tokens = TokenBatch(ids, masks, tuple(f"s{index}" for index in range(len(ids))))
    weights = token_weights(masks, Aggregation.seq_mean_token_mean).weights
    return TrainBatch(tokens, weights, torch.randn(len(ids), generator=generator))


def log_prob(setup: Setup) -> Figures:
    """Log-prob and entropy of 32k tokens over 152k words, forward and backward, without [T, V] logits."""
    tokens, words, width = (256, 1003, 64) if setup.small else (32_768, 151_936, 2048)
    dtype = torch.float32 if setup.small else torch.bfloat16
    hidden = torch.randn(tokens, width, device=setup.device, dtype=dtype).requires_grad_()
    weight = (torch.randn(words, width, device=setup.device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(0, words, (tokens,), device=setup.device)
    readout = Readout(words)

    def run() -> None:
        logprob, _ = linear_logprob_entropy(hidden, weight, targets, readout)
        torch.autograd.grad(logprob.sum(), (hidden, weight))

    with torch.no_grad():
        got = linear_logprob_entropy(hidden[:128], weight, targets[:128], readout)[0]
        want = (hidden[:128].double() @ weight.double().T).log_softmax(-1).gather(1, targets[:128, None])[:, 0]
    figures: Figures = {"tokens": tokens, "max_abs_nats": demand(float((got - want).abs().max()), 0.05, "|log-prob error|")}
    live = 0 if setup.small else torch.cuda.memory_allocated()
    if not setup.small:
        torch.cuda.reset_peak_memory_stats()  # the reference above is not what is measured
    figures["forward_backward_s"] = setup.seconds(run)
    if not setup.small:
        figures["peak_above_live_bytes"] = torch.cuda.max_memory_allocated() - live
        figures["logits_would_be_bytes"] = tokens * words * 4
    return figures


def export(setup: Setup) -> Figures:
    """Every weight out of the modules as Hugging Face tensors in host memory: bytes per second."""
    sizes = MOE if setup.small else MOE | {"hidden_size": 2048, "num_hidden_layers": 12, "moe_intermediate_size": 768}
    folder = build_tiny(setup.scratch / "export", BuildConfig("Qwen3MoeForCausalLM", dict(sizes)), seed=7)
    spec = read_spec(folder)
    options = BuildOptions(dtype=torch.bfloat16, impl="local", device=setup.device)
    chunks = build_model(spec, setup.groups, options)
    load_hf_weights(chunks, spec, setup.groups, folder)
    weights = ModelWeights(chunks, spec, setup.groups, dtype=torch.bfloat16)
    total = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in weights.metadata())
    seconds = setup.seconds(lambda: [tensor.cpu() for _, tensor in weights])
    return {"bytes": total, "export_s": seconds, "bytes_per_s": total / seconds}


PARTS: dict[str, Callable[[Setup], Figures]] = {
    "gdn": gated_delta_net,
    "attention": packed_attention,
    "moe": moe_step,
    "hybrid": hybrid_step,
    "logprob": log_prob,
    "export": export,
}
