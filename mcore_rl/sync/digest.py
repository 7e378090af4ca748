"""Fingerprints of tensors: of the bytes on the wire, and of the numbers an engine computes with.

xxh3_64 throughout, as 16 hex digits, so a digest travels as plain text. Imported by trainer ranks and engines alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The exponent's bits: none set means zero or subnormal."""


@dataclass(frozen=True)
class Region:
    """Part of a Hugging Face tensor, as one engine worker holds it. dim None is the whole tensor."""

    dtype: torch.dtype
    dim: int | None = None
    start: int = 0
    length: int = 0

    def cut(self, tensor: Tensor) -> Tensor:
        """The region of a full tensor. ValueError when it does not reach that far."""
        if self.dim is None:
            return tensor
        if tensor.shape[self.dim] < self.start + self.length:
            raise ValueError(
                f"tensor {tuple(tensor.shape)} ends before [{self.start}, {self.start + self.length}) of dim {self.dim}"
            )
        return tensor.narrow(self.dim, self.start, self.length)

    def as_json(self) -> list[str | int | None]:
        """Plain builtins."""
        return [str(self.dtype).removeprefix("torch."), self.dim, self.start, self.length]

    @staticmethod
    def from_json(row: Sequence[object]) -> Region:
        """Inverse of as_json."""
        name, dim, start, length = row
        return Region(dtype_from_name(str(name)), None if dim is None else int(str(dim)), int(str(start)), int(str(length)))


def dtype_from_name(name: str) -> torch.dtype:
    """`float32` -> torch.float32. ValueError for anything that is no dtype."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return found


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def wire_digest(tensor: Tensor) -> str:
    """Digest of the bytes as they travel. CPU tensor; made contiguous if it is not."""
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor.contiguous()))


def canonical(tensor: Tensor) -> Tensor:
    """Subnormals and -0 become +0: matrix kernels may flush them, and reading through one loses the sign of zero."""
    mask = EXPONENTS.get(tensor.dtype)
    if mask is None:
        tiny = torch.finfo(tensor.dtype).tiny
        return torch.where(tensor.abs() < tiny, torch.zeros((), dtype=tensor.dtype), tensor)
    bits = tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)
    exponents = bits & mask
    if exponents.numel() == 0 or exponents.amin() != 0:  # the usual case, and a tenth of the time
        return tensor
    return bits.masked_fill(exponents == 0, 0).view(tensor.dtype)


def content_digest(tensor: Tensor, region: Region) -> str:
    """Digest of the numbers an engine holds of `tensor`: its region, in the engine's dtype, shape included."""
    part = canonical(region.cut(tensor).detach().to(device="cpu", dtype=region.dtype)).contiguous()
    hasher = xxhash.xxh3_64(f"{region.dtype}{tuple(part.shape)}".encode())
    hasher.update(raw_bytes(part))
    return hasher.hexdigest()
