"""Our weights through vLLM's own GPU transports, up to the call that would move bytes between GPUs. Not run on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from mcore_rl.sync.vllm_source import VllmSource, open_sender
from mcore_rl.types import TensorMeta

WIDE = torch.arange(12.0).reshape(3, 4)


class Source:
    """Two tensors that move on between syncs; one is no plain block of memory."""

    def __init__(self):
        self.version = 0

    def metadata(self):
        return tuple(TensorMeta(name, value.dtype, tuple(value.shape)) for name, value in self)

    def __iter__(self):
        yield "a.weight", WIDE.t() + self.version
        yield "b.weight", torch.full((5,), self.version, dtype=torch.bfloat16)


class Client:
    """The engine's side of the conversation, written down."""

    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append(("init", init_info))

    def start_weight_update(self):
        self.calls.append(("start", None))

    def update_weights(self, update_info):
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version=None):
        self.calls.append(("finish", weight_version))


@pytest.fixture
def gpu(monkeypatch):
    """What the transports ask of CUDA, answered without it; `sent` is what they would put on the wire."""
    sent = []
    stream = SimpleNamespace(synchronize=lambda: None)
    group = SimpleNamespace(broadcast=lambda tensor, src, stream=None: sent.append(tensor.clone()))
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: [stream] * count)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(ipc_engine, "reduce_tensor", lambda tensor: (None, (sent.append(tensor.clone()), len(sent))))
    return sent


def start(info):
    source, client = Source(), Client()
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=VllmSource(source))
    return source, client, engine


def test_several_syncs_through_nccl(gpu):
    client = Client()
    sender = open_sender("nccl", Source(), client, rank=0, meeting=("127.0.0.1", 1), workers=1)
    for _ in range(3):
        sender.send_weights()
    assert [step for step, _ in client.calls] == ["init", *["start", "update", "finish"] * 3]
    assert len(gpu) == 3


def test_ipc_is_opened_with_bounded_memory(gpu):
    """Packed: one buffer on the GPU, not a copy of every tensor. Allocating it is where a CPU ends."""
    client = Client()
    open_sender("ipc", Source(), client, rank=0, meeting=("", 0), workers=1)
    assert client.calls == [("init", {"packed": True})]


def test_a_transport_that_wants_shards_is_refused():
    with pytest.raises(ValueError, match="weight transport 'nccl_m2n': nccl and ipc take whole tensors"):
        open_sender("nccl_m2n", Source(), Client(), rank=0, meeting=("127.0.0.1", 1), workers=1)


def test_our_source_is_a_vllm_source():
    wrapped = VllmSource(Source())
    assert wrapped.metadata() == [ParamMeta("a.weight", torch.float32, (4, 3)), ParamMeta("b.weight", torch.bfloat16, (5,))]
    assert [name for name, _ in wrapped] == [name for name, _ in wrapped] == ["a.weight", "b.weight"]
    assert wrapped.held_names() is None
    assert wrapped.version == 0


def test_nccl_tensor_by_tensor(gpu):
    info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 1, 2, packed=False, rank=0)
    source, client, engine = start(info)
    for version in range(2):
        source.version = version
        engine.send_weights()
    expected = [tensor for version in range(2) for tensor in (WIDE.t() + version, torch.full((5,), version).bfloat16())]
    assert len(gpu) == 4
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(gpu, expected, strict=True))
    assert [step for step, _ in client.calls] == ["init", *["start", "update", "finish"] * 2]
    update = dict(client.calls)["update"]
    assert update == {"names": ["a.weight", "b.weight"], "dtype_names": ["float32", "bfloat16"], "shapes": [[4, 3], [5]]}


def test_nccl_packed(gpu):
    source, _, engine = start(nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=0))
    source.version = 3
    engine.send_weights()
    bytes_sent = torch.cat([part.flatten().view(torch.uint8) for part in gpu])
    expected = [(WIDE.t() + 3).contiguous(), torch.full((5,), 3).bfloat16()]
    assert torch.equal(bytes_sent, torch.cat([tensor.flatten().view(torch.uint8) for tensor in expected]))


def test_a_rank_that_does_not_send_only_joins_in(gpu):
    _, client, engine = start(nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=1))
    engine.send_weights()
    assert (gpu, client.calls) == ([], [])


def test_ipc(gpu):
    source, client, engine = start(ipc_engine.IPCTrainerInitInfo(rank=0))
    source.version = 2
    engine.send_weights()
    assert torch.equal(gpu[0], WIDE.t() + 2)
    assert [step for step, _ in client.calls] == ["init", "start", "update", "finish"]
    assert dict(client.calls)["update"]["names"] == ["a.weight", "b.weight"]
