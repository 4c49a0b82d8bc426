"""The `info` of an environment's step as bounded JSON text, for readers of a run."""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
import numpy as np

MAX_INFO_CHARS = 4096
"""Largest length of one turn's info; what exceeds it is left out, with a note."""
MAX_TRIAL_INFO_CHARS = 2**17
"""Largest total length of the infos of a trial."""
TRIAL_IS_FULL = f'{{"…":"a trial keeps at most {MAX_TRIAL_INFO_CHARS:,} characters of info"}}'
"""Replaces an info that would exceed the trial's total."""
_NOTE_CHARS = 128
"""Characters reserved for the note that entries were left out."""
_MAX_ITEMS, _MAX_TEXT_CHARS, _MAX_KEY_CHARS, _MAX_VALUES, _MAX_DEPTH = 64, 1000, 64, 512, 6


def info_text(info: Mapping[Any, Any]) -> str:
    """Return an environment's `info` as a JSON object of at most `MAX_INFO_CHARS` characters; empty
    if it is empty.

    Only plain data is converted: the text of a foreign object may be long or slow, or raise, so
    such an object is represented by its type. Text is cut after 1,000 characters and a list after
    64 items; a number outside JSON's range is written as text.
    """
    kept, room = dict[str, Any](), MAX_INFO_CHARS - _NOTE_CHARS
    # One budget for all entries bounds the time that nested lists take.
    budget = iter(range(_MAX_VALUES))
    for key, value in info.items():
        entry = {_key(key): _plain(value, _MAX_DEPTH, budget)}
        if (size := _size(entry)) > room:
            entry = {_key(key): f"left out: {size:,} characters"}
        if len(kept) == _MAX_ITEMS or (size := _size(entry)) > room:
            kept["…"] = f"{len(info) - len(kept)} more"
            break
        kept |= entry
        room -= size
    return msgspec.json.encode(kept).decode() if kept else ""


def _plain(value: Any, depth: int, budget: Iterator[int]) -> Any:
    """Return a value as JSON data, with at most `depth` levels of lists and dictionaries below it.

    Args:
        budget: yields once for each value that may still be converted.
    """
    if next(budget, None) is None or depth < 0:
        return "…"
    if isinstance(value, np.generic | np.ndarray):
        if value.size > _MAX_ITEMS:
            return f"{value.dtype} {list(value.shape)}"
        found = value.tolist()  # returns a NumPy scalar where Python has no such type
        is_foreign = isinstance(found, np.generic)
        return _type_name(value) if is_foreign else _plain(found, depth, budget)
    if isinstance(value, dict):
        items = islice(value.items(), _MAX_ITEMS)
        return {_key(key): _plain(each, depth - 1, budget) for key, each in items}
    if isinstance(value, list | tuple | set | frozenset):
        listed = [_plain(each, depth - 1, budget) for each in islice(value, _MAX_ITEMS)]
        num_left_out = len(value) - len(listed)
        return [*listed, f"… {num_left_out:,} more"] if num_left_out else listed
    if isinstance(value, str):
        return _cut(value, _MAX_TEXT_CHARS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a whole number of {value.bit_length()} bits"
    return value if value is None or isinstance(value, int | float) else _type_name(value)


def _key(key: Any) -> str:
    is_plain = isinstance(key, str | bool | float) or (isinstance(key, int) and abs(key) < 2**63)
    return _cut(str(key) if is_plain else _type_name(key), _MAX_KEY_CHARS)


def _cut(text: str, most: int) -> str:
    """Cut a text, and replace halves of surrogate pairs, which no message can hold."""
    cut = text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more"
    return cut.encode("utf-8", "replace").decode()


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _size(entry: dict[str, Any]) -> int:
    """Return the length of an entry in the text, without the braces and with a comma."""
    return len(msgspec.json.encode(entry).decode()) - 1
