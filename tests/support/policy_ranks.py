"""What tests of the policy run on every rank, and how two updates are compared."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from mcore_rl.algorithms.distill import distill_loss
from mcore_rl.algorithms.losses import policy_loss
from mcore_rl.config.schema import Aggregation, AlgorithmConfig, OptimizerConfig
from mcore_rl.policy import MegatronPolicy, PolicySettings
from models.build import BuildOptions, build_model
from models.registry import read_spec
from models.router_policy import RouterPolicy
from models.weights import load_hf_weights
from parallel.optimizer import OptimizerSettings, build_ddp, build_optimizer

GSPO = AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean)


def build_chunks(groups, folder, router=None):
    """This rank's modules with the checkpoint's weights."""
    spec = read_spec(folder)
    chunks = build_model(spec, groups, BuildOptions(router=router or RouterPolicy()))
    load_hf_weights(chunks, spec, groups, folder)
    return chunks


def make_policy(groups, folder, chunks=None, loss=None, **settings):
    """A policy over `chunks` (default: the checkpoint's), GSPO and Adam without clipping unless `settings` say otherwise."""
    defaults = {"optimizer": OptimizerConfig(lr=1e-3, clip_grad=0.0), "total_steps": 100, "tokens_per_micro_batch": 64}
    made = PolicySettings(loss=loss or policy_loss(GSPO), **{**defaults, **settings})
    return MegatronPolicy(chunks or build_chunks(groups, folder), read_spec(folder), groups, made)


def full_tensors(source):
    """Name -> clone of every tensor of the model. Collective."""
    return {name: tensor.detach().clone() for name, tensor in source}


def full_gradients(policy):
    """Gradient of the last update, full tensors under Hugging Face names, unclipped. Collective.

    The distributed optimizer leaves each data-parallel rank with its own piece of the reduced gradient.
    """
    for chunk in policy._chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                pieces = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(pieces, pieces[group.rank()].clone(), group=group)
    model = policy._weights._model
    parameters = model._parameters
    model._parameters = {
        name: parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
        for name, parameter in parameters.items()
    }
    gradients = full_tensors(model)
    model._parameters = parameters
    return gradients


def use_sgd(policy, groups, lr):
    """Plain SGD in place of the policy's optimizer."""
    policy._chunks = build_ddp([chunk.module for chunk in policy._chunks], groups, distributed_optimizer=False)
    policy._optimizer = build_optimizer(policy._chunks, OptimizerSettings(kind="sgd", lr=lr, clip_grad=0.0))


def one_update(groups, device, folder, batch, options):
    """What one update did: report, gradients, weights before and after; the same on every rank.

    options: sgd (a learning rate: plain SGD instead of Adam), multiple (pad rows to it), distill (entropy coefficient:
    distillation instead of GSPO), the rest to PolicySettings.
    """
    options = dict(options)
    sgd, multiple = options.pop("sgd", None), options.pop("multiple", None)
    if "distill" in options:
        options["loss"] = distill_loss(options.pop("distill"))
    if sgd is not None:
        options["optimizer"] = OptimizerConfig(lr=sgd, clip_grad=0.0)
    policy = make_policy(groups, folder, **options)
    if sgd is not None:
        use_sgd(policy, groups, sgd)
    if multiple is not None:
        policy._plan = replace(policy._plan, multiple=multiple)
    before = full_tensors(policy.weights())
    report = policy.update(batch)
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "metrics": report.metrics,
        "logprobs": report.values.logprobs,
        "entropy": report.values.entropy,
        "routing": [vars(layer) for layer in report.routing],
        "gradients": full_gradients(policy),
        "before": before,
        "after": full_tensors(policy.weights()),
    }


def scoring(groups, device, folder, tokens, pass_name):
    """Log-probs and entropies of a forward pass without gradient."""
    values = make_policy(groups, folder).logprobs(tokens, pass_name)
    return values.logprobs, values.entropy


def assert_same_gradients(got, expected):
    """Per tensor within 1e-5 of its norm plus 1e-7 of the global one; loss and gradient norm within 1e-5."""
    assert abs(got["loss"] - expected["loss"]) <= 1e-5 * abs(expected["loss"])
    assert abs(got["grad_norm"] - expected["grad_norm"]) <= 1e-5 * expected["grad_norm"]
    assert got["gradients"].keys() == expected["gradients"].keys()
    for name, wanted in expected["gradients"].items():
        error = (got["gradients"][name].double() - wanted.double()).norm()
        assert error <= 1e-5 * wanted.double().norm() + 1e-7 * expected["grad_norm"], f"{name}: {error:.2e}"


def assert_same_updates(got, expected, names=None):
    """Per tensor (of `names`, None: all) within 1e-5 of the update's norm plus one rounding (2^-23) of the weight's."""
    assert got["after"].keys() == expected["after"].keys()
    chosen = expected["before"].keys() if names is None else names
    moved = 0
    for name in chosen:
        before = expected["before"][name]
        assert torch.equal(got["before"][name], before), name
        ours, wanted = (run["after"][name].double() - before.double() for run in (got, expected))
        allowed = 1e-5 * wanted.norm() + 2**-23 * before.double().norm()
        assert (ours - wanted).norm() <= allowed, f"{name}: {(ours - wanted).norm():.2e} > {allowed:.2e}"
        moved += int(wanted.norm() > 0)
    assert moved > len(chosen) // 2
