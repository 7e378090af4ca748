"""The parity table: families x layouts, what a cell runs on its ranks, and how far it is from its references."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import model_ranks
import policy_ranks
import torch
import torch.distributed as dist
from policy_cases import rollouts, with_old
from policy_reference import reference_gradients, reference_logprobs, reference_loss
from tiny_models import VOCAB, nearest_tie, transformers_logits, write_tiny

from mcore_rl.policy_metrics import UpdateSums
from mcore_rl.policy_rows import BatchValues, RowPlan
from models.build import forward_packed
from models.registry import read_spec
from models.router import router_pass
from parallel.context import gather_sequence
from parallel.layout import ParallelLayout
from parallel.schedule import run_micro_batches

FAMILIES = ("qwen3", "qwen2", "llama_tied", "qwen3_moe", "qwen3_next", "qwen3_5_moe")
LAYOUTS = {
    "1": ParallelLayout(),
    "TP2+SP": ParallelLayout(world=2, tp=2, sp=True),
    "PP2": ParallelLayout(world=2, pp=2),
    "PP2xVPP2": ParallelLayout(world=2, pp=2, vpp=2),
    "EP2": ParallelLayout(world=2, ep=2),
    "TP2xEP2": ParallelLayout(world=4, tp=2, ep=2, sp=True),
    "ETP2": ParallelLayout(world=2, etp=2),
    "TP2xEP2xETP2": ParallelLayout(world=4, tp=2, ep=2, etp=2, sp=True),
    "CP2": ParallelLayout(world=2, cp=2),
    "DP2": ParallelLayout(world=2),
    "TP2xPP2": ParallelLayout(world=4, tp=2, pp=2, sp=True),
    "CP2xEP2": ParallelLayout(world=4, cp=2, ep=2),
}
KINDS = ("packed", "padded")
PADDED_TOKENS = 48
MOST_LOGITS = 1e-4
NEAREST_TIE = 1e-4
# The loss is about minus the mean advantage; nearer to zero than this, its relative error is that of a cancellation.
LEAST_ADVANTAGE = 0.1


@dataclass(frozen=True)
class Case:
    """A family's checkpoint, its batch, and transformers' answers: logits of every sequence, log-probs, gradients."""

    folder: Path
    batch: object
    logits: list[torch.Tensor]
    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    loss: float
    has_experts: bool


@dataclass(frozen=True)
class Distance:
    """How far a cell is: logits and log-probs in nats; gradients in units of what is allowed, worst over parameters."""

    logits: float
    logprobs: float
    gradients: float

    @property
    def ok(self):
        return self.logits <= MOST_LOGITS and self.logprobs <= MOST_LOGITS and self.gradients <= 1.0


def make_case(folder, family, **changes):
    """Write the checkpoint (`changes` to its config), and choose the first batch of no cancelling loss and no routing tie."""
    model = write_tiny(folder, family, **changes)
    has_experts = read_spec(folder).moe is not None
    for seed in range(1, 50):
        batch = rollouts(seed=seed, vocab=VOCAB)
        if abs(float(batch.advantages.mean())) < LEAST_ADVANTAGE:
            continue
        if not has_experts or nearest_tie(model, batch.tokens.token_ids) > NEAREST_TIE:
            break
    else:
        raise AssertionError(f"{family}: every batch has a token within {NEAREST_TIE} of a routing tie")
    logits = transformers_logits(model, list(batch.tokens.token_ids))
    model = model.double()
    model.config._experts_implementation = "eager"  # torch's grouped matmul knows no float64
    logprobs = [row.detach().float() for row in reference_logprobs(model, batch.tokens)[0]]
    batch = with_old(batch, logprobs)
    loss = reference_loss(model, batch)
    loss.backward()
    return Case(folder, batch, logits, logprobs, reference_gradients(model), loss.item(), has_experts)


class PaddedRows(RowPlan):
    """One sequence a row, each padded to the same length, dealt to the data-parallel ranks in turn."""

    def rows(self, tokens, train=None):
        mine = range(self.at.dp, len(tokens), self.layout.dp)
        return [self._row(number, (index,), tokens, train) for number, index in enumerate(mine)]


def cell(groups, device, folder, batch):
    """Per kind of batch: logits of this rank's sequences where it speaks for them; log-probs and gradients from rank 0."""
    policy = policy_ranks.make_policy(groups, folder)
    packed = policy._plan
    one_by_one = {field.name: getattr(packed, field.name) for field in fields(packed)} | {"multiple": PADDED_TOKENS}
    plans = {"packed": packed, "padded": PaddedRows(**one_by_one)}
    found = {}
    for kind in KINDS:
        policy._plan = plans[kind]
        logits = whole_logits(groups, policy, batch.tokens)
        logprobs, gradients = one_backward(policy, batch)
        found[kind] = (logits, logprobs, gradients) if dist.get_rank() == 0 else (logits, None, None)
    return found


def whole_logits(groups, policy, tokens):
    """{sequence: [T_b, V]} on the first tensor- and context-parallel rank of the last stage, of its own data-parallel rank."""

    def step(row, chunk):
        with router_pass([chunk], "eval", row.mask[row.part]):
            output = forward_packed(chunk, row.token_ids, row.cu_seqlens, row.packed.max_len)

        def finish(logits):
            whole = gather_sequence(model_ranks.whole_logits(groups, logits, VOCAB), row.cu_seqlens, groups.cp)
            return None, {index: part.clone() for index, part in row.packed.unpack(whole).items()}

        return output, finish

    rows = run_micro_batches(policy._chunks, policy._plan.rows(tokens), step, groups=groups, forward_only=True)
    return {index: part for row in rows for index, part in row.items()} if policy._counts else {}


def one_backward(policy, batch):
    """Log-probs of the whole batch, and the gradient of every parameter under its Hugging Face name."""
    values = BatchValues(batch.tokens, policy._device)
    policy._optimizer.zero_grad()
    rows = policy._plan.rows(batch.tokens, batch)
    policy._run(rows, policy._training_step(batch, values, UpdateSums()), forward_only=False)
    return values.gather().logprobs, policy_ranks.full_gradients(policy)


def distances(case, results, expected):
    """Per kind, the cell's distance from transformers (logits, log-probs) and from `expected[kind]` (gradients)."""
    return {kind: _distance(case, [result[kind] for result in results], expected[kind]) for kind in KINDS}


def _distance(case, results, expected):
    logits = {index: part for own, _, _ in results for index, part in own.items()}
    assert sorted(logits) == list(range(len(case.logits))), "a sequence was lost"
    _, logprobs, gradients = results[0]
    return Distance(
        farthest([logits[index] for index in sorted(logits)], case.logits),
        farthest(logprobs, case.logprobs),
        gradient_distance(gradients, expected),
    )


def farthest(got, wanted):
    """Largest absolute difference over all pairs; NaN when there is one."""
    return float(torch.stack([(one - other).abs().max() for one, other in zip(got, wanted, strict=True)]).max())


def gradient_distance(gradients, expected):
    """Worst over parameters of ||a - b|| / (1e-5 ||b|| + 1e-7 of the global norm)."""
    assert gradients.keys() == expected.keys(), sorted(gradients.keys() ^ expected.keys())[:3]
    total = torch.stack([grad.double().norm() for grad in expected.values()]).norm()
    ratios = [
        (gradients[name].double() - want.double()).norm() / (1e-5 * want.double().norm() + 1e-7 * total)
        for name, want in expected.items()
    ]
    return float(torch.stack(ratios).max())


def refusal(case, layout):
    """Why this layout cannot hold the family, as it is said before launch; None when it can."""
    try:
        layout.validate(read_spec(case.folder).dims())
    except ValueError as error:
        return str(error)
    return None


def must_be_refused(case, layout):
    """The only layouts that are refused: experts spread in a family that has none."""
    return not case.has_experts and (layout.ep > 1 or layout.etp > 1)
