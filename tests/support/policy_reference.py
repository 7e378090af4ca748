"""The log-probs, the GSPO loss and its gradient by transformers' own modules, with the loss written out."""

from __future__ import annotations

import torch


def reference_logprobs(model, tokens):
    """transformers, one sequence at a time: log-prob and entropy of every trained token, 0 elsewhere."""
    logprobs, entropies = [], []
    for ids, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True):
        scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        chosen = scores[:-1].gather(1, ids[1:, None])[:, 0]
        entropy = -(scores.exp() * scores).sum(-1)[:-1]
        zero = torch.zeros(1, dtype=scores.dtype)
        logprobs.append(torch.where(mask, torch.cat([zero, chosen]), 0.0))
        entropies.append(torch.where(mask, torch.cat([zero, entropy]), 0.0))
    return logprobs, entropies


def reference_loss(model, batch):
    """GSPO: mean over sequences of -min(s A, clip(s) A), s = exp(mean log-ratio)."""
    total = 0.0
    current, _ = reference_logprobs(model, batch.tokens)
    for now, old, mask, advantage in zip(current, batch.old_logprobs, batch.tokens.loss_mask, batch.advantages, strict=True):
        ratio = ((now - old.double())[mask].mean()).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    return total / len(current)


def reference_gradients(model):
    """Hugging Face names as they are saved: experts one by one, gate before up."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.float()
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(part.chunk(2) for part in grad):
                stem = f"{name.removesuffix('gate_up_proj')}{expert}."
                gradients |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            gradients |= {f"{stem}{expert}.down_proj.weight": part for expert, part in enumerate(grad)}
        else:
            gradients[name] = grad
    return gradients
