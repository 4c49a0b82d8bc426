"""The memory that a plan is made for: given, this machine's, or that of a GPU by its name."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from mage_async.config.schema import Config
from mage_async.errors import ConfigError

if TYPE_CHECKING:
    from mage_async.plan.devices import Device


def device_for(config: Config, memory_gb: float = 0.0) -> "Device":
    """The device of a configuration's learner.

    Args:
        memory_gb: 10^9 bytes that it is to have; 0: as many as it has.

    Raises:
        ConfigError: the learner computes on a GPU that is neither here nor named.
    """
    from mage_async.plan.devices import GB, Device, device_of

    if config.learner.device == "cpu":
        own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Device("this machine", round(memory_gb * GB) or own)
    named = config.hardware.gpu
    if memory_gb:
        return device_of(named, memory_gb)
    return _own_gpu(config) or device_of(named)


def check_gpu(config: Config, num_actors: int) -> None:
    """Refuse a run whose learner computes on a GPU where it would not fit, or where there is none.

    Raises:
        ConfigError: what does not fit, and which key to change; or there is no GPU.
    """
    from mage_async.plan.plan import plan_of

    own = _own_gpu(config)
    if own or config.hardware.gpu:
        plan_of(config, device_for(config), num_actors).check()
    if own is None:
        raise ConfigError(
            f'learner.device = "{config.learner.device}", but PyTorch finds no GPU here: set '
            'learner.device = "cpu", or start the run where there is one'
        )


def _own_gpu(config: Config) -> "Device | None":
    """The GPU of this machine that the learner is to compute on. Never run on a GPU."""
    import torch

    from mage_async.plan.devices import GPUS, Device

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.device(config.learner.device))
    named = GPUS.get(config.hardware.gpu, Device("", 0))
    has_bfloat16 = found.major >= 8
    return replace(
        named, name=found.name, memory_bytes=found.total_memory, has_bfloat16=has_bfloat16
    )
