"""Trials of a journal as a file for others: lines of JSON, or Parquet by the extra `export`.

A row is a trial (`mage_async/attribution/rows.py`): its group and number, the step that consumed
it, everything a person reads of it, each turn's return, advantage and `info`, and in Parquet also
every token with its log-prob, version, staleness and advantage. A file is whole or absent.
"""

import json
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from mage_async.attribution.rows import row_of, token_columns
from mage_async.attribution.turns import AttributedTrial
from mage_async.errors import RunError
from mage_async.trials.chat_format import ChatFormat

ROWS_AT_ONCE = 1000


def export(trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path) -> int:
    """Write trials to `file`, by its ending; returns how many.

    Raises:
        RunError: another ending, pyarrow is not installed, or the file cannot be written.
    """
    writers = {".jsonl": _write_lines, ".parquet": _write_parquet}
    if file.suffix not in writers:
        raise RunError(f"{file}: an export ends in .jsonl or .parquet, got {file.suffix!r}")
    working = file.with_name(f".{file.name}.part")
    try:
        count = writers[file.suffix](trials, chat, working)
        os.replace(working, file)
    except OSError as fault:
        raise RunError(f"{file} cannot be written: {fault.strerror}") from fault
    finally:
        working.unlink(missing_ok=True)
    return count


def _write_lines(trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path) -> int:
    count = 0
    with file.open("w") as out:
        for trial in trials:
            out.write(json.dumps(row_of(trial, chat)) + "\n")
            count += 1
    return count


def _write_parquet(trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RunError(
            f"{file.suffixes[0]} needs pyarrow: pip install 'mage_async[export]', or export to "
            "a file that ends in .jsonl"
        ) from None
    schema, trials, count = _schema(pyarrow), iter(trials), 0
    with pyarrow.parquet.ParquetWriter(file, schema) as out:
        while rows := [_full_row(each, chat) for each in islice(trials, ROWS_AT_ONCE)]:
            out.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _full_row(trial: AttributedTrial, chat: ChatFormat) -> dict[str, Any]:
    return row_of(trial, chat) | token_columns(trial)


def _schema(pyarrow: Any) -> Any:
    """Columns of the Parquet file; lists of lists are by context and token."""
    whole, text, real = pyarrow.int64(), pyarrow.string(), pyarrow.float64()
    small, single, flag = pyarrow.int32(), pyarrow.float32(), pyarrow.bool_()
    many: Callable[[Any], Any] = pyarrow.list_
    turn = [
        *(("episode", small), ("kind", text), ("action", text), ("reward", real)),
        *(("is_valid", flag), ("info", text), ("return", real), ("advantage", real)),
        *(("staleness", small), ("context", small), ("start", small), ("stop", small)),
    ]
    return pyarrow.schema(
        [
            ("grant", whole),
            ("trial", whole),
            ("step", whole),
            ("version", whole),
            ("environment", text),
            ("member", text),
            ("seat", small),
            ("seed", pyarrow.uint64()),
            ("reward_by_episode", many(real)),
            ("turns", many(pyarrow.struct(turn))),
            ("contexts", many(text)),
            ("tokens", many(many(small))),
            ("logprobs", many(many(single))),
            ("is_sampled", many(many(flag))),
            ("versions", many(many(small))),
            ("staleness", many(many(small))),
            ("advantages", many(many(single))),
        ]
    )
