"""The trained model: log-probs, one optimizer update, weights. Every call is collective over the trainer's ranks.

The same class serves supervised and RL stages: `PolicySettings` holds the loss, the optimizer and the first version.
A later stage makes a new policy (fresh DistributedDataParallel and optimizer) over the same model chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.algorithms.losses import LossFunction
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.policy_logits import LastLogits
from mcore_rl.policy_metrics import UpdateSums, routing_layers
from mcore_rl.policy_routes import RouteTable, check_batch_routes, check_replayed, coverage
from mcore_rl.policy_rows import BatchValues, PolicyRow, RowPlan, count_tokens, row_values
from mcore_rl.policy_weights import PolicyWeights
from mcore_rl.schedules import learning_rate
from mcore_rl.types import Pass, RoutingLayer, StopRun, TokenBatch, TokenValues, TrainBatch, UpdateReport
from models.readout import forward_hidden, output_weight
from models.router import built_policy, named_pass, set_aux_loss_coef, sum_over_ranks, take_routes, take_routing
from models.router_policy import REPLAY_PASSES, RouterPass, RouterPolicy, RoutingSums
from models.routes import Routes
from models.spec import ModelSpec
from models.weights import ModelWeights
from parallel.groups import ProcessGroups
from parallel.optimizer import OptimizerSettings, build_ddp, build_optimizer
from parallel.schedule import ForwardStep, run_micro_batches
from parallel.vocab import Readout


@dataclass(frozen=True)
class PolicySettings:
    """What makes a policy out of model chunks.

    loss: `sft_loss` or `policy_loss(config)`. total_steps: length of the learning-rate schedule in optimizer steps.
    first_version: version before the first update (0 in RL, minus the number of steps in a supervised warm-up).
    temperature: that of the sampler; logits are divided by it once.
    """

    loss: LossFunction
    optimizer: OptimizerConfig
    total_steps: int
    tokens_per_micro_batch: int
    first_version: int = 0
    aux_loss_coef: float = 0.0
    temperature: float = 1.0


class MegatronPolicy:
    """`types.Policy` over this rank's Megatron chunks."""

    def __init__(self, chunks: Sequence[nn.Module], spec: ModelSpec, groups: ProcessGroups, settings: PolicySettings) -> None:
        """Wrap the chunks for data parallelism and build their optimizer.

        ValueError for a learning-rate schedule without room for its steps.
        """
        learning_rate(settings.optimizer, settings.optimizer.warmup_steps, settings.total_steps)
        self.settings = settings
        self._spec = spec
        self._groups = groups
        self._steps = 0
        self._router: RouterPolicy = built_policy(chunks)
        self._device = next(chunks[0].parameters()).device
        # A bf16 checkpoint trained in fp32 is synced in fp32: rounding it would be another policy.
        dtype = torch.float32 if all(p.dtype is torch.float32 for chunk in chunks for p in chunk.parameters()) else None
        self._weights = PolicyWeights(ModelWeights(chunks, spec, groups, dtype=dtype), lambda: self.version)
        self._readout = Readout(spec.vocab_size, tp_group=groups.tp, temperature=settings.temperature)
        self._plan = _row_plan(groups, settings, self._device)
        self._chunks = build_ddp(chunks, groups)
        self._optimizer = build_optimizer(self._chunks, optimizer_settings(settings.optimizer))
        set_aux_loss_coef(chunks, settings.aux_loss_coef)

    @property
    def version(self) -> int:
        """Optimizer steps taken, counted from `settings.first_version`."""
        return self.settings.first_version + self._steps

    @property
    def optimizer_name(self) -> str:
        """The class that really does the update."""
        return self._optimizer.implementation

    def weights(self) -> PolicyWeights:
        """The weights after the last optimizer step."""
        return self._weights

    def logprobs(self, batch: TokenBatch, pass_name: Pass) -> TokenValues:
        """Log-prob and entropy (nats) of every trained token, the whole batch on every rank, no gradient.

        ValueError for Pass.TRAIN: that pass belongs to `update`.
        """
        if pass_name is Pass.TRAIN:
            raise ValueError("logprobs(pass_name=train): the train pass belongs to update; name the pass old, probe or eval")
        check_batch_routes(batch, self._spec)
        values, rows = BatchValues(batch, self._device), self._plan.rows(batch)
        take_routes(self._chunks)
        self._run(rows, self._scoring_step(pass_name, values), forward_only=True)
        if batch.routes is not None and pass_name.value in REPLAY_PASSES:
            check_replayed(self._routing_sums(pass_name), batch, self._spec)
        take_routing(self._chunks, pass_name.value)
        return replace(values.gather(), routes=self._recorded(batch, rows, pass_name))

    def last_logits(self, token_ids: Sequence[Tensor]) -> Tensor:
        """fp32 [B, vocabulary] on every rank: logits, temperature 1, of the token after each of B sequences; no gradient.

        The whole of every sequence is computed. Collective.
        """
        nothing = tuple(torch.zeros(ids.shape, dtype=torch.bool) for ids in token_ids)
        tokens = TokenBatch(tuple(token_ids), nothing, tuple(str(index) for index in range(len(token_ids))))
        table = LastLogits(len(tokens), self._spec.vocab_size, self._groups.at, self._device)

        def step(micro_batch: PolicyRow, chunk: nn.Module) -> tuple[Tensor, Any]:
            output = self._forward(chunk, micro_batch, Pass.EVAL, batch_tokens=None)

            def finish(hidden: Tensor) -> tuple[None, None]:
                table.put(micro_batch, hidden, output_weight(chunk))
                return None, None

            return output, finish

        self._run(self._plan.rows(tokens), step, forward_only=True)
        take_routing(self._chunks, Pass.EVAL.value)
        return table.gather()

    def update(self, batch: TrainBatch) -> UpdateReport:
        """One optimizer step on the batch.

        StopRun when the loss or the gradient is not finite: the step is not taken and the weights stay as they were.
        """
        check_batch_routes(batch.tokens, self._spec)
        values, sums = BatchValues(batch.tokens, self._device), UpdateSums()
        lr = learning_rate(self.settings.optimizer, self._steps, self.settings.total_steps)
        self._optimizer.zero_grad()
        self._optimizer.set_lr(lr)
        rows = self._plan.rows(batch.tokens, batch)
        self._run(rows, self._training_step(batch, values, sums), forward_only=False)
        totals = sums.reduced(self._device)
        if not math.isfinite(totals.loss):
            raise StopRun(f"update {self._steps + 1}: loss is {totals.loss}; no optimizer step was taken")
        result = self._optimizer.step()
        if not result.ok:
            raise StopRun(f"update {self._steps + 1}: gradient norm is {result.grad_norm}; no optimizer step was taken")
        self._steps += 1
        metrics = {**totals.metrics(), "grad_norm": result.grad_norm, "lr": lr, "micro_batches": float(len(rows))}
        routing = self._routing(batch.tokens)
        return UpdateReport(totals.loss, result.grad_norm, metrics | self._coverage(batch.tokens), values.gather(), routing)

    def _run(self, rows: Sequence[PolicyRow], step: ForwardStep[PolicyRow], *, forward_only: bool) -> None:
        run_micro_batches(self._chunks, rows, step, groups=self._groups, forward_only=forward_only)

    def _scoring_step(self, pass_name: Pass, values: BatchValues) -> ForwardStep[PolicyRow]:
        def step(micro_batch: PolicyRow, chunk: nn.Module) -> tuple[Tensor, Any]:
            output = self._forward(chunk, micro_batch, pass_name, batch_tokens=None)

            def finish(hidden: Tensor) -> tuple[None, None]:
                found = row_values(hidden, output_weight(chunk), micro_batch, self._readout, self._groups.cp)
                if self._counts:
                    values.put(micro_batch, found.logprobs, found.entropy)
                return None, None

            return output, finish

        return step

    def _training_step(self, batch: TrainBatch, values: BatchValues, sums: UpdateSums) -> ForwardStep[PolicyRow]:
        batch_tokens = count_tokens(batch.tokens.loss_mask)

        def step(micro_batch: PolicyRow, chunk: nn.Module) -> tuple[Tensor, Any]:
            output = self._forward(chunk, micro_batch, Pass.TRAIN, batch_tokens=batch_tokens)

            def finish(hidden: Tensor) -> tuple[Tensor, None]:
                found = row_values(hidden, output_weight(chunk), micro_batch, self._readout, self._groups.cp)
                token_loss = self.settings.loss(micro_batch.loss_inputs(found))
                loss = micro_batch.weigh(token_loss.values) * self._share
                if self._counts:
                    values.put(micro_batch, found.logprobs, found.entropy)
                    sums.add(loss, micro_batch.mask, found.entropy, token_loss.stats)
                return loss, None

            return output, finish

        return step

    def _forward(self, chunk: nn.Module, row: PolicyRow, pass_name: Pass, *, batch_tokens: int | None) -> Tensor:
        named = RouterPass(pass_name.value, row.mask[row.part], self._steps, row.index, batch_tokens, row.routes)
        with named_pass([chunk], named):
            return forward_hidden(chunk, row.token_ids, row.cu_seqlens, row.packed.max_len)

    @property
    def _counts(self) -> bool:
        """One tensor-parallel and context-parallel rank speaks for all of them."""
        return self._groups.at.tp == 0 and self._groups.at.cp == 0

    @property
    def _share(self) -> float:
        """The first context-parallel rank carries a row's loss: all ranks know it, and their losses are added up."""
        return float(self._groups.at.cp == 0)

    def _routing(self, tokens: TokenBatch) -> tuple[RoutingLayer, ...]:
        if self._spec.moe is None:
            return ()
        sums = self._routing_sums(Pass.TRAIN)
        check_replayed(sums, tokens, self._spec)
        return tuple(row for row in routing_layers(sums) if self._spec.has_experts(row.layer))

    def _routing_sums(self, pass_name: Pass) -> RoutingSums:
        """Of all ranks; collective."""
        return sum_over_ranks(
            take_routing(self._chunks, pass_name.value),
            num_layers=self._spec.num_layers,
            num_experts=self._spec.moe.num_experts if self._spec.moe else 0,
            device=self._device,
        )

    def _coverage(self, tokens: TokenBatch) -> dict[str, float]:
        if self._router.mode != "replay":
            return {}
        known, total = coverage(tokens)
        return {"route_coverage": known / total}

    def _recorded(self, tokens: TokenBatch, rows: Sequence[PolicyRow], pass_name: Pass) -> tuple[Routes, ...] | None:
        """Every token's routes where this pass was to record them (R2). Collective then."""
        recording = self._router.replay_from == "old" and self._router.mode == "replay"
        if not recording or pass_name is not Pass.OLD or tokens.routes is not None:
            return None
        table = RouteTable(tokens, self._spec, self._groups.layout, self._groups.at, self._device)
        table.put({row.index: (row.packed, row.part) for row in rows}, take_routes(self._chunks))
        return table.gather()


def optimizer_settings(config: OptimizerConfig) -> OptimizerSettings:
    """The part of the configuration that the optimizer itself reads; the schedule reads the rest."""
    return OptimizerSettings(
        lr=config.lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        cpu_offload=config.cpu_offload,
    )


def _row_plan(groups: ProcessGroups, settings: PolicySettings, device: torch.device) -> RowPlan:
    return RowPlan(groups.layout, groups.at, settings.tokens_per_micro_batch, groups.layout.token_multiple, device)
