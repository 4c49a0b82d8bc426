"""The index of a run: what it says, and that it follows what happens to the run's files."""

import json
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context

import pytest

from mage_async.errors import RunError
from mage_async.protocol.journal_records import Commit
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.reader import open_journal
from mage_services.view.index import FORMAT, RunReader, connect, index_file
from mage_services.view.index_process import IndexBuilder
from mage_services.view.trial_pages import search
from tests.helpers.recorded_runs import unpack
from tests.view.conftest import build


@pytest.fixture
def run(tmp_path):
    return unpack("finished", tmp_path)


def share_read(reader: RunReader) -> float:
    """The share of the run's files that the index has read."""
    read, total = reader.progress()
    return read / total if total else 1.0


def test_the_index_says_of_every_trial_what_the_journal_does(finished):
    build(finished)
    records = list(open_journal(finished.journal).records())
    results = [record for record in records if isinstance(record, TrialResult)]
    with RunReader(finished) as reader:
        for commit in (record for record in records if isinstance(record, Commit)):
            groups = reader.groups_of(commit.version)
            assert tuple(group.number for group in groups) == commit.grants
            listed = reader.trials_of(commit.grants)
            wanted = [each for each in results if each.grant in commit.grants]
            assert len(listed) == len(wanted)
        for result in results:
            (found,) = (
                each
                for each in reader.trials_of([result.grant])
                if each.number == result.trial.index
            )
            assert found.rewards == result.trial.episode_rewards()
            assert found.num_tokens == result.trial.num_tokens()
            assert found.num_invalid == result.trial.num_invalid()
            assert found.member == result.trial.task.member
            loaded = reader.load(found.group, found.number)
            assert loaded.turns == result.trial.turns
        assert share_read(reader) == 1.0
        assert reader.last_step() == 4
        assert [line["step"] for line in reader.metrics(10)] == [1, 2, 3, 4]
        assert [line["step"] for line in reader.metrics(2)] == [1, 4]
        assert [len(reader.metrics(most)) for most in (1, 2, 3, 4)] == [1, 2, 2, 4]


def test_a_search_shows_the_text_that_it_found_after_letters_whose_lower_case_is_longer(finished):
    build(finished)
    with RunReader(finished) as reader:
        trials = reader.trials_between(1, 4, 1)
        (hit,) = search(reader, trials, lambda tokens: "İİİ a Rock. b", "rock.", 0).hits
    assert (hit["before"], hit["match"], hit["after"]) == ("İİİ a ", "Rock.", " b")


def test_the_index_follows_files_that_grow(run):
    (segment,) = run.journal.glob("*.log")
    whole, lines = segment.read_bytes(), run.metrics.read_text()
    segment.write_bytes(whole[: len(whole) // 2])
    run.metrics.write_text(lines[: len(lines) // 2])
    build(run)
    with RunReader(run) as reader:
        few = len(reader.trials_between(1, 9, 1000))
        assert len(reader.metrics(10)) < 4
        assert share_read(reader) > 0.9  # all but the torn ends
    segment.write_bytes(whole)
    run.metrics.write_text(lines)
    build(run)
    with RunReader(run) as reader:
        assert len(reader.trials_between(1, 9, 1000)) == 48 > few
        assert len(reader.metrics(10)) == 4


def test_one_slice_reads_all_files_and_then_only_looks_at_what_changed(run, monkeypatch):
    builder = IndexBuilder(run)
    monkeypatch.setattr("mage_services.view.index_process.SLICE_S", 60.0)
    assert not builder.work()
    with RunReader(run) as reader:
        assert share_read(reader) == 1.0
    with monkeypatch.context() as patched:
        patched.setattr("mage_services.view.index_process._digest", None)  # nothing is opened
        assert not builder.work()
    with run.metrics.open("a") as out:
        out.write('{"step": 5, "time_s": 9.0}\n')
    assert not builder.work()
    builder.close()
    with RunReader(run) as reader:
        assert reader.last_step() == 5


def test_records_longer_than_what_is_read_at_once_are_found(run, monkeypatch):
    monkeypatch.setattr("mage_services.view.index_process.WINDOW_BYTES", 100)
    build(run)
    with RunReader(run) as reader:
        assert len(reader.trials_between(1, 9, 1000)) == 48
        assert len(reader.metrics(10)) == 4


CUT = """
import os, sys
from pathlib import Path
from mage_async.results.run_directory import RunDirectory
from mage_services.view.index_process import IndexBuilder

class Cutting(IndexBuilder):
    def _take_record(self, segment, end, body):
        for file in self._run.journal.glob("*.log"):
            os.truncate(file, 0)
        super()._take_record(segment, end, body)

builder = Cutting(RunDirectory(Path(sys.argv[1])))
while builder.work():
    pass
"""


def test_a_journal_that_is_cut_while_it_is_read_ends_nobody(run):
    (segment,) = run.journal.glob("*.log")
    whole = segment.read_bytes()
    subprocess.run([sys.executable, "-c", CUT, str(run.root)], check=True)
    segment.write_bytes(whole)
    build(run)
    with RunReader(run) as reader:
        assert len(reader.trials_between(1, 9, 1000)) == 48


def test_another_run_of_the_same_name_is_read_anew(run, tmp_path):
    build(run)
    other = unpack("other", tmp_path)
    shutil.rmtree(run.journal)
    shutil.copytree(other.journal, run.journal)
    build(run)
    records = list(open_journal(other.journal).records())
    wanted = {record.version for record in records if isinstance(record, Commit)}
    with RunReader(run) as reader:
        assert {n for n in range(1, 99) if reader.groups_of(n)} == wanted


def test_lines_that_a_resumed_learner_wrote_anew_are_read_anew_and_the_journal_is_not(run):
    build(run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[2:] = [line | {"time_s": 77.125} for line in lines[2:]]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(run.journal)
    build(run)
    with RunReader(run) as reader:
        assert [line["time_s"] for line in reader.metrics(9)][2:] == [77.125, 77.125]
        assert len(reader.trials_between(1, 4, 1000)) == 48


def test_a_folder_that_cannot_be_written_is_indexed_in_a_cache(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda *_: False)
    build(run)
    assert index_file(run).is_relative_to(tmp_path / "cache")
    assert not run.index.exists()
    with RunReader(run) as reader:
        assert reader.last_step() == 4


def test_an_empty_file_becomes_an_index(run):
    run.index.write_bytes(b"")
    build(run)
    with RunReader(run) as reader:
        assert reader.last_step() == 4


def test_a_copied_folder_needs_no_second_index(run, tmp_path):
    build(run)
    copied = type(run)(shutil.copytree(run.root, tmp_path / "copy"))
    builder = IndexBuilder(copied)
    assert not builder.work()
    builder.close()
    with RunReader(copied) as reader:
        assert len(reader.trials_between(1, 4, 1000)) == 48


def test_a_trial_whose_segment_was_deleted_is_listed_and_says_so(run):
    build(run)
    shutil.rmtree(run.journal)
    with RunReader(run) as reader:
        trial = reader.trials_between(1, 4, 1)[0]
        with pytest.raises(RunError, match="was deleted, and the trial with it"):
            reader.load(trial.group, trial.number)


def test_a_trial_that_was_damaged_after_it_was_indexed_is_not_shown(run):
    build(run)
    (segment,) = run.journal.glob("*.log")
    with RunReader(run) as reader:
        trial = reader.trials_between(1, 4, 1)[0]
        where = "SELECT place, size FROM trials WHERE grp = ? AND number = ?"
        place, size = reader._one(where, (trial.group, trial.number))
        whole = segment.read_bytes()
        for at in (place - 5, place, place + size // 2, place + size - 1):
            segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(RunError, match=f"is damaged at byte {place}: its checksum"):
                reader.load(trial.group, trial.number)
        segment.write_bytes(whole[: place + size - 1])
        with pytest.raises(RunError, match=f"is damaged at byte {place}"):
            reader.load(trial.group, trial.number)


def test_at_most_as_many_evaluations_are_read_as_are_wanted_and_the_newest_is_among_them(run):
    lines = [json.dumps({"version": number, "split": "heldout"}) for number in range(7)]
    run.curve.write_text("".join(f"{line}\n" for line in lines))
    build(run)
    with RunReader(run) as reader:
        read = [reader.curve(most) for most in range(1, 9)]
    assert [len(found) for found in read] == [1, 2, 3, 4, 4, 4, 7, 7]
    assert all(found[-1]["version"] == 6 for found in read)


def test_damaged_metrics_are_named(run):
    run.metrics.write_text(json.dumps({"step": 1}) + "\nnot json\n")
    builder = IndexBuilder(run)
    with pytest.raises(RunError, match=r"metrics.jsonl: damaged at byte 12"):
        builder.work()
    builder.close()


def test_a_segment_that_cannot_be_read_is_named(run):
    segment = run.journal / "99999999.log"
    segment.symlink_to(segment)  # fails as a network disk does, with another error than "no file"
    builder = IndexBuilder(run)
    with pytest.raises(RunError, match=r"99999999.log cannot be read: Too many levels"):
        builder.work()
    builder.close()


def opened(roots, at):
    """Open each index at its moment and add a row; how often that failed, and why."""
    faults = []
    for root, moment in zip(roots, at, strict=True):
        while time.time() < moment:
            pass
        try:
            with closing(connect(RunDirectory(root))) as index, index:
                index.execute("INSERT INTO steps VALUES (?, '')", (random.getrandbits(60),))
        except (RunError, sqlite3.Error) as error:
            faults.append(repr(error.__cause__ or error))
    return faults


def test_a_new_index_may_be_opened_by_several_at_once(tmp_path):
    roots = [tmp_path / str(number) for number in range(100)]
    for root in roots:
        root.mkdir()
        (root / "config.toml").write_text("seed = 1")
    at = [time.time() + 0.5 + 0.02 * place for place in range(len(roots))]
    with ProcessPoolExecutor(3, mp_context=get_context("fork")) as pool:
        found = [pool.submit(opened, roots, at) for _ in range(3)]
        assert [each.result() for each in found] == [[], [], []]
    for root in roots:
        with closing(connect(RunDirectory(root))) as index:
            assert index.execute("SELECT count(*) FROM steps").fetchone()[0] == 3


def test_tables_of_another_format_are_replaced(run):
    build(run)
    with closing(sqlite3.connect(run.index)) as index:
        index.execute("DROP TABLE curve")
        index.execute("CREATE TABLE older (number INTEGER)")
        index.execute(f"PRAGMA user_version = {FORMAT - 1}")
    build(run)
    with RunReader(run) as reader:
        assert reader.last_step() == 4
        assert share_read(reader) == 1.0
    with closing(sqlite3.connect(run.index)) as index:
        tables = index.execute("SELECT name FROM sqlite_schema WHERE name = 'older'").fetchall()
    assert tables == []
