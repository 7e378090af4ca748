"""The one router policy of a run and the state that all its routers share. No Megatron here.

A forward pass of a mixture-of-experts model always happens inside a named pass. The policy acts in the pass `train`, replay
also in `old`: reference, probe and evaluation passes always see the plain router.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.routes import REPLAY_COLUMNS, Routes

MODES = ("plain", "freeze", "jitter", "replay")
PASSES = ("train", "old", "reference", "probe", "eval")
REPLAY_PASSES = ("train", "old")
REPLAY_SOURCES = ("rollout", "old")


@dataclass(frozen=True)
class RouterPolicy:
    """plain; freeze (the gate is never trained); jitter (the gate's input is multiplied by uniform(1 - eps, 1 + eps));
    replay (recorded routes instead of the live choice, where a pass brings them).

    replay_from: rollout (R3: the engine recorded them) or old (R2: an `old` pass without routes records its own).
    ValueError for an unknown mode or source and for an eps that does not belong to the mode.
    """

    mode: str = "plain"
    jitter_eps: float = 0.0
    seed: int = 0
    replay_from: str = "rollout"

    def __post_init__(self) -> None:
        """Check the combination."""
        if self.mode not in MODES:
            raise ValueError(f"router.mode = {self.mode!r} is unknown; known: {', '.join(MODES)}")
        if self.replay_from not in REPLAY_SOURCES:
            raise ValueError(f"router.replay_from = {self.replay_from!r} is unknown; known: {', '.join(REPLAY_SOURCES)}")
        if self.mode == "jitter" and not 0.0 < self.jitter_eps < 1.0:
            raise ValueError(f"router.jitter_eps = {self.jitter_eps} must lie between 0 and 1 when router.mode is jitter")
        if self.mode != "jitter" and self.jitter_eps:
            raise ValueError(f"router.jitter_eps = {self.jitter_eps} has no effect when router.mode is {self.mode}; set it to 0")


@dataclass(frozen=True)
class RouterPass:
    """What the running forward is for, and which of its T packed tokens count.

    token_mask: bool [T / cp], the response tokens among this context-parallel rank's part of the packed row (all of the
    part, not only this rank's slice of it under sequence parallelism).
    step, micro_batch: name the jitter noise, so that it is drawn again from its names alone.
    batch_tokens: masked tokens of the whole update over all ranks; only the auxiliary loss needs it.
    routes: of the tokens of token_mask; they live exactly as long as the pass and its recomputation.
    """

    name: str
    token_mask: Tensor
    step: int = 0
    micro_batch: int = 0
    batch_tokens: int | None = None
    routes: Routes | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown pass, and routes of other tokens."""
        if self.name not in PASSES:
            raise ValueError(f"router pass {self.name!r} is unknown; known: {', '.join(PASSES)}")
        if self.routes is not None and self.routes.known.shape != self.token_mask.shape:
            raise ValueError(f"router_pass: routes of {len(self.routes.known)} tokens for a row of {len(self.token_mask)}")


@dataclass
class RouterControl:
    """Shared by all routers of this rank's chunks: the policy, the pass that is running, the auxiliary coefficient.

    stream: numbers that tell this rank's tokens from other ranks' (data and sequence parallel ranks) in the jitter noise.
    """

    policy: RouterPolicy = RouterPolicy()
    stream: tuple[int, ...] = ()
    aux_loss_coef: float = 0.0
    current: RouterPass | None = field(default=None)

    def running(self) -> RouterPass:
        """The pass that is running; RuntimeError outside any."""
        if self.current is None:
            raise RuntimeError(
                f"a mixture-of-experts forward outside any named pass: run it inside router_pass(chunks, one of {PASSES}, mask)"
            )
        return self.current

    def jitters(self, running: RouterPass) -> bool:
        """True when the policy adds noise in this pass."""
        return self.policy.mode == "jitter" and running.name == "train"

    def replays(self, running: RouterPass) -> bool:
        """True when recorded routes are used in this pass. ValueError for routes under a policy that ignores them."""
        if running.routes is not None and self.policy.mode != "replay":
            raise ValueError(f"router_pass: routes were given, but router.mode = {self.policy.mode} does not replay them")
        return running.routes is not None and running.name in REPLAY_PASSES

    def records(self, running: RouterPass) -> bool:
        """True when the routes of this pass are to be replayed in a later one (R2)."""
        recording = self.policy.mode == "replay" and self.policy.replay_from == "old"
        return recording and running.name == "old" and running.routes is None

    def noise(self, running: RouterPass, layer: int, like: Tensor) -> Tensor:
        """uniform(1 - eps, 1 + eps), fp32, shaped like the router input; the same for the same names, on this device."""
        key = (self.policy.seed, running.step, running.micro_batch, layer, *self.stream)
        digest = hashlib.blake2b(repr(key).encode("ascii"), digest_size=8).digest()
        generator = torch.Generator(device=like.device).manual_seed(int.from_bytes(digest, "big") >> 1)
        unit = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
        return 1.0 + self.policy.jitter_eps * (2.0 * unit - 1.0)


@dataclass(frozen=True)
class RoutingSums:
    """Sums over response tokens, one row per MoE layer: plain sums, so that ranks and micro-batches simply add up.

    layers: 0-based layer numbers. tokens_L; entropy_L in nats (full softmax over E); margin_L: sum of the gap between the
    K-th and the (K+1)-th probability; load_LE: how many of the K choices went to each expert; replay_L4: REPLAY_COLUMNS
    (models.routes), over all tokens that were replayed. All fp64.
    """

    layers: tuple[int, ...]
    tokens_L: Tensor
    entropy_L: Tensor
    margin_L: Tensor
    load_LE: Tensor
    replay_L4: Tensor

    @staticmethod
    def of_table(layers: tuple[int, ...], table: Tensor) -> RoutingSums:
        """From one routing_row per layer: [L, ROW_HEAD + E]."""
        replay = table[:, 3:ROW_HEAD]
        return RoutingSums(layers, table[:, 0], table[:, 1], table[:, 2], table[:, ROW_HEAD:], replay)

    def table(self) -> Tensor:
        """What of_table was made from."""
        means = torch.stack([self.tokens_L, self.entropy_L, self.margin_L], dim=1)
        return torch.cat([means, self.replay_L4, self.load_LE], dim=1)


ROW_HEAD = 3 + len(REPLAY_COLUMNS)


def routing_row(logits: Tensor, chosen: Tensor, top_k: int, replay: Tensor | None = None) -> Tensor:
    """[ROW_HEAD + E] fp64: tokens, entropy (nats), margin, REPLAY_COLUMNS, load per expert, summed over the n tokens given.

    logits [n, E]; chosen [n, E] bool, the K experts each token goes to; replay: Selection.counts, None for nothing replayed.
    """
    probabilities = logits.float().softmax(-1)
    entropy = torch.special.entr(probabilities).sum()
    ranked = probabilities.topk(min(top_k + 1, probabilities.shape[-1]), dim=-1).values
    margin = (ranked[:, top_k - 1] - ranked[:, top_k]).sum() if ranked.shape[-1] > top_k else entropy.new_zeros(())
    head = torch.stack([entropy.new_tensor(float(logits.shape[0])), entropy, margin]).double()
    replay = head.new_zeros(len(REPLAY_COLUMNS)) if replay is None else replay
    return torch.cat([head, replay, chosen.sum(0).double()])
