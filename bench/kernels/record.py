"""Keep the figures of `bench.kernels.measure`, and write them to disk after each part.

A program that is interrupted loses one part, and skips the others when it is started again.
"""

import json
from hashlib import blake2s
from pathlib import Path
from typing import Any

import torch

from bench.lib.baseline import ROOT, machine, provenance


class Record:
    """Hold the figures of this machine, those of earlier programs included.

    Args:
        writes: Whether to write the file; otherwise figures are only printed.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        name = machine()
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name().lower().replace(" ", "_")
        self.file = folder / f"kernels_{name}.json"
        self._writes = writes
        self._code = code_digest()
        self._figures = json.loads(self.file.read_text()) if self.file.exists() else {}
        self._figures |= provenance()

    def is_measured(self, section: str, name: str) -> bool:
        """Return whether the file has this part, measured with the present code."""
        return self._figures.get(section, {}).get(name, {}).get("code") == self._code

    def put(self, section: str, name: str, figures: dict[str, Any]) -> None:
        """Add the figures of one part, and write the file."""
        entries = self._figures.get(section, {})
        self._figures[section] = entries | {name: figures | {"code": self._code}}
        if not self._writes:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete, so that a reader never finds half a file.
        working = self.file.with_suffix(".partial")
        working.write_text(json.dumps(self._figures, indent=1) + "\n")
        working.replace(self.file)


def code_digest() -> str:
    """Return a digest of the sources of kernels and benchmark. A copy without git has the same."""
    files = [*ROOT.glob("kernels/mage_kernels/**/*.py"), *ROOT.glob("bench/kernels/*.py")]
    digest = blake2s(digest_size=8)
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()
