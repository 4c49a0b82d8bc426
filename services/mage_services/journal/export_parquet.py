"""Trials as Parquet, and as a folder that HuggingFace's `datasets` loads; by the extra `export`."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from mage_async.attribution.rows import row_of, token_columns
from mage_async.attribution.turns import AttributedTrial
from mage_async.errors import RunError
from mage_async.trials.chat_format import ChatFormat

ROWS_AT_ONCE = 1000
CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.parquet
---

Trials of a run of mage_async, a row each; `docs/why_a_turn.md` explains the columns.
"""


def write_dataset(
    trials: Iterable[AttributedTrial], chat: ChatFormat, folder: Path, run: str
) -> int:
    """Write a folder for `datasets.load_dataset`, ready to be uploaded; as `write_parquet`."""
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    return write_parquet(trials, chat, folder / "data" / "train.parquet", run)


def write_parquet(trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path, run: str) -> int:
    """Write a row a trial; returns how many.

    Raises: RunError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RunError(
            "Parquet needs pyarrow: pip install 'mage_async[export]', or export to a file that "
            "ends in .jsonl"
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
