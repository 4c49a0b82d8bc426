"""Stands in for the CUDA-only `sgl_kernel`: can be imported without a GPU, and cannot be used.

SGLang imports names from it when its modules load, even where it will run plain PyTorch. Here every
attribute and every submodule exists, and calling one raises: what passes on it has gone through no
CUDA kernel by accident.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "9.9.9"  # newer than any that SGLang asks for
__path__: list[str] = []


class Missing:
    """A function, class or operator that a GPU would have."""

    def __init__(self, name: str) -> None:
        self.__name__ = self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"sgl_kernel.{self._name} needs a GPU; this is its stand-in without one")

    def __getattr__(self, attribute: str) -> "Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)


class Submodules(MetaPathFinder, Loader):
    """Finds any `sgl_kernel.x.y`, as a module of which every attribute is missing."""

    def find_spec(self, fullname, path=None, target=None):
        """A specification for every name below this package."""
        if fullname.startswith("sgl_kernel."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        """A module whose attributes are missing ones."""
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        """There is nothing to run."""


sys.meta_path.insert(0, Submodules())
