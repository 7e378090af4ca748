"""Routes as data: numbers survive every step of the way, what is wrong is refused, what is unknown stays unknown."""

import base64
import io
import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mcore_rl.batching import build_rollout_batch
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.rollout.route_reader import RouteReader, from_array
from mcore_rl.rollout.vllm_routes import RouteCapture
from mcore_rl.routes import EncodedRoutes, batch_routes
from mcore_rl.stages import received
from mcore_rl.types import Completion, Prompt, Score, TokenBatch
from models.routes import Routes, Selection, ranked, route_dtype


def wire(experts, layers, *, wide, missing=()):
    """As a worker hands out `experts` [tokens, L, K] of request "7", through JSON."""
    data = np.asarray(experts, dtype=np.int16 if wide else np.uint8)
    request = {"experts": base64.b64encode(data.tobytes()).decode(), "missing": list(missing)}
    return json.loads(json.dumps({"layers": layers, "top_k": data.shape[2], "wide": wide, "requests": {"7": request}}))


@pytest.mark.parametrize("count", [1, 127, 128, 255, 256, 257, 300, 512])
def test_first_and_last_expert_survive_the_whole_way(count):
    wide = route_dtype(count) is torch.int16
    assert wide is (count > 256)
    answer = wire([[[0]], [[count - 1]], [[0]]], [4], wide=wide, missing=[2])
    encoded = EncodedRoutes.from_answer(answer, answer["requests"]["7"])
    completion = Completion("p", 0, (1,), (2, 3, 4), (0.0, 0.0, 0.0), "stop", 0, encoded)
    again = received(asdict(completion))
    assert again == completion
    routes = again.routes.decoded(4)
    assert routes.known.tolist() == [True, True, False, False]
    assert routes.of_layer(4).tolist() == [[0], [count - 1], [0], [0]]
    assert routes.experts.dtype is route_dtype(count)
    routes.check((4,), count, 1)
    if count > 1:
        with pytest.raises(ValueError, match=rf"experts 0 to {count - 1}, the model has {count - 1}"):
            routes.check((4,), count - 1, 1)


def routes_of(experts, known=None, layers=(1, 3)):
    experts = torch.tensor(experts, dtype=torch.uint8)
    return Routes(layers, experts, torch.ones(len(experts), dtype=torch.bool) if known is None else torch.tensor(known))


def test_wrong_rows_are_refused_and_unknown_ones_are_not_read():
    good = routes_of([[[0, 1], [2, 3]], [[0, 0], [0, 0]]], [True, False])
    good.check((1, 3), 4, 2)
    good.check((3,), 4, 2)
    for experts, reason in (
        ([[[1, 1], [2, 3]]], "names the same expert twice"),
        ([[[0, 4], [2, 3]]], "experts 0 to 4, the model has 4"),
    ):
        with pytest.raises(ValueError, match=reason):
            routes_of(experts).check((1, 3), 4, 2)
    with pytest.raises(ValueError, match=r"2 experts in layers \(1, 3\); the model has 2 in layers \(1, 2\)"):
        good.check((1, 2), 4, 2)
    with pytest.raises(ValueError, match="the model has 3 in layers"):
        good.check((1, 3), 4, 3)
    with pytest.raises(ValueError, match="nothing was recorded of layer 2"):
        good.of_layer(2)
    with pytest.raises(ValueError, match="layers ascending"):
        routes_of([[[0, 1], [2, 3]]], layers=(3, 1))


@pytest.mark.parametrize("top_k", [3, 4, 8])
def test_any_pair_of_equal_experts_is_found(top_k):
    for first in range(top_k):
        for second in range(first + 1, top_k):
            row = list(range(top_k))
            row[second] = row[first]
            with pytest.raises(ValueError, match="twice"):
                routes_of([[row]], layers=(0,)).check((0,), 16, top_k)


def test_more_rows_than_tokens_or_torn_rows_are_refused():
    with pytest.raises(ValueError, match="12 bytes, 4 a token, for a sequence of 2 tokens"):
        EncodedRoutes((0, 1), 2, False, bytes(12)).decoded(2)
    with pytest.raises(ValueError, match="7 bytes, 4 a token"):
        EncodedRoutes((0, 1), 2, False, bytes(7)).decoded(9)
    assert not EncodedRoutes((0, 1), 2, False, b"").decoded(2).known.any()


def test_a_sample_that_alone_has_no_routes_is_named():
    one = EncodedRoutes((0,), 1, False, b"\x01")
    assert batch_routes([None, None], [2, 2], ["a", "b"]) is None
    with pytest.raises(ValueError, match="sample b came back without routes, 1 others with"):
        batch_routes([one, None], [2, 2], ["a", "b"])


def test_routes_stay_with_their_sequence():
    prompts = [Prompt(name, (1, 2), "", "") for name in ("p", "q")]
    made = []
    for index, prompt in enumerate(prompts):
        encoded = EncodedRoutes((0,), 1, False, bytes([index + 1] * 3))
        made.append(Completion(prompt.prompt_id, 0, (1, 2), (5, 6), (-1.0, -1.0), "stop", 0, encoded))
    scores = [Score(1.0, True, "", True, False)] * 2
    rollout = build_rollout_batch(prompts, made, scores, algorithm=AlgorithmConfig(), version=0, samples_per_prompt=1)
    assert rollout.tokens.routes is not None
    assert [one.experts[:, 0, 0].tolist() for one in rollout.tokens.routes] == [[1, 1, 1, 0], [2, 2, 2, 0]]
    chosen = rollout.tokens.select([1])
    assert chosen.routes is not None
    assert chosen.routes[0].known.tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match="different lengths"):
        TokenBatch(chosen.token_ids, chosen.loss_mask, chosen.sample_ids, (routes_of([[[0, 1], [2, 3]]]),))


def live_topk(scores, topk, num_groups=None, group_topk=None):
    return torch.topk(scores, topk, dim=1)


def test_selection_by_hand():
    """Four tokens, live best {3, 2}: not known; the live set in another order; one expert shared; none shared."""
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat(4, 1)
    recorded = torch.tensor([[0, 0], [2, 3], [0, 3], [1, 0]])
    known = torch.tensor([False, True, True, True])
    selection = Selection(recorded, known)
    values, chosen = selection.get_replay_topk(scores, 2, None, None, live_topk)
    assert chosen.tolist() == [[3, 2], [3, 2], [3, 0], [1, 0]]
    assert values.tolist() == scores.gather(1, chosen).tolist()
    mask = torch.tensor([True, True, True, False])
    assert selection.counts(mask).tolist() == pytest.approx([3, 2, 2, 1 + 1 / 3])
    assert selection.ranked_choice().tolist() == chosen.tolist()
    assert ranked(scores, torch.tensor([[0, 1]] * 4)).tolist() == [[1, 0]] * 4


def test_a_bypassed_selection_is_noticed():
    with pytest.raises(RuntimeError, match="was bypassed"):
        Selection(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([True])).counts(torch.tensor([True]))


class FakeLink:
    name = "fake"

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def rpc(self, method, args):
        self.asked.append(method)
        return [self.answer]


def test_reader_starts_clean_and_misses_no_request():
    link = FakeLink(wire([[[3]]], [0], wide=False))
    reader = RouteReader(link, native=False)
    reader.begin()
    assert reader.collect([{"id": "7"}]) == [EncodedRoutes((0,), 1, False, b"\x03")]
    assert link.asked == ["mcore_capture_routes", "mcore_take_routes"]
    with pytest.raises(Exception, match="no routes of 1 of 2 requests, first 8"):
        reader.collect([{"id": "7"}, {"id": "8"}])


def test_the_engines_own_array_is_read_and_its_loss_is_refused():
    buffer = io.BytesIO()
    np.save(buffer, np.array([[[0, 1], [300, 2]]], dtype=np.int32))
    encoded = from_array("r", base64.b64encode(buffer.getvalue()).decode())
    assert encoded.decoded(2).of_layer(1).tolist() == [[300, 2], [0, 0]]
    with pytest.raises(Exception, match="request r: no routed experts"):
        from_array("r", None)


@pytest.mark.parametrize(
    ("caching", "balancing", "message"),
    [(True, False, "with prefix caching: cached tokens are not routed again"), (False, True, "expert load balancing")],
)
def test_capture_is_refused_where_rows_or_numbers_would_not_be_the_routers(caching, balancing, message):
    caches, experts = SimpleNamespace(enable_prefix_caching=caching), SimpleNamespace(enable_eplb=balancing)
    with pytest.raises(ValueError, match=message):
        RouteCapture(SimpleNamespace(vllm_config=SimpleNamespace(cache_config=caches, parallel_config=experts)))


def test_a_negative_expert_is_refused():
    """A marker of another stack for what it lost, or a number that wrapped around."""
    wide = EncodedRoutes((0,), 2, True, np.array([[3, -1]], dtype="<i2").tobytes())
    with pytest.raises(ValueError, match="experts -1 to 3, the model has 8"):
        wide.decoded(1).check((0,), 8, 2)
