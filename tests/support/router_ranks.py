"""What a rank does in the router tests. Imported inside the ranks."""

from pathlib import Path

import torch
from model_ranks import loaded, pack, run_pipeline

from models.build import forward_packed
from models.parameters import canonical_parameters
from models.router import router_pass, routers, set_aux_loss_coef, sum_over_ranks, take_routing
from models.router_policy import ROW_HEAD, RouterPolicy, RoutingSums
from models.weights import ModelWeights
from parallel.optimizer import OptimizerSettings, build_ddp, build_optimizer
from parallel.schedule import run_micro_batches

JITTER = RouterPolicy("jitter", jitter_eps=0.1, seed=7)


def response_mask(micro):
    """Every real token but the first two of each sequence."""
    return micro.real & (micro.positions >= 2)


def logits_of(chunks, micro, pass_name, **names):
    with router_pass(chunks, pass_name, response_mask(micro), **names):
        return forward_packed(chunks[0], micro.token_ids, micro.cu_seqlens, micro.max_len)


def outside_any_pass(groups, device, folder, rows):
    _, chunks = loaded(groups, folder)
    micro = pack(groups, rows)
    try:
        forward_packed(chunks[0], micro.token_ids, micro.cu_seqlens, micro.max_len)
    except RuntimeError as error:
        return str(error)
    return None


def routing_on_rank(groups, device, folder, micro_batches_of_dp, recompute):
    """Sums over all ranks of a train pass, taken twice; recompute also runs the backward pass."""
    spec, chunks = loaded(groups, folder, recompute=recompute)
    for index, rows in enumerate(micro_batches_of_dp[groups.at.dp]):
        micro = pack(groups, rows)
        with router_pass(chunks, "train", response_mask(micro), micro_batch=index), torch.set_grad_enabled(recompute):
            output = run_pipeline(groups, spec, chunks, micro)
        if recompute:
            output.sum().backward()
    with router_pass(chunks, "eval", response_mask(micro)), torch.no_grad():
        run_pipeline(groups, spec, chunks, micro)
    size = {"num_layers": spec.num_layers, "num_experts": spec.moe.num_experts, "device": device}
    first, second = (sum_over_ranks(take_routing(chunks, "train"), **size) for _ in range(2))
    return [vars(first), vars(second)]


def jitter_on_rank(groups, device, folder, rows):
    """Logits under the jitter policy: no-grad passes, training passes by name, and the plain policy's."""
    _, plain = loaded(groups, folder)
    _, chunks = loaded(groups, folder, router=JITTER)
    micro = pack(groups, rows)
    with torch.no_grad():
        quiet = {f"{name}{again}": logits_of(chunks, micro, name) for name in ("old", "probe", "eval") for again in "12"}
        quiet["plain"] = logits_of(plain, micro, "eval")
    names = {"train": {}, "again": {}, "next_step": {"step": 1}, "next_micro_batch": {"micro_batch": 1}}
    noisy = {key: logits_of(chunks, micro, "train", **name).detach() for key, name in names.items()}
    with torch.no_grad():
        quiet["after"] = logits_of(chunks, micro, "old")
    return quiet, noisy


def watched_inputs(groups, device, folder, rows):
    """What the first layer's gate and experts saw in a jittered training pass, and the layer's own input."""
    _, chunks = loaded(groups, folder, router=JITTER)
    layer, seen = chunks[0].decoder.layers[0].mlp, {}
    gating = layer.router.gating
    layer.router.gating = lambda x: gating(seen.setdefault("gate", x))
    layer.register_forward_pre_hook(lambda _, args: seen.update(layer=args[0]))
    layer.experts.register_forward_pre_hook(lambda _, args: seen.update(experts=args[0]))
    logits_of(chunks, pack(groups, rows), "train")
    return {name: tensor.detach().reshape(-1, tensor.shape[-1]) for name, tensor in seen.items()}


def train_on_rank(groups, device, folder, rows, mode, steps):
    """Names of the tensors that `steps` updates with weight decay changed, and of those that the optimizer holds."""
    policy = JITTER if mode == "jitter" else RouterPolicy(mode)
    spec, chunks = loaded(groups, folder, router=policy)
    weights = ModelWeights(chunks, spec, groups)
    before = {name: tensor.clone() for name, tensor in weights}
    ddp = build_ddp(chunks, groups)
    optimizer = build_optimizer(ddp, OptimizerSettings(lr=1e-2, weight_decay=0.1))
    micro = pack(groups, rows)
    for step in range(steps):
        optimizer.zero_grad()
        run_micro_batches(ddp, [micro], _square_step(ddp, step), groups=groups, forward_only=False)
        assert optimizer.step().ok
    return sorted(name for name, tensor in weights if not torch.equal(tensor, before[name]))


def _square_step(chunks, step):
    def forward(micro, chunk):
        with router_pass(chunks, "train", response_mask(micro), step=step):
            output = forward_packed(chunk, micro.token_ids, micro.cu_seqlens, micro.max_len)
        return output, lambda logits: (logits.float().pow(2).mean(), None)

    return forward


def aux_gradients(groups, device, folder, micro_batches_of_dp, coef):
    """Gradient of every router weight of this rank when the auxiliary loss is the only loss."""
    spec, chunks = loaded(groups, folder)
    set_aux_loss_coef(chunks, coef)
    ddp = build_ddp(chunks, groups, distributed_optimizer=False)
    micros = [pack(groups, rows) for rows in micro_batches_of_dp[groups.at.dp]]
    total = sum(int(response_mask(pack(groups, rows)).sum()) for batches in micro_batches_of_dp for rows in batches)

    def forward(micro, chunk):
        with router_pass(ddp, "train", response_mask(micro), batch_tokens=total):
            output = forward_packed(chunk, micro.token_ids, micro.cu_seqlens, micro.max_len)
        return output, lambda logits: (logits.float().sum() * 0.0, None)

    for chunk in ddp:
        chunk.zero_grad_buffer()
    run_micro_batches(ddp, micros, forward, groups=groups, forward_only=False)
    parameters = canonical_parameters(chunks, spec, groups.layout, 0)
    return {name: p.main_grad.clone() for name, p in parameters.items() if name.endswith("router.weight")}


def recomputed_gradients(groups, device, folder, rows, recompute):
    """Router and embedding gradients of a jittered training forward, with and without activation recomputation."""
    _, chunks = loaded(groups, folder, router=JITTER, recompute=recompute)
    micros = [pack(groups, rows), pack(groups, rows[:2])]
    outputs = [logits_of(chunks, micro, "train", micro_batch=index) for index, micro in enumerate(micros)]
    for output in outputs:
        output.pow(2).sum().backward()
    gates = [router.weight.grad for router in routers(chunks)]
    return [*gates, chunks[0].embedding.word_embeddings.weight.grad]


def frozen_dense(groups, device, folder):
    """What building a dense model with a frozen router says."""
    try:
        loaded(groups, Path(folder), router=RouterPolicy("freeze"))
    except ValueError as error:
        return str(error)
    return None


def large_counts(groups, device):
    """Loads of one layer, 40,840 (one more on the second rank) and 40,960, added up over all ranks."""
    row = torch.zeros(1, ROW_HEAD + 2, dtype=torch.float64)
    row[0, ROW_HEAD:] = torch.tensor([40_840 + groups.at.dp, 40_960])
    sums = sum_over_ranks(RoutingSums.of_table((0,), row), num_layers=1, num_experts=2, device=device)
    return sums.load_LE[0].tolist()
