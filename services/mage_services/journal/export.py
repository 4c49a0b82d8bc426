"""Trials of a journal as a file for others: lines of JSON, or Parquet by the extra `export`.

A row is a trial: its group and number, the version that drew its oldest token, everything a person
reads of it (`mage_async/trials/trial_as_dict.py`), and in Parquet also every token with its
log-prob and whether the policy sampled it, a list a context. A file is whole or absent.
"""

import json
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from mage_async.errors import RunError
from mage_async.policy_version import oldest
from mage_async.protocol.messages import TrialResult
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.trial_as_dict import trial_as_dict

ROWS_AT_ONCE = 1000


def export(results: Iterable[TrialResult], chat: ChatFormat, file: Path) -> int:
    """Write trials to `file`, by its ending; returns how many.

    Raises:
        RunError: another ending, pyarrow is not installed, or the file cannot be written.
    """
    writers = {".jsonl": _write_lines, ".parquet": _write_parquet}
    if file.suffix not in writers:
        raise RunError(f"{file}: an export ends in .jsonl or .parquet, got {file.suffix!r}")
    working = file.with_name(f".{file.name}.part")
    try:
        count = writers[file.suffix](results, chat, working)
        os.replace(working, file)
    except OSError as fault:
        raise RunError(f"{file} cannot be written: {fault.strerror}") from fault
    finally:
        working.unlink(missing_ok=True)
    return count


def row_of(result: TrialResult, chat: ChatFormat) -> dict[str, Any]:
    """What a person reads of a trial, and whose it is."""
    version = oldest(run for part in result.trial.segments for run in part.versions)
    whose = {"grant": result.grant, "trial": result.trial.index}
    return whose | trial_as_dict(result.trial, chat, version)


def _write_lines(results: Iterable[TrialResult], chat: ChatFormat, file: Path) -> int:
    count = 0
    with file.open("w") as out:
        for result in results:
            out.write(json.dumps(row_of(result, chat)) + "\n")
            count += 1
    return count


def _write_parquet(results: Iterable[TrialResult], chat: ChatFormat, file: Path) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RunError(
            f"{file.suffixes[0]} needs pyarrow: pip install 'mage_async[export]', or export to "
            "a file that ends in .jsonl"
        ) from None
    schema, results, count = _schema(pyarrow), iter(results), 0
    with pyarrow.parquet.ParquetWriter(file, schema) as out:
        while rows := [_full_row(result, chat) for result in islice(results, ROWS_AT_ONCE)]:
            out.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _full_row(result: TrialResult, chat: ChatFormat) -> dict[str, Any]:
    segments = result.trial.segments
    return row_of(result, chat) | {
        "tokens": [segment.tokens for segment in segments],
        "logprobs": [segment.logprobs for segment in segments],
        "is_sampled": [segment.is_sampled for segment in segments],
    }


def _schema(pyarrow: Any) -> Any:
    """Columns of the Parquet file; lists of lists are by context and token."""
    whole, text, real = pyarrow.int64(), pyarrow.string(), pyarrow.float64()
    many: Callable[[Any], Any] = pyarrow.list_
    turn = [("episode", pyarrow.int32()), ("kind", text), ("action", text), ("reward", real)]
    return pyarrow.schema(
        [
            ("grant", whole),
            ("trial", whole),
            ("version", whole),
            ("environment", text),
            ("member", text),
            ("seat", pyarrow.int32()),
            ("seed", pyarrow.uint64()),
            ("reward_by_episode", many(real)),
            ("turns", many(pyarrow.struct([*turn, ("is_valid", pyarrow.bool_())]))),
            ("contexts", many(text)),
            ("tokens", many(many(pyarrow.int32()))),
            ("logprobs", many(many(pyarrow.float32()))),
            ("is_sampled", many(many(pyarrow.bool_()))),
        ]
    )
