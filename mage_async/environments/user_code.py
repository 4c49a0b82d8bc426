"""The border to a class of the user's own: whatever its code raises is said in one line, with the
place where it did.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from mage_async.errors import ConfigError, MageError


@contextmanager
def own_code(name: str) -> Iterator[None]:
    """What runs inside belongs to the environment called `name`.

    Raises:
        ConfigError: it raised; where it was, the first line of what it said, and the cause.
    """
    try:
        yield
    except MageError:
        raise
    except Exception as error:  # the border to foreign code
        said, *_ = _words(error).splitlines() or [""]
        kind = type(error).__name__
        raise ConfigError(f"environment {name!r}: {_place(error)}: {kind}: {said}") from error


def _words(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _place(error: Exception) -> str:
    """The line that raised; of code that is none, where it stops being any."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    *_, last = (frame for frame in frames if not frame.filename.startswith("<"))
    return f"{last.filename}, line {last.lineno}"
