"""Builtins travel between ranks; failures reach every rank."""

import pytest
import torch
import torch.distributed as dist

from parallel import collectives
from parallel.layout import ParallelLayout

TWO = ParallelLayout(world=2)


class OurError(RuntimeError):
    """Stands for an exception class of the project."""


def broadcast_and_gather(groups, device):
    rank = dist.get_rank()
    value = {"a": [1, 2.5, "x" * 3000], "b": (None, True, b"z")} if rank == 1 else None
    return collectives.broadcast_builtins(value, source=1), collectives.gather_builtins("r" * (rank + 1))


def test_broadcast_and_gather(ranks):
    value = {"a": [1, 2.5, "x" * 3000], "b": (None, True, b"z")}
    assert ranks.run(broadcast_and_gather, TWO) == [(value, ["r", "rr"])] * 2


def outcome(call):
    try:
        return "returned", call()
    except (ValueError, RuntimeError, TypeError) as error:
        return type(error).__name__, str(error)


def rank0_returns(groups, device):
    calls = []
    value = collectives.on_rank0(lambda: calls.append(1) or [7])
    return value, len(calls)


def test_on_rank0_runs_once_and_reaches_all(ranks):
    assert ranks.run(rank0_returns, TWO) == [([7], 1), ([7], 0)]


def rank0_raises(groups, device, kind):
    def function():
        if kind == "value":
            raise ValueError("bad key")
        if kind == "ours":
            raise OurError("it broke")
        if kind == "odd":
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "odd constructor")
        return torch.zeros(1)

    return outcome(lambda: collectives.on_rank0(function))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [("value", "ValueError", "bad key"), ("ours", "OurError", "it broke"), ("tensor", "TypeError", "only builtins travel")],
)
def test_on_rank0_raises_everywhere(ranks, kind, name, message):
    for got_name, got_message in ranks.run(rank0_raises, TWO, kind):
        assert got_name == name
        assert message in got_message


def test_an_exception_that_cannot_be_rebuilt_is_a_runtime_error_elsewhere(ranks):
    (first, _), (second, message) = ranks.run(rank0_raises, TWO, "odd")
    assert (first, second) == ("UnicodeDecodeError", "RuntimeError")
    assert "UnicodeDecodeError" in message


def rank1_raises(groups, device):
    def body():
        with collectives.together():
            if dist.get_rank() == 1:
                raise ValueError("no file")
        return "unreachable"

    return outcome(body)


def test_together_names_the_rank(ranks):
    assert ranks.run(rank1_raises, TWO) == [("ValueError", "rank 1: no file"), ("ValueError", "no file")]


def votes(groups, device):
    rank = dist.get_rank()
    total = collectives.all_reduce_sum(torch.tensor([rank + 1.0]))
    collectives.barrier()
    return collectives.agree(True), collectives.agree(rank == 0), total.item()


def test_agree_and_sum(ranks):
    assert ranks.run(votes, TWO) == [(True, False, 3.0)] * 2
