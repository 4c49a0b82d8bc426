"""The only place that imports OpenSpiel, and only when a game of it is asked for."""

import importlib
from typing import Any

from mage_async.errors import ConfigError


def engine() -> Any:
    """OpenSpiel's module; it ships no types.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("pyspiel")
    except ImportError as error:
        message = f"this environment needs OpenSpiel: pip install open_spiel ({error})"
        raise ConfigError(message) from None
