"""Recorded routes: which experts each token went to, and how they take the place of the live choice. No Megatron here.

Replay fixes which experts are used, never their weights: these always come from the live router logits of the chosen
experts (R3: arXiv 2510.11370; R2, the routes of the old-policy pass: arXiv 2507.18071). A token that was not recorded
routes live. Nothing here is kept between passes: routes belong to the pass that they are given to (models.router_policy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LARGEST_UINT8_EXPERTS = 256
REPLAY_COLUMNS = ("replayed", "compared", "top1_flips", "jaccard")


def route_dtype(num_experts: int) -> torch.dtype:
    """The smallest integer type that holds every expert's number: uint8 up to 256 experts, int16 beyond."""
    if not 1 <= num_experts <= torch.iinfo(torch.int16).max:
        raise ValueError(f"routes of a model of {num_experts} experts: 1 to {torch.iinfo(torch.int16).max} can be numbered")
    return torch.uint8 if num_experts <= LARGEST_UINT8_EXPERTS else torch.int16


@dataclass(frozen=True)
class Routes:
    """Experts of T tokens, those of one sequence or of one packed row.

    layers: 0-based numbers, in the whole model, of the L layers with experts. experts: [T, L, K] (route_dtype), the most
    probable first. known: bool [T]; where False nothing was recorded, and `experts` holds zeros.
    """

    layers: tuple[int, ...]
    experts: Tensor
    known: Tensor

    def __post_init__(self) -> None:
        """Refuse fields that do not line up (ValueError)."""
        if self.experts.dim() != 3 or self.experts.shape[:2] != (self.known.numel(), len(self.layers)):
            raise ValueError(
                f"routes: experts {tuple(self.experts.shape)} of {len(self.layers)} layers, {self.known.numel()} tokens"
            )
        if self.known.dtype != torch.bool or any(a >= b for a, b in pairwise(self.layers)):
            raise ValueError(f"routes: known must be bool and layers ascending, got {self.known.dtype} and {self.layers}")

    def check(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        """ValueError unless every known row names `top_k` different experts of the model for each of its layers."""
        if not set(layers) <= set(self.layers) or self.experts.shape[-1] != top_k:
            found = f"{self.experts.shape[-1]} experts in layers {self.layers}"
            raise ValueError(f"routes: {found}; the model has {top_k} in layers {tuple(layers)}")
        rows = self.experts[self.known][:, [self.layers.index(layer) for layer in layers]]
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < num_experts:
            raise ValueError(f"routes: experts {int(rows.min())} to {int(rows.max())}, the model has {num_experts}")
        if any(bool((rows == rows.roll(shift, -1)).any()) for shift in range(1, top_k // 2 + 1)):
            raise ValueError("routes: a token names the same expert twice")

    def of_layer(self, layer: int) -> Tensor:
        """int64 [T, K] of one layer. ValueError when nothing was recorded of it."""
        if layer not in self.layers:
            raise ValueError(f"routes: nothing was recorded of layer {layer}, only of {self.layers}")
        return self.experts[:, self.layers.index(layer)].long()

    def to(self, device: torch.device) -> Routes:
        """The same on another device."""
        return Routes(self.layers, self.experts.to(device), self.known.to(device))


def ranked(scores: Tensor, experts: Tensor) -> Tensor:
    """`experts` [n, K] of each token, best score [n, E] first."""
    return experts.gather(1, scores.gather(1, experts).argsort(dim=-1, descending=True, stable=True))


class Selection:
    """Answers Megatron's top-k for one forward of one router, and remembers what was live and what was chosen.

    Megatron asks whoever stands in for its own RouterReplay (`get_replay_topk`) for the choice alone and goes on with its
    own arithmetic, so that weights are those of the live logits, normalised as ever. Where the recorded set is the live
    one, the live answer stands, order included: replaying live routes changes no bit.
    """

    def __init__(self, recorded: Tensor | None, known: Tensor | None) -> None:
        """recorded: int64 [n, K] of this router's n tokens, known: bool [n]; None: nothing is replayed."""
        self._recorded = recorded
        self._known = known
        self.chosen: Tensor | None = None
        self._scores: Tensor | None = None
        self._live: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        live_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [n, K] of the chosen experts. scores: [n, E]; live_topk: what Megatron would choose."""
        values, live = live_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self._scores, self._live, self.chosen = scores.detach(), live, live
        if self._recorded is None or self._known is None:
            return values, live
        same = (self._recorded.sort(-1).values == live.sort(-1).values).all(-1)
        self.chosen = torch.where((self._known & ~same)[:, None], ranked(self._scores, self._recorded), live)
        return scores.gather(1, self.chosen), self.chosen

    def ranked_choice(self) -> Tensor:
        """The chosen experts [n, K], best score first. RuntimeError before Megatron asked."""
        if self._scores is None or self.chosen is None:
            raise RuntimeError("the router never asked for its replayed choice: Megatron's top-k was bypassed")
        return ranked(self._scores, self.chosen)

    def counts(self, mask: Tensor) -> Tensor:
        """fp64 [4], REPLAY_COLUMNS: tokens replayed; of those in `mask` [n]: how many, whose first recorded expert is not
        the live best, and the summed Jaccard index |A & B| / |A | B| of recorded and live set.

        Live means this layer's logits, after earlier layers were replayed.
        """
        if self._scores is None or self._live is None:
            raise RuntimeError("the router never asked for its replayed choice: Megatron's top-k was bypassed")
        if self._recorded is None or self._known is None:
            return torch.zeros(len(REPLAY_COLUMNS), dtype=torch.float64, device=mask.device)
        compared = self._known & mask
        recorded, live = self._recorded[compared], self._live[compared]
        shared = (recorded[:, :, None] == live[:, None, :]).sum((1, 2)).double()
        flips = (recorded[:, 0] != self._scores[compared].argmax(-1)).sum()
        jaccard = (shared / (2 * live.shape[-1] - shared)).sum()
        return torch.stack([self._known.sum().double(), compared.sum().double(), flips.double(), jaccard])
