"""Trials as files for others."""

import json
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest

from mage_async.attribution import AttributedTrial, JournalStep, attributed
from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Group, Segment, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.journal.export import ROWS_AT_ONCE, export
from tests.helpers.fuzzing.messages_and_records import example_trial


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("policy")
    save_tokenizer(build_tokenizer(("rock",)), folder)
    return load_chat(folder)


def trial(grant: int, chat: ChatFormat) -> AttributedTrial:
    """A trial whose tokens the tiny tokenizer knows, the only one of step 6."""
    segment = Segment(
        np.arange(5, 11, dtype=np.int32),
        np.array([0, 1, 1, 0, 0, 1], bool),
        -np.arange(6, dtype=np.float32) / 3,
        (VersionRun(0, 4, 3),),
    )
    turns = example_trial().trial.turns[:1]
    played = Trial(Task("rps", "m", 2**63, 1), 2, 1, (segment,), turns)
    config = config_file.load(config_file.find(None))
    step = JournalStep(6, [Group(grant, 4, (played,))], config, is_whole=True)
    return next(attributed(step, chat.decode))


def test_lines_of_json_hold_a_trial_each(chat: ChatFormat, tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    assert export([trial(7, chat), trial(8, chat)], chat, file) == 2
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["grant"], row["trial"], row["version"]) for row in rows] == [(7, 2, 4), (8, 2, 4)]
    assert rows[0]["contexts"] == [chat.decode([*range(5, 11)])]
    assert rows[0]["step"] == 6
    (turn,) = rows[0]["turns"]
    assert json.loads(turn["info"]) == {"near": [1, None]}
    assert (turn["return"], turn["advantage"], turn["staleness"]) == (0.5, 0.0, 1)


def test_parquet_holds_the_same_and_every_token(chat: ChatFormat, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra `export`")
    lines, file = tmp_path / "trials.jsonl", tmp_path / "trials.parquet"
    count = ROWS_AT_ONCE + 3
    first, *others = [trial(number, chat) for number in range(3)]
    assert export(chain((first, *others), repeat(others[0], count - 3)), chat, file) == count
    export([first], chat, lines)
    row = parquet.read_table(file).slice(0, 1).to_pylist()[0]
    segment = first.trial.segments[0]
    assert row.pop("tokens") == [segment.tokens.tolist()]
    assert row.pop("logprobs") == [segment.logprobs.tolist()]
    assert row.pop("is_sampled") == [segment.is_sampled.tolist()]
    assert row.pop("versions") == [[0, 4, 4, 0, 0, 4]]
    assert row.pop("staleness") == [[0, 0, 1, 0, 0, 1]]
    assert row.pop("advantages") == [[0.0] * 6]
    assert row == json.loads(lines.read_text())
    assert parquet.read_table(file)["grant"].to_pylist() == [0, 1, 2, *[1] * (count - 3)]


def test_parquet_without_pyarrow_is_a_sentence_and_leaves_nothing(
    chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RunError, match=r"needs pyarrow: pip install 'mage_async\[export\]', or"):
        export([trial(0, chat)], chat, tmp_path / "trials.parquet")
    assert not list(tmp_path.iterdir())


def test_another_ending_or_place_is_a_sentence(chat: ChatFormat, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"ends in \.jsonl, \.parquet, \.dataset or \.atif, got '\.csv'"
    ):
        export([], chat, tmp_path / "trials.csv")
    unread = (pytest.fail("a trial is read before the refusal") for _ in range(1))
    with pytest.raises(RunError, match=r"none/trials\.jsonl: there is no folder .*none"):
        export(unread, chat, tmp_path / "none" / "trials.jsonl")
    (tmp_path / "trials.jsonl").mkdir()
    with pytest.raises(RunError, match=r"trials\.jsonl is a folder, which is not overwritten"):
        export(unread, chat, tmp_path / "trials.jsonl")


def test_a_fault_of_the_journal_is_not_laid_to_the_file(chat: ChatFormat, tmp_path: Path) -> None:
    def unreadable() -> Iterator[AttributedTrial]:
        yield trial(7, chat)
        raise OSError(5, "Input/output error", "000.journal")

    with pytest.raises(RunError, match=r"the export to .* failed: .*error: '000\.journal'"):
        export(unreadable(), chat, tmp_path / "trials.jsonl")
    assert not list(tmp_path.iterdir())
