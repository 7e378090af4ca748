"""CPU twins of the parts of `torch.cuda` that Megatron-Core calls. Applied only by `parallel.cpu_megatron.install`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

# Functions of the torch module that take a `device` keyword and that Megatron-Core calls with a literal "cuda".
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


class CpuEvent:
    """A `torch.cuda.Event` that has always happened already: CPU work is finished when its call returns."""

    def __init__(self, *_: object, **__: object) -> None:
        """Accepts and ignores the options of `torch.cuda.Event`."""

    def record(self, *_: object) -> None:
        """Nothing to record."""

    def wait(self, *_: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, _: object) -> float:
        """No device time passes between events on a CPU (milliseconds)."""
        return 0.0


class CpuStream:
    """A `torch.cuda.Stream` that runs everything at once, in order."""

    def __init__(self, *_: object, **__: object) -> None:
        """Accepts and ignores the options of `torch.cuda.Stream`."""

    def wait_stream(self, *_: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """The given event, or a new one."""
        return event or CpuEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always idle."""
        return True

    def __enter__(self) -> CpuStream:
        """Streams nest as context managers."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""


def patch_streams() -> None:
    """Stream, Event and the functions that hand them out."""
    cuda: Any = torch.cuda
    cuda.Stream = CpuStream
    cuda.Event = CpuEvent
    cuda.current_stream = lambda *_: CpuStream()
    cuda.default_stream = lambda *_: CpuStream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.synchronize = lambda *_: None


def patch_current_device() -> None:
    """`torch.cuda.current_device()` is passed on as a `device=` argument everywhere: it names the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"


def patch_cuda_seeding() -> None:
    """The CUDA generator becomes the CPU generator.

    `manual_seed` seeds the generator itself: `torch.manual_seed` would call `torch.cuda.manual_seed_all` again.
    """
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = lambda seed: None
    cuda._lazy_call = lambda call, **_: call()


def patch_moves() -> None:
    """`.cuda()` of tensors and modules leaves them where they are."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *_, **__: self
    module.cuda = lambda self, *_, **__: self


def patch_tensor_type() -> None:
    """`tensor.type()` says `torch.cuda.FloatTensor`: Megatron's optimizer accepts parameters by that name only."""
    tensor: Any = torch.Tensor
    original: Callable[..., Any] = tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    tensor.type = type_


def cpu_device(device: Any) -> Any:
    """`device` with every way of saying CUDA ("cuda", "cuda:0", torch.device, an index) turned into the CPU."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return "cpu"
    return device


def _with_cpu_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = cpu_device(kwargs["device"])
        return original(*args, **kwargs)

    return call


def patch_factories() -> None:
    """`device="cuda"` of tensor factories means the CPU.

    Only the factories are wrapped. A TorchFunctionMode would do it in one place, but it costs 3 us on every torch call
    and every attribute access of a tensor, which is as much as a small operation itself.
    """
    for name in FACTORIES:
        setattr(torch, name, _with_cpu_device(vars(torch)[name]))


def patch_tensor_to() -> None:
    """`tensor.to("cuda")` and `tensor.to(device="cuda")` stay on the CPU."""
    tensor: Any = torch.Tensor
    original: Callable[..., Any] = tensor.to

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (cpu_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = cpu_device(kwargs["device"])
        return original(self, *args, **kwargs)

    tensor.to = to


def patch_compile() -> None:
    """No torch.compile: the inductor backend needs a C++ compiler on a CPU, and Megatron decorates small fusions with it."""
    import torch._dynamo.config as dynamo_config  # noqa: PLC0415  (importing dynamo is slow: only where it is wanted)

    dynamo_config.disable = True
