"""Fields of the router section: what the routers of a mixture-of-experts model do in training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RouterMode(str, Enum):
    plain = "plain"
    freeze = "freeze"
    jitter = "jitter"
    replay = "replay"


class ReplaySource(str, Enum):
    """rollout (R3): the routes that the engine recorded; old (R2): those of the trainer's own `old` pass.

    An update that is its own `old` (the first of a batch) has nothing to replay under R2: its route_coverage is 0.
    """

    rollout = "rollout"
    old = "old"


@dataclass
class RouterConfig:
    """jitter_eps: the router input is multiplied by uniform(1 - eps, 1 + eps) in the training forward only.

    replay_from: whose experts the replay mode uses; their weights are always those of the live router.

    aux_loss_coef is explicit and 0 in RL: a model's own router_aux_loss_coef is never taken silently.
    """

    mode: RouterMode = RouterMode.plain
    jitter_eps: float = 0.0
    aux_loss_coef: float = 0.0
    replay_from: ReplaySource = ReplaySource.rollout
