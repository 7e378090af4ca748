"""The data that travels between the stages of a run. The seams between its parts are in `mcore_rl.seams`.

Shape suffixes: P prompts, G samples of a group, B sequences, T tokens, L layers, E experts, K top-k.
Everything here is plain data: no Megatron, no vLLM, no process group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from mcore_rl.errors import EngineDied, StaleRollout, StopRun, WeightMismatch
from mcore_rl.routes import EncodedRoutes
from models.routes import Routes

# Errors are part of this vocabulary too; they live apart so that the launcher needs no torch.
__all__ = ["EngineDied", "StaleRollout", "StopRun", "WeightMismatch"]


class Pass(str, Enum):
    """What a forward pass is for. Router modes and taps look at it; an unnamed forward is an error."""

    TRAIN = "train"
    OLD = "old"
    REFERENCE = "reference"
    PROBE = "probe"
    EVAL = "eval"


@dataclass(frozen=True)
class Prompt:
    """One prompt occurrence. `prompt_id` is unique per occurrence: the same question drawn twice has two ids."""

    prompt_id: str
    token_ids: tuple[int, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: exactly this, never a model's own generation defaults. temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    samples_per_prompt: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """One sampled answer. `logprobs[t]` (nats) is what the engine recorded for `token_ids[t]`.

    `token_ids` are the sampled ids, the stop token included; they are never re-tokenised.
    `version` is the version of the weights the engine says it sampled with. `routes`: experts of its tokens (router.mode=replay).
    """

    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: int
    routes: EncodedRoutes | None = None

    @property
    def sample_id(self) -> str:
        """Unique name: prompt id and sample index."""
        return f"{self.prompt_id}/{self.sample_index}"


@dataclass(frozen=True)
class Score:
    """What the task thinks of one completion. `correct` is the verdict; `reward` may be graded.

    goal: the task's own measure in [0, 1] (F1), before any gate. components: what each term of the reward paid.
    failure: why a reward function gave no reward (timeout, crash, error); reward is NaN then, and the sample is out of
    its group's statistics, of the baseline and of the loss.
    """

    reward: float
    correct: bool
    extracted: str | None
    format_ok: bool
    truncated: bool
    goal: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str | None = None


@dataclass(frozen=True)
class TokenBatch:
    """B whole sequences of uneven length.

    token_ids: B int64 tensors [T_b].
    loss_mask: B bool tensors [T_b]; True where the token is trained (predicted from its predecessors).
    Position 0 is never trained. sample_ids: B unique names. routes: the experts each sequence's tokens went to, B of them;
    passes `old` and `train` replay them where the router policy says so.
    """

    token_ids: tuple[Tensor, ...]
    loss_mask: tuple[Tensor, ...]
    sample_ids: tuple[str, ...]
    routes: tuple[Routes, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse ragged fields that do not line up (ValueError)."""
        if not len(self.token_ids) == len(self.loss_mask) == len(self.sample_ids):
            raise ValueError(
                f"TokenBatch: {len(self.token_ids)} token_ids, {len(self.loss_mask)} loss_mask, {len(self.sample_ids)} sample_ids"
            )
        for name, ids, mask in zip(self.sample_ids, self.token_ids, self.loss_mask, strict=True):
            if ids.shape != mask.shape or ids.dim() != 1:
                raise ValueError(
                    f"TokenBatch sample {name}: token_ids {tuple(ids.shape)} and loss_mask {tuple(mask.shape)} differ"
                )
            if mask.dtype != torch.bool or (mask.numel() and bool(mask[0])):
                raise ValueError(f"TokenBatch sample {name}: loss_mask must be bool and False at position 0")
        if self.routes is not None and [len(r.known) for r in self.routes] != [ids.numel() for ids in self.token_ids]:
            raise ValueError("TokenBatch: routes and token_ids have different lengths")

    def __len__(self) -> int:
        """Number of sequences B."""
        return len(self.token_ids)

    def select(self, index: Sequence[int]) -> TokenBatch:
        """The sequences at `index`, in that order."""
        return TokenBatch(
            tuple(self.token_ids[i] for i in index),
            tuple(self.loss_mask[i] for i in index),
            tuple(self.sample_ids[i] for i in index),
            None if self.routes is None else tuple(self.routes[i] for i in index),
        )


@dataclass(frozen=True)
class TokenValues:
    """Log-prob and entropy (nats) per token, aligned with TokenBatch: B fp32 tensors [T_b], 0 where not trained.

    routes: where the pass recorded its own, for a later one to replay (router.replay_from=old).
    """

    logprobs: tuple[Tensor, ...]
    entropy: tuple[Tensor, ...]
    routes: tuple[Routes, ...] | None = None


@dataclass(frozen=True)
class TeacherTopK:
    """What a teacher thinks of B sequences: its K most likely tokens at every position, and their log-probs (nats).

    ids: B int64 tensors [T_b, K]. logprobs: B fp32 tensors [T_b, K], likeliest first. Row t is of the choice of token t given
    those before it; rows of untrained tokens are zeros and mean nothing.
    """

    ids: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]


@dataclass(frozen=True)
class TrainBatch:
    """One optimizer update's worth of sequences, the same on every rank.

    token_weights: B fp32 tensors [T_b] from the global batch; the loss is the plain sum of weight x token loss.
    advantages: fp32 [B] (0 for supervised stages). old_logprobs: B tensors [T_b], or None when this very forward
    is its own `old` (exactly on-policy). sampler_logprobs: B tensors [T_b] as the engine recorded them.
    ratio_from_sampler: the sampler's stand under the ratio, not the old ones. All of B tensors [T_b], None when unused:
    scale: constant factors of the policy term. advantage_shift: added to the advantage of a token. reference_logprobs.
    teacher: what to be distilled into the policy. facts: what making this batch found out, logged with its update.
    """

    tokens: TokenBatch
    token_weights: tuple[Tensor, ...]
    advantages: Tensor
    old_logprobs: tuple[Tensor, ...] | None = None
    sampler_logprobs: tuple[Tensor, ...] | None = None
    ratio_from_sampler: bool = False
    scale: tuple[Tensor, ...] | None = None
    advantage_shift: tuple[Tensor, ...] | None = None
    reference_logprobs: tuple[Tensor, ...] | None = None
    teacher: TeacherTopK | None = None
    facts: Mapping[str, float] = field(default_factory=dict[str, float])

    def token_fields(self) -> dict[str, tuple[Tensor, ...]]:
        """Everything per token that the loss reads, by name: weights, old, scale, shift, reference, teacher_ids and
        teacher_logprobs. ValueError when the sampler's log-probs are wanted but lost."""
        if self.ratio_from_sampler and self.sampler_logprobs is None:
            raise ValueError("TrainBatch: ratio_from_sampler, but the batch carries no sampler log-probs")
        found = {
            "weights": self.token_weights,
            "old": self.sampler_logprobs if self.ratio_from_sampler else self.old_logprobs,
            "scale": self.scale,
            "shift": self.advantage_shift,
            "reference": self.reference_logprobs,
            "teacher_ids": self.teacher.ids if self.teacher else None,
            "teacher_logprobs": self.teacher.logprobs if self.teacher else None,
        }
        return {name: values for name, values in found.items() if values is not None}


@dataclass(frozen=True)
class RoutingLayer:
    """Routing of one MoE layer over the response tokens of one pass, summed over all ranks.

    load_E: how many of the K choices went to each expert. Entropy is of the full softmax over E, in nats.
    topk_margin: mean gap between the K-th and the (K+1)-th router probability. replayed_tokens: of the whole pass;
    top1_flip: share of them whose recorded best expert is not the trainer's own, topk_jaccard: mean overlap of the two sets
    (both over response tokens, NaN where nothing was replayed).
    """

    layer: int
    tokens: int
    router_entropy_nats: float
    load_E: tuple[float, ...]
    max_over_mean_load: float
    dead_experts: int
    topk_margin: float
    replayed_tokens: int = 0
    top1_flip: float = math.nan
    topk_jaccard: float = math.nan


@dataclass(frozen=True)
class UpdateReport:
    """What one optimizer update did. `metrics` are global values; `values` are the train pass' own log-probs."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    values: TokenValues
    routing: tuple[RoutingLayer, ...] = ()


@dataclass(frozen=True)
class TensorMeta:
    """One Hugging Face tensor of the whole model: name, dtype, full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class SyncReport:
    """One proved sync: what was sent, what was read back from the engine, and how long it took.

    probe_*: |trainer - engine| over the probe's tokens. floor_*: the same at the session's first sync, when the engine had
    started on these very weights: what the two sides' kernels alone make of it.
    """

    version: int
    tensors: int
    bytes: int
    buckets: int
    readback_tensors: int
    probe_max_nats: float
    probe_mean_nats: float
    seconds: dict[str, float] = field(default_factory=dict)
    floor_max_nats: float = math.nan
    floor_mean_nats: float = math.nan
