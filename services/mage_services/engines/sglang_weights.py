"""Other weights for a running SGLang.

An update never flushes the cache: SGLang ends its whole process tree where it cannot flush, and
keys of older weights are kept apart by their names (`mage_async/served_contexts.py`).
"""

import tempfile
from pathlib import Path
from typing import Any

from mage_async.inference.weights import weight_files


async def update_from_disk(manager: Any, version: int, path: Path) -> str:
    """Load weights from disk; returns why it failed, or nothing.

    A failure may leave them half-written: what was loaded before has to be loaded again.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    with tempfile.TemporaryDirectory(prefix="mage-weights-") as folder:
        for number, file in enumerate(weight_files(path)):
            (Path(folder) / f"{number}.safetensors").symlink_to(file.resolve())
        success, message, *_ = await manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(
                model_path=folder, weight_version=str(version), flush_cache=False
            ),
            None,
        )
    return "" if success else message
