"""Train language agents that learn to learn: `import mage_async as mage`.

The package itself is the core, without processes, sockets and clocks (`docs/architecture.md`). The
names below are the Python interface; they are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mage_async.config.config_file import dump as dump
    from mage_async.config.schema import Config as Config
    from mage_async.errors import MageError as MageError
    from mage_services.api.configuration import configure as configure
    from mage_services.api.policy import Chat as Chat
    from mage_services.api.policy import Policy as Policy
    from mage_services.api.run import Run as Run
    from mage_services.api.run import load as load
    from mage_services.api.training import train as train
    from mage_services.cli.check import check as check

__version__ = "0.2.0"

_HOMES = {
    "Chat": "mage_services.api.policy",
    "Config": "mage_async.config.schema",
    "MageError": "mage_async.errors",
    "Policy": "mage_services.api.policy",
    "Run": "mage_services.api.run",
    "check": "mage_services.cli.check",
    "configure": "mage_services.api.configuration",
    "dump": "mage_async.config.config_file",
    "load": "mage_services.api.run",
    "train": "mage_services.api.training",
}
"""Modules of the public names."""
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name; this package is imported by every process, most of which need none."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__  # what the tab key completes
