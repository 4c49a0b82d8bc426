"""The installed version of SGLang, and how versions differ where an adapter has to know.

The engine's control surface was read or run within this range; see `arguments.py` for arguments
that changed their names within it.
"""

import re
from importlib.metadata import PackageNotFoundError, version

from mage_async.errors import ConfigError

OLDEST, NEWEST = (0, 5, 12), (0, 5, 23)


def installed() -> str:
    """The version of the installed SGLang.

    Raises:
        ConfigError: there is none, or one that this adapter does not know.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError(
            'engine.kind = "sglang" needs SGLang, which is not installed: '
            'pip install "mage_async[sglang]", or set engine.kind = "embedded"'
        ) from None
    check(found)
    return found


def check(found: str) -> None:
    """Refuse a version outside the range.

    Raises:
        ConfigError: the sentence names what is supported.
    """
    if not OLDEST <= release(found) <= NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise ConfigError(
            f"SGLang {found} is installed, and {oldest} to {newest} are supported: "
            f'pip install "mage_async[sglang]"'
        )


def release(found: str) -> tuple[int, int, int]:
    """The first three numbers of a version; (0, 0, 0) where it has no such numbers."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2]), int(numbers[3])) if numbers else (0, 0, 0)


def says_spans(found: str) -> bool:
    """Whether replies name the version of each token."""
    return release(found) >= (0, 5, 19)


def has_sessions(found: str) -> bool:
    """Whether weights that come as tensors have to come between a beginning and an end."""
    return release(found) >= (0, 5, 21)
