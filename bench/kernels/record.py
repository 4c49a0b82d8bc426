"""The figures of `bench.kernels.measure`, on disk after every part.

A call that is cut off loses one part.
"""

import json
from hashlib import blake2s
from pathlib import Path
from typing import Any

import torch

from bench.lib.baseline import ROOT, machine, provenance


class Record:
    """One machine's file. What an earlier call measured and this one does not, stays in it."""

    def __init__(self, folder: Path, *, is_kept: bool) -> None:
        name = machine()
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name().lower().replace(" ", "_")
        self.file = folder / f"kernels_{name}.json"
        self._is_kept = is_kept
        self._code = code_digest()
        self._figures = json.loads(self.file.read_text()) if self.file.exists() else {}
        self._figures |= provenance()

    def is_measured(self, section: str, name: str) -> bool:
        """Whether the file has it from these very kernels and this very bench."""
        return self._figures.get(section, {}).get(name, {}).get("code") == self._code

    def put(self, section: str, name: str, figures: dict[str, Any]) -> None:
        """Take in one part, and write everything."""
        entries = self._figures.get(section, {})
        self._figures[section] = entries | {name: figures | {"code": self._code}}
        if not self._is_kept:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        working = self.file.with_suffix(".partial")
        working.write_text(json.dumps(self._figures, indent=1) + "\n")
        working.replace(self.file)


def code_digest() -> str:
    """A digest of the code behind a figure, which a copy without the git history has too."""
    files = [*ROOT.glob("kernels/mage_kernels/**/*.py"), *ROOT.glob("bench/kernels/*.py")]
    digest = blake2s(digest_size=8)
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()
