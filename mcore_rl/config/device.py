"""Which device a configuration means."""

from __future__ import annotations

import torch

from mcore_rl.config.schema import Device


def uses_cuda(device: Device) -> bool:
    """Device.auto is CUDA where there is one."""
    return device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
