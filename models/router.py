"""The router of our mixture-of-experts layers: Megatron's top-k router plus the router policy and routing taps.

Which tokens does a rank see? Each context-parallel rank its part of the packed row. With sequence parallelism each
tensor-parallel rank routes its own slice of that; without it every one routes all of it, and only tensor-parallel rank 0
counts it. Either way each token of a layer is counted on exactly one rank, so a plain sum over all ranks
(`sum_over_ranks`) is the global value: data-parallel ranks hold different tokens, pipeline ranks different layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from models.router_policy import ROW_HEAD, RouterControl, RouterPass, RouterPolicy, RoutingSums, routing_row
from models.routes import Selection


class _AttachLoss(torch.autograd.Function):
    """Identity on `value` whose backward also back-propagates 1 x `loss`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = torch.ones_like(loss)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.loss_like


class PolicyRouter(TopKRouter):
    """Top-k router that obeys the shared RouterControl."""

    def __init__(self, config: Any, *, control: RouterControl, **kwargs: Any) -> None:
        """As Megatron's; frozen from the start when the policy says so, so that no optimizer ever holds the gate."""
        super().__init__(config=config, **kwargs)
        self.control = control
        self.sums: dict[str, Tensor] = {}
        self.recorded: dict[int, Tensor] = {}
        self._to_recompute: deque[RouterPass] = deque()
        if control.policy.mode == "replay" and config.moe_router_fusion:
            raise ValueError("router.mode = replay cannot choose experts inside a fused router: moe_router_fusion must be off")
        if control.policy.mode == "freeze":
            self.weight.requires_grad_(False)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map [n, E] of the n tokens in `input` [s, b, H]. RuntimeError outside a named pass."""
        running, counted = self._enter()
        seen = input
        if self.control.jitters(running):
            seen = input.float() * self.control.noise(running, self._layer, input)
            seen = seen if self.config.moe_router_dtype == "fp32" else seen.to(input.dtype)
        logits = self.gating(seen)
        selection = self._selection(running, input.shape[0] * input.shape[1])
        probs, routing_map = self._choose(logits, selection)
        flat = logits.reshape(-1, logits.shape[-1])
        if not counted:
            self._tap(running, flat.detach(), routing_map, selection)
        if self.control.aux_loss_coef and running.name == "train" and torch.is_grad_enabled():
            probs = _AttachLoss.apply(probs, self._aux_loss(running, flat, routing_map))
        return probs, routing_map

    @property
    def _layer(self) -> int:
        """0-based number of the layer in the whole model."""
        if self.layer_number is None:
            raise RuntimeError("this router was never given its layer number")
        return self.layer_number - 1

    def _enter(self) -> tuple[RouterPass, bool]:
        """The pass this forward belongs to, and whether its tokens were counted already.

        With activation recomputation a training forward runs twice: first without gradients, then, in the backward pass
        and outside any named pass, with them. The second one is the pass of the first, oldest first.
        """
        recomputes = self.config.recompute_granularity is not None
        if recomputes and torch.is_grad_enabled() and self._to_recompute:
            return self._to_recompute.popleft(), True
        running = self.control.running()
        if recomputes and running.name == "train" and not torch.is_grad_enabled():
            self._to_recompute.append(running)
        return running, False

    def _selection(self, running: RouterPass, tokens: int) -> Selection | None:
        """What is replayed or recorded in this forward of `tokens` tokens; None for the plain router."""
        if self.control.replays(running) and running.routes is not None:
            piece = self._piece(running, tokens)
            return Selection(running.routes.of_layer(self._layer)[piece], running.routes.known[piece])
        return Selection(None, None) if self.control.records(running) else None

    def _choose(self, logits: Tensor, selection: Selection | None) -> tuple[Tensor, Tensor]:
        """Megatron's routing, which asks `router_replay` for its choice of experts where there is one."""
        self.router_replay = selection
        try:
            return self.routing(logits)
        finally:
            self.router_replay = None

    def _piece(self, running: RouterPass, tokens: int) -> slice:
        """Which tokens of the pass' row are this rank's `tokens` tokens."""
        size, rank = self.tp_group.size(), self.tp_group.rank()
        if self.config.sequence_parallel and size > 1:
            expected, piece = tokens * size, slice(rank * tokens, (rank + 1) * tokens)
        else:
            expected, piece = tokens, slice(None)
        if running.token_mask.shape != (expected,):
            raise ValueError(
                f"router_pass: token_mask has shape {tuple(running.token_mask.shape)}, this rank's row has {expected} tokens"
            )
        return piece

    @property
    def _counts(self) -> bool:
        """Whether this rank speaks for its tokens: without sequence parallelism the first tensor-parallel rank does."""
        return self.config.sequence_parallel or not self.tp_group.rank()

    def _tap(self, running: RouterPass, logits: Tensor, routing_map: Tensor, selection: Selection | None) -> None:
        if not self._counts:
            return
        mask = running.token_mask[self._piece(running, logits.shape[0])]
        row = routing_row(logits[mask], routing_map[mask], self.topk, None if selection is None else selection.counts(mask))
        self.sums[running.name] = self.sums[running.name] + row if running.name in self.sums else row
        if selection is not None and self.control.records(running):
            self.recorded[running.micro_batch] = selection.ranked_choice()

    def _aux_loss(self, running: RouterPass, logits: Tensor, routing_map: Tensor) -> Tensor:
        """This rank's share of coef x mean over MoE layers of E x sum_e load_e x mean p_e (arXiv 2101.03961, equation 4).

        load_e is the micro-batch's share of choices (over the whole row), p the softmax over E, both over masked tokens;
        micro-batches are weighted by their tokens. The shares of all ranks and micro-batches add up to the loss.
        """
        if running.batch_tokens is None:
            raise ValueError("router_pass: the auxiliary loss needs batch_tokens, the masked tokens of the whole update")
        mask = running.token_mask[self._piece(running, logits.shape[0])]
        load = routing_map[mask].sum(0).float()
        sharing = self.tp_cp_group if self.config.sequence_parallel else self.cp_group
        if sharing.size() > 1:
            dist.all_reduce(load, group=sharing)
        load = load / load.sum().clamp_min(1.0)
        probability = logits[mask].float().softmax(-1).sum(0) / running.batch_tokens
        has_experts: Any = self.config.moe_layer_freq
        layers = sum(has_experts) if isinstance(has_experts, list) else self.config.num_layers
        return self.control.aux_loss_coef * logits.shape[-1] / layers * (load * probability).sum()

    def take(self, pass_name: str) -> Tensor | None:
        """The sums of one pass since they were last taken, None when it did not run; see routing_row.

        RuntimeError when a training forward still waits for its recomputation: the next one would run as its pass.
        """
        if self._to_recompute:
            left, self._to_recompute = len(self._to_recompute), deque()
            raise RuntimeError(f"layer {self._layer}: {left} training forwards were never recomputed")
        return self.sums.pop(pass_name, None)


def routers(chunks: Sequence[nn.Module]) -> list[PolicyRouter]:
    """All routers of this rank, by layer."""
    found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, PolicyRouter)]
    return sorted(found, key=lambda router: router.layer_number or 0)


def _control(chunks: Sequence[nn.Module]) -> RouterControl | None:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, PolicyRouter):
                return module.control
    return None


def built_policy(chunks: Sequence[nn.Module]) -> RouterPolicy:
    """The policy that this rank's routers obey; the plain one where it has none."""
    control = _control(chunks)
    return RouterPolicy() if control is None else control.policy


@contextmanager
def router_pass(
    chunks: Sequence[nn.Module],
    pass_name: str,
    token_mask: Tensor,
    *,
    step: int = 0,
    micro_batch: int = 0,
    batch_tokens: int | None = None,
) -> Iterator[None]:
    """As named_pass, with a pass made of these arguments; see RouterPass."""
    with named_pass(chunks, RouterPass(pass_name, token_mask, step, micro_batch, batch_tokens)):
        yield


@contextmanager
def named_pass(chunks: Sequence[nn.Module], named: RouterPass) -> Iterator[None]:
    """Name the pass of the forwards inside. Nothing to do for a dense model."""
    control = _control(chunks)
    if control is None:
        yield
        return
    before, control.current = control.current, named
    try:
        yield
    finally:
        control.current = before


def set_aux_loss_coef(chunks: Sequence[nn.Module], coef: float) -> None:
    """Coefficient of the load-balancing loss from now on; 0 switches it off. ValueError for a dense model with coef > 0."""
    control = _control(chunks)
    if control is None:
        if coef:
            raise ValueError(f"aux_loss_coef = {coef}, but the model has no experts")
        return
    control.aux_loss_coef = coef


def take_routing(chunks: Sequence[nn.Module], pass_name: str) -> RoutingSums:
    """What this rank counted in pass `pass_name` since the last call, cleared; use sum_over_ranks for the global value."""
    taken = [(router.layer_number or 0, router.take(pass_name)) for router in routers(chunks)]
    rows = [(number - 1, row) for number, row in taken if row is not None]
    if not rows:
        return RoutingSums.of_table((), torch.zeros(0, ROW_HEAD, dtype=torch.float64))
    return RoutingSums.of_table(tuple(layer for layer, _ in rows), torch.stack([row for _, row in rows]))


def take_routes(chunks: Sequence[nn.Module]) -> dict[int, dict[int, Tensor]]:
    """0-based layer -> micro-batch -> int64 [n, K] of this rank's tokens, as recorded since the last call; cleared.

    Empty where a pass records nothing, and on tensor-parallel ranks whose tokens another one speaks for.
    """
    taken: dict[int, dict[int, Tensor]] = {}
    for router in routers(chunks):
        if router.recorded:
            taken[(router.layer_number or 0) - 1], router.recorded = router.recorded, {}
    return taken


def sum_over_ranks(sums: RoutingSums, *, num_layers: int, num_experts: int, device: torch.device) -> RoutingSums:
    """Add up all ranks' sums; every rank gets all layers. Collective over the default group."""
    table = torch.zeros(num_layers, ROW_HEAD + num_experts, dtype=torch.float64, device=device)
    if sums.layers:
        table[list(sums.layers)] = sums.table().to(device)
    if dist.is_initialized():
        dist.all_reduce(table)
    return RoutingSums.of_table(tuple(range(num_layers)), table)
