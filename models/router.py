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

from models.router_policy import RouterControl, RouterPass, RoutingSums, routing_row


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
        self._to_recompute: deque[RouterPass] = deque()
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
        probs, routing_map = self.routing(logits)
        flat = logits.reshape(-1, logits.shape[-1])
        if not counted:
            self._tap(running, flat.detach(), routing_map)
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

    def _local_mask(self, running: RouterPass, tokens: int) -> Tensor:
        """The part of the mask that belongs to this rank's `tokens` tokens."""
        size, rank = self.tp_group.size(), self.tp_group.rank()
        if self.config.sequence_parallel and size > 1:
            expected, piece = tokens * size, slice(rank * tokens, (rank + 1) * tokens)
        else:
            expected, piece = tokens, slice(None)
        if running.token_mask.shape != (expected,):
            raise ValueError(
                f"router_pass: token_mask has shape {tuple(running.token_mask.shape)}, this rank's row has {expected} tokens"
            )
        return running.token_mask[piece]

    def _tap(self, running: RouterPass, logits: Tensor, routing_map: Tensor) -> None:
        mask = self._local_mask(running, logits.shape[0])
        if not self.config.sequence_parallel and self.tp_group.rank():
            mask = torch.zeros_like(mask)
        row = routing_row(logits[mask], routing_map[mask], self.topk)
        self.sums[running.name] = self.sums[running.name] + row if running.name in self.sums else row

    def _aux_loss(self, running: RouterPass, logits: Tensor, routing_map: Tensor) -> Tensor:
        """This rank's share of coef x mean over MoE layers of E x sum_e load_e x mean p_e (arXiv 2101.03961, equation 4).

        load_e is the micro-batch's share of choices (over the whole row), p the softmax over E, both over masked tokens;
        micro-batches are weighted by their tokens. The shares of all ranks and micro-batches add up to the loss.
        """
        if running.batch_tokens is None:
            raise ValueError("router_pass: the auxiliary loss needs batch_tokens, the masked tokens of the whole update")
        mask = self._local_mask(running, logits.shape[0])
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
        """The sums of one pass since they were last taken, None when it did not run; see routing_row."""
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
    """Name the pass of the forwards inside. Nothing to do for a dense model. See RouterPass for the arguments."""
    named = RouterPass(pass_name, token_mask, step, micro_batch, batch_tokens)
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
        empty = torch.zeros(0, dtype=torch.float64)
        return RoutingSums((), empty, empty, empty, empty.reshape(0, 0))
    table = torch.stack([row for _, row in rows])
    return RoutingSums(tuple(layer for layer, _ in rows), table[:, 0], table[:, 1], table[:, 2], table[:, 3:])


def sum_over_ranks(sums: RoutingSums, *, num_layers: int, num_experts: int, device: torch.device) -> RoutingSums:
    """Add up all ranks' sums; every rank gets all layers. Collective over the default group."""
    table = torch.zeros(num_layers, 3 + num_experts, dtype=torch.float64, device=device)
    for row, layer in enumerate(sums.layers):
        table[layer, :3] = torch.stack([sums.tokens_L[row], sums.entropy_L[row], sums.margin_L[row]])
        table[layer, 3:] = sums.load_LE[row]
    if dist.is_initialized():
        dist.all_reduce(table)
    return RoutingSums(tuple(range(num_layers)), table[:, 0], table[:, 1], table[:, 2], table[:, 3:])
