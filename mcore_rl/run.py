"""Everything one run holds while it trains: the parts, and nothing that decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.clock import StageClock
from mcore_rl.config.schema import RunConfig
from mcore_rl.policy_sampler import TrainerSampler
from mcore_rl.progress import Progress
from mcore_rl.rewards.user_reward import UserReward
from mcore_rl.rollout.fleet import Fleet
from mcore_rl.run_folder import RunFolder
from mcore_rl.seams import Policy, Reference, RolloutEngine, Task
from mcore_rl.sync.session import WeightSync
from mcore_rl.telemetry.audit_log import AuditLog
from mcore_rl.telemetry.fanout import FanOut
from mcore_rl.types import TokenBatch


@dataclass
class Run:
    """The parts of a run on one rank. `engine`, `reward` (a function of the user's) and `audit` exist on rank 0 only;
    `probe` are the sequences both engines score. fleet: the engine once more, where it is one that can be replaced.
    own_sampler: on every rank, where the trainer's own modules are the engine.
    """

    config: RunConfig
    folder: RunFolder
    task: Task
    policy: Policy
    weight_sync: WeightSync
    probe: TokenBatch
    stop_token_ids: tuple[int, ...]
    extraction: str
    reward_version: str
    sinks: FanOut
    progress: Progress | None = None
    engine: RolloutEngine | None = None
    own_sampler: TrainerSampler | None = None
    fleet: Fleet | None = None
    reference: Reference | None = None
    reward: UserReward | None = None
    audit: AuditLog | None = None
    clock: StageClock = field(default_factory=StageClock)
    log_rows: list[dict[str, float | list[float]]] = field(default_factory=list)

    def sampler(self) -> RolloutEngine:
        """The engine, for code that runs on rank 0. RuntimeError elsewhere: only rank 0 talks to it."""
        if self.engine is None:
            raise RuntimeError("the rollout engine was asked for on a rank that does not own it; only rank 0 does")
        return self.engine
