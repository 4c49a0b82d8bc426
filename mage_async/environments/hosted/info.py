"""An environment's `info` as text: JSON, bounded, made of plain data alone.

What is foreign is never asked for its text, which may be long, slow or raise: an object is named by
its type. So reading an `info` costs a bounded time, whatever an environment puts into it.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec
import numpy as np

MAX_INFO_CHARS = 4096
"""Of one turn; what is over is left out, and the text says so."""
MAX_TRIAL_INFO_CHARS = 2**17
"""Of all turns of a trial together."""
TRIAL_IS_FULL = f'{{"…":"a trial keeps at most {MAX_TRIAL_INFO_CHARS:,} characters of info"}}'
_SPARE = 128
_MOST_ITEMS, _MOST_CHARS, _MOST_KEY_CHARS, _MOST_VALUES, _MOST_DEPTH = 64, 1000, 64, 512, 6


def info_text(info: Mapping[Any, Any]) -> str:
    """An `info` as a JSON object of at most `MAX_INFO_CHARS` characters; empty where it is empty.

    Text is cut after 1,000 characters and a list after 64 items; a number that JSON does not know
    is written as text.
    """
    reader, kept, room = _Reader(), dict[str, Any](), MAX_INFO_CHARS - _SPARE
    for key, value in info.items():
        entry = {_key(key): reader.plain(value, _MOST_DEPTH)}
        if (size := _size(entry)) > room:
            entry = {_key(key): f"left out: {size:,} characters"}
        if len(kept) == _MOST_ITEMS or (size := _size(entry)) > room:
            kept["…"] = f"{len(info) - len(kept)} more"
            break
        kept |= entry
        room -= size
    return msgspec.json.encode(kept).decode() if kept else ""


class _Reader:
    """Reads one `info`; it looks at so many values and no more."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def plain(self, value: Any, depth: int) -> Any:
        """A value as JSON can say it."""
        self._left -= 1
        if self._left < 0 or depth < 0:
            return "…"
        if isinstance(value, np.generic | np.ndarray):
            return self._array(value, depth)
        if value is None or isinstance(value, bool | int | float | str):
            return _scalar(value)
        if isinstance(value, dict):
            items = islice(value.items(), _MOST_ITEMS)
            return {_key(key): self.plain(each, depth - 1) for key, each in items}
        if isinstance(value, list | tuple | set | frozenset):
            return self._items(value, len(value), depth)
        return _kind(value)

    def _array(self, value: Any, depth: int) -> Any:
        if value.size > _MOST_ITEMS:
            return f"{value.dtype} {list(value.shape)}"
        found = value.tolist()
        return _kind(value) if isinstance(found, np.generic) else self.plain(found, depth)

    def _items(self, values: Iterable[Any], count: int, depth: int) -> list[Any]:
        items = [self.plain(each, depth - 1) for each in islice(values, _MOST_ITEMS)]
        return [*items, f"… {count - len(items):,} more"] if count > len(items) else items


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        return _readable(value, _MOST_CHARS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    is_long = isinstance(value, int) and not -(2**63) <= value < 2**63
    return f"a whole number of {value.bit_length()} bits" if is_long else value


def _key(key: Any) -> str:
    plain = isinstance(key, str | bool | float) or (isinstance(key, int) and abs(key) < 2**63)
    return _readable(str(key) if plain else _kind(key), _MOST_KEY_CHARS)


def _readable(text: str, most: int) -> str:
    """Text cut to a length, without halves of surrogate pairs, which no message can hold."""
    cut = text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more"
    return cut.encode("utf-8", "replace").decode()


def _kind(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _size(entry: dict[str, Any]) -> int:
    """Characters of an entry in the text, without the braces and with a comma."""
    return len(msgspec.json.encode(entry).decode()) - 1
