"""KL between two lists of likeliest tokens that need not name the same ones.

n places, K and L listed tokens. What only one of the lists names is joined with all unlisted tokens into one event. Joining
can only lose divergence: the value is a lower bound, exact for whole vocabularies, and the closer the nearer the mass to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_REST = 1e-6
"""Floor of what is left for all other tokens: a sum of fp32 probabilities is known no better, and log 0 has no value."""


class TopList(NamedTuple):
    """Token ids int64 [n, K], each once in a row, and their log-probs [n, K] (nats)."""

    ids: Tensor
    logprobs: Tensor


class ListKl(NamedTuple):
    """Per place: KL(p || q) in nats, fp64 [n]; p's mass on the tokens that both name, fp64 [n]."""

    kl: Tensor
    shared_mass: Tensor


def list_kl(p: TopList, q: TopList) -> ListKl:
    """KL(p || q). ValueError when the lists are not of the same places."""
    if len(p.ids) != len(q.ids):
        raise ValueError(f"two lists of {len(p.ids)} and {len(q.ids)} places: both must be of the same tokens")
    known, order = q.ids.sort(dim=1)
    place = torch.searchsorted(known, p.ids).clamp_max(known.shape[1] - 1)
    shared = known.gather(1, place) == p.ids
    theirs = q.logprobs.double().gather(1, order.gather(1, place))
    mine = p.logprobs.double()
    listed = torch.where(shared, mine.exp() * (mine - theirs), 0.0).sum(1)
    mass, their_mass = (torch.where(shared, logprobs.exp(), 0.0).sum(1) for logprobs in (mine, theirs))
    return ListKl(listed + kl_of_rest(mass, their_mass), mass)


def rest_of(mass: Tensor) -> Tensor:
    """What tokens of this total probability leave for all others, at least SMALLEST_REST; no gradient at the floor."""
    return (1.0 - mass).clamp_min(SMALLEST_REST)


def kl_of_rest(mass: Tensor, other_mass: Tensor) -> Tensor:
    """The share that all unlisted tokens, as one event, have in KL(p || q), nats. mass, other_mass: what p and q list."""
    rest = rest_of(mass)
    return rest * (rest.log() - rest_of(other_mass).log())
