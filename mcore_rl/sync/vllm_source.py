"""Our WeightSource as vLLM's, so that every transport of vLLM's (nccl, ipc, ...) takes it. For GPUs; needs vllm."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from mcore_rl.seams import WeightSource


class VllmSource(VllmWeightSource):
    """Names, dtypes, shapes and order are those of the wrapped source.

    held_names stays vLLM's default (all): iterating our source hands the full tensors to every rank.
    """

    def __init__(self, source: WeightSource) -> None:
        """Wrap `source`."""
        self._source = source

    @property
    def version(self) -> int:
        """Optimizer steps behind these weights: the label to set once an engine has proved them."""
        return self._source.version

    def metadata(self) -> list[ParamMeta]:
        """Every tensor of the whole model in iteration order."""
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass over all full tensors. Collective over the trainer's ranks."""
        return iter(self._source)


def open_sender(
    backend: str, source: WeightSource, client: VLLMWeightSyncClient, *, rank: int, meeting: tuple[str, int], workers: int
) -> TrainerWeightTransferEngine:
    """vLLM's own sender over our weights: `send_weights()` on every trainer rank. Not run on a GPU yet.

    meeting: address and port where NCCL's ranks meet. workers: of the engine. ValueError for a backend that is neither
    nccl nor ipc.
    """
    if backend not in ("nccl", "ipc"):
        raise ValueError(f"weight transport {backend!r}: nccl and ipc take whole tensors from every rank; others do not")
    nccl = backend == "nccl"
    info = (
        NCCLTrainerInitInfo(*meeting, world_size=1 + workers, rank=rank) if nccl else IPCTrainerInitInfo(rank=rank, packed=True)
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=VllmSource(source))


def server_client(url: str) -> VLLMWeightSyncClient:
    """The control side of a vLLM server started with VLLM_SERVER_DEV_MODE=1."""
    return HTTPVLLMWeightSyncClient(url)
