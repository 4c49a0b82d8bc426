"""The engine that a configuration asks for."""

from hashlib import blake2s
from pathlib import Path

import torch

from mage_async.config.schema import Config, Embedded
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.engines.engine import Engine
from mage_services.engines.sglang.engine import SglangEngine


def make_engine(config: Config, directory: Path, name: str) -> Engine:
    """An engine for the process called `name`, not yet running.

    Args:
        directory: a model directory; its weights are version 0 until others are loaded.

    Raises:
        ConfigError: what it needs is not installed, or it knows no such argument.
        PolicyError: it cannot serve the model; the text says what can.
    """
    if isinstance(config.engine, Embedded):
        return EmbeddedEngine(directory, config.engine, name)
    own = blake2s(f"{config.seed}/{name}".encode(), digest_size=4).digest()
    return SglangEngine(
        directory,
        config.engine,
        dtype=config.policy.dtype,
        seed=int.from_bytes(own, "little"),
        has_gpu=torch.cuda.is_available(),
        max_deaths=config.supervision.max_restarts,
        silence_s=config.supervision.silence_s,
        name=name,
    )
