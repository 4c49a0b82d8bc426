"""When open pages hear of a change: a page of a run shows its index, so only once that has it."""

import asyncio
import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mage_async.results.run_directory import RunDirectory, find_runs
from mage_async.results.run_files import TAIL_BYTES, last_line
from mage_services.processes.run_lock import hold
from mage_services.view import run_watcher
from mage_services.view.index_process import ReadRun
from mage_services.view.run_watcher import RunWatcher, listed_run


class Indexer:
    """What was said to it."""

    def __init__(self):
        self.said = []

    def send(self, message):
        self.said.append(message)


async def looked_once(root, opened):
    """The runs that pages were told of after a first look, and what was said to the index."""
    with ThreadPoolExecutor(1) as threads:
        watcher = RunWatcher(root, threads, Indexer(), find_runs(root), opened=set(opened))
        told = {name: asyncio.Queue() for name in watcher.runs}
        watcher.listeners = {queue: name for name, queue in told.items()}
        watcher.watch()
        await asyncio.get_running_loop().run_in_executor(threads, int)  # behind the look
        await asyncio.sleep(0)  # what follows the look is called before this goes on
    return {name for name, queue in told.items() if not queue.empty()}, watcher.indexer.said


def test_a_run_whose_curve_lacks_a_field_is_listed_with_the_reason(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text("seed = 1")
    run.curve.write_text('{"sets": {"heldout": {"return_by_episode": [1.0]}}}\n')
    assert "evaluations.jsonl lacks 'version'" in listed_run("run", run).fault


def evaluated(version, last):
    """An evaluation of a version, as the files of a run have it."""
    score = {"return_by_episode": [0.25, last], "ci95_by_episode": [0.1, 0.2]}
    return json.dumps({"version": version, "sets": {"heldout": score}})


def test_the_final_evaluation_is_the_last_point_of_a_run_in_the_list(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text("seed = 1")
    run.evaluation.write_text(evaluated(40, last=0.5))
    assert listed_run("run", run).curve == [(40, 0.5, 0.2)]
    run.curve.write_text(f"{evaluated(20, last=0.3)}\n{evaluated(40, last=0.4)}\n")
    assert listed_run("run", run).curve == [(20, 0.3, 0.2), (40, 0.5, 0.2)]
    run.evaluation.write_text(evaluated(50, last=0.75))
    assert listed_run("run", run).curve == [(20, 0.3, 0.2), (40, 0.4, 0.2), (50, 0.75, 0.2)]


def test_a_run_that_is_looked_at_is_told_of_by_its_index_and_others_at_once(tmp_path):
    for name in ("opened", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("seed = 1")
    told, said = asyncio.run(looked_once(tmp_path, {"opened"}))
    assert told == {"other"}
    assert said == [ReadRun(str(tmp_path / "opened"))]


def test_a_run_that_cannot_be_read_does_not_stop_the_watching_of_others(tmp_path):
    for name in ("broken", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("seed = 1")
    # A link to itself fails as a network disk does: with an error that does not say "no such file".
    broken = RunDirectory(tmp_path / "broken")
    broken.metrics.symlink_to(broken.metrics)
    assert "other" in asyncio.run(looked_once(tmp_path, set()))[0]
    assert "Too many levels of symbolic links" in listed_run("broken", broken).fault


def test_a_folder_that_cannot_be_read_hides_no_other_run(tmp_path, monkeypatch):
    for name in ("broken", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("seed = 1")
    is_dir = Path.is_dir

    def stale(path, **options):
        if path.name == "broken":
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_dir(path, **options)

    monkeypatch.setattr(Path, "is_dir", stale)
    assert find_runs(tmp_path).keys() == {"other"}


@pytest.mark.skipif(not Path("/proc/locks").is_file(), reason="the system lists no locks")
def test_pages_are_told_of_a_run_whose_process_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_watcher, "INTERVAL_S", 0.0)
    run = RunDirectory(tmp_path)
    run.config.write_text("seed = 1")
    lock = hold(run.lock, "held")

    async def told_after_release():
        with ThreadPoolExecutor(1) as threads:
            watcher = RunWatcher(tmp_path, threads, Indexer(), find_runs(tmp_path))
            told = asyncio.Queue()
            watcher.listeners = {told: ""}
            watcher.watch()
            await told.get()
            os.close(lock)  # as the kernel does when the process ends
            async with asyncio.timeout(10):
                await told.get()

    asyncio.run(told_after_release())


def test_the_last_line_is_read_however_long_it_is(tmp_path):
    file = tmp_path / "metrics.jsonl"
    short, long = (
        {"step": step, "text": "x" * size} for step, size in ((1, 0), (2, 9 * TAIL_BYTES))
    )
    for lines in ([short], [long], [short, long], [long, short], [long, long]):
        written = "".join(f"{json.dumps(line)}\n" for line in lines)
        for torn in ("", '{"step": 3, "te', '{"step": 3' + " " * 2 * TAIL_BYTES):
            file.write_text(written + torn)
            assert last_line(file) == lines[-1]
    for unfinished in ("", "{", "{" + " " * 2 * TAIL_BYTES):
        file.write_text(unfinished)
        assert last_line(file) == {}
