"""Imported at the start of every process of the environment, by a `.pth` file.

It turns SGLang's CPU engine on, and lets the CUDA build of torchvision import beside the CPU build
of torch: torchvision registers fake kernels for operators that its own (here unloadable) library
would have declared, so they are declared just before it is imported. SGLang imports torchvision,
but calls none of them.
"""

import importlib.util
import os
import re
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

_REGISTERED = re.compile(r'register_(?:meta\("|fake\("torchvision::)(\w+)"')


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing; declares torchvision's operators when somebody is about to import it."""

    libraries: list = []  # noqa: RUF012 - declarations end with their Library, so it is kept

    def find_spec(self, fullname, path=None, target=None):
        """Leave the finding to the others."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec("torchvision")
            if spec is not None and spec.submodule_search_locations:
                self._declare(Path(spec.submodule_search_locations[0]))

    def _declare(self, folder: Path) -> None:
        import torch

        source = (folder / "_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "DEF")
        for name in sorted(set(_REGISTERED.findall(source))):
            library.define(f"{name}(Tensor x) -> Tensor")
        self.libraries.append(library)


sys.meta_path.insert(0, BeforeTorchvision())
