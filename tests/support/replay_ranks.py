"""What a rank does in the tests of routing replay, and routes to replay. Imported inside the ranks."""

from dataclasses import replace
from pathlib import Path

import torch
from model_ranks import loaded
from policy_ranks import full_gradients, make_policy

from mcore_rl.types import Pass
from models.router import RouterPass, named_pass, routers
from models.router_policy import RouterPolicy
from models.routes import Routes, route_dtype

REPLAY = RouterPolicy("replay")
FROM_OLD = RouterPolicy("replay", replay_from="old")


def random_routes(lengths, layers, num_experts, top_k, *, seed=3, unknown=()):
    """For each sequence different experts drawn anew for every token and layer; (sequence, token) pairs in `unknown` are not."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, length in enumerate(lengths):
        scores = torch.rand(length, len(layers), num_experts, generator=generator)
        experts = scores.argsort(-1)[..., :top_k].to(route_dtype(num_experts))
        known = torch.tensor([(index, token) not in unknown for token in range(length)])
        made.append(Routes(tuple(layers), experts * known[:, None, None].to(experts.dtype), known))
    return tuple(made)


def policy_of(groups, folder, router, *, recompute=False, **settings):
    """(chunks, policy) with this router policy."""
    _, chunks = loaded(groups, folder, router=router, recompute=recompute)
    return chunks, make_policy(groups, Path(folder), chunks, **settings)


def replay_update(groups, device, folder, batch, recompute, budget):
    """Old log-probs and one update, both under the batch's routes."""
    chunks, policy = policy_of(groups, folder, REPLAY, recompute=recompute, tokens_per_micro_batch=budget)
    old = policy.logprobs(batch.tokens, Pass.OLD)
    report = policy.update(batch)
    left = [bool(r.recorded or r._to_recompute or r.router_replay or r.control.current) for r in routers(chunks)]
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "metrics": report.metrics,
        "old": old.logprobs,
        "logprobs": report.values.logprobs,
        "routing": [vars(layer) for layer in report.routing],
        "gradients": full_gradients(policy),
        "left": any(left),
    }


def replayed_beside_others(groups, device, folder, batch):
    """An update under the batch's routes after another model replayed and was dropped, and a reference's log-probs beside it.

    alone: what the reference says before the replaying model exists.
    """
    _, gone = policy_of(groups, folder, REPLAY)
    gone.update(batch)
    del gone
    bare = replace(batch.tokens, routes=None)
    chunks, reference = policy_of(groups, folder, RouterPolicy())
    alone = reference.logprobs(bare, Pass.EVAL).logprobs
    _, policy = policy_of(groups, folder, REPLAY, tokens_per_micro_batch=96)
    old = policy.logprobs(batch.tokens, Pass.OLD)
    report = policy.update(batch)
    beside = reference.logprobs(bare, Pass.EVAL).logprobs
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "old": old.logprobs,
        "logprobs": report.values.logprobs,
        "routing": [vars(layer) for layer in report.routing],
        "gradients": full_gradients(policy),
        "reference": beside,
        "alone": alone,
        "left": any(bool(r.recorded or r._to_recompute or r.router_replay) for r in routers(chunks)),
    }


def live_routes_replayed(groups, device, folder, batch):
    """The routes that an `old` pass recorded; log-probs and gradients of an update with them, and of one without replay."""
    results = []
    for router in (RouterPolicy(), FROM_OLD):
        _, policy = policy_of(groups, folder, router)
        values = policy.logprobs(batch.tokens, Pass.OLD)
        report = policy.update(replace(batch, tokens=replace(batch.tokens, routes=values.routes)))
        routing = [vars(layer) for layer in report.routing]
        results.append((values.logprobs, report.values.logprobs, full_gradients(policy), routing))
    return values.routes, results


def weights_of_one_token(groups, device, folder, chosen):
    """Weights that the first layer's router gives one token with logits log(1), log(2), ..., and their gradient.

    chosen: the replayed experts, None for the live choice. Gradient: of the first expert's weight with respect to the logits.
    """
    _, chunks = loaded(groups, folder, router=REPLAY)
    router = routers(chunks)[0]
    count, hidden = router.weight.shape
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.arange(1.0, count + 1.0).log()
    token = torch.zeros(1, 1, hidden)
    token[..., 0] = 1.0
    routes = None if chosen is None else Routes((0,), torch.tensor([[chosen]], dtype=torch.uint8), torch.tensor([True]))
    with named_pass(chunks, RouterPass("train", torch.tensor([True]), routes=routes)):
        probs, routing_map = router(token)
    probs[0, 0].backward() if probs[0, 0].requires_grad and chosen else None
    gradient = None if router.weight.grad is None else router.weight.grad[:, 0].tolist()
    return probs[0].tolist(), routing_map[0].nonzero()[:, 0].tolist(), gradient


def refusals(groups, device, folder, batch, cases):
    """What an update says to each tuple of routes; the batch has none of its own."""
    _, policy = policy_of(groups, folder, REPLAY)
    _, plain = policy_of(groups, folder, RouterPolicy())
    said = []
    for target, routes in [(policy, routes) for routes in cases] + [(plain, cases[-1])]:
        try:
            target.update(replace(batch, tokens=replace(batch.tokens, routes=routes)))
        except ValueError as error:
            said.append(str(error))
    return said


def scored_against_engine(groups, device, folder, batch):
    """The trainer's log-probs without and with the batch's routes, its own routes, those it used, and one update's report."""
    chunks, policy = policy_of(groups, folder, REPLAY, tokens_per_micro_batch=1_000_000)
    _, recording = policy_of(groups, folder, FROM_OLD, tokens_per_micro_batch=1_000_000)
    live = recording.logprobs(replace(batch.tokens, routes=None), Pass.OLD)
    used = {}
    hooks = [
        router.register_forward_hook(lambda module, _, output: used.update({module.layer_number - 1: output[1].clone()}))
        for router in routers(chunks)
    ]
    replayed = policy.logprobs(batch.tokens, Pass.OLD)
    for hook in hooks:
        hook.remove()
    report = policy.update(batch)
    return {
        "live": live.logprobs,
        "replayed": replayed.logprobs,
        "own": torch.cat([routes.experts for routes in live.routes]),
        "used": torch.stack([used[layer] for layer in sorted(used)], dim=1),
        "metrics": report.metrics,
        "routing": [vars(layer) for layer in report.routing],
    }
