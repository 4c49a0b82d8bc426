"""Both seats of a play, which one record of the journal holds, are two trials to a reader."""

from dataclasses import replace
from pathlib import Path

import pytest

from mage_async.protocol.journal_records import Record, first_segment_header
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.league import ITSELF
from mage_services.journal.record_bytes import MAGIC, encode_record
from mage_services.view import trial_pages
from mage_services.view.index import RunReader
from mage_services.view.page_request import PageRequest
from mage_services.view.server import PAGES
from tests.helpers.populations import trial
from tests.view.conftest import build


def play(grant: int, index: int) -> TrialResult:
    one, other = trial(ITSELF, [1.0, -2.0], index), trial(ITSELF, [-1.0, 2.0], index + 1)
    return TrialResult(grant, 0, one, other=replace(other, task=other.task.from_other_seat()))


def journal(folder: Path, *records: Record) -> RunDirectory:
    run = RunDirectory(folder)
    run.journal.mkdir(parents=True)
    run.config.write_text("")
    written = (
        bytes(piece)
        for record in (first_segment_header(0, 0), *records)
        for piece in encode_record(record)
    )
    (run.journal / "00000000.log").write_bytes(MAGIC + b"".join(written))
    return run


def test_a_page_has_each_seat_with_its_own_rewards(tmp_path: Path) -> None:
    run = journal(tmp_path, play(3, 0), play(3, 2))
    build(run)
    with RunReader(run) as reader:
        listed = reader.trials_of([3])
        assert [each.number for each in listed] == [0, 1, 2, 3]
        assert [each.rewards for each in listed[:2]] == [[1.0, -2.0], [-1.0, 2.0]]
        loaded = [reader.load(3, each.number) for each in listed]
        assert [each.task.seat for each in loaded] == [0, 1, 0, 1]
    page = PAGES["group/{group}"](PageRequest("", {"r": run}, "r", {"group": 3}, {}, None))
    assert "in both seats" in page
    for number, seat in ((0, 0), (1, 1), (2, 0), (3, 1)):
        assert f"trial {number} · seat {seat}" in page


def test_a_page_says_how_many_trials_of_a_large_group_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = journal(tmp_path, play(3, 0), play(3, 2))
    build(run)
    request = PageRequest("", {"r": run}, "r", {"group": 3}, {}, None)
    assert "trials are shown" not in PAGES["group/{group}"](request)
    monkeypatch.setattr(trial_pages, "MAX_SIDE_BY_SIDE", 3)
    page = PAGES["group/{group}"](request)
    assert "The first 3 of 4 trials are shown." in page
    assert "No step has trained this group yet: 4 of" in page
