"""Runs to look at, and a server that shows them."""

import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from mage_async.results.run_directory import RunDirectory
from mage_services.view.index_process import IndexBuilder
from tests.helpers.recorded_runs import unpack

MOST_CHANGES = 200


class Shown:
    """A served folder of runs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host = address.split("/")[2]

    def get(self, path="", *, headers=None, data=None, address=None):
        """Status, text and headers of a page; an error's are returned like any other's."""
        request = urllib.request.Request(
            (address or self.address) + path, headers=headers or {}, data=data
        )
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read().decode(), answer.headers

    def page(self, path):
        """The text of a page that is there."""
        status, text, _ = self.get(path)
        assert status == 200, text
        return text

    def until(self, path, wanted):
        """A page once a pattern is in it; between two looks the server tells of a change."""
        run = path.split("/")[1] if path else ""
        with urllib.request.urlopen(f"{self.address}events?run={run}", timeout=60) as events:
            for _ in range(MOST_CHANGES):
                status, text, _ = self.get(path)
                if status == 200 and re.search(wanted, text):
                    return text
                while events.readline().strip() in (b"", b": here"):
                    pass
        raise AssertionError(text)


@contextmanager
def shown(folder):
    """`mage view` of a folder."""
    command = [sys.executable, "-m", "mage_async.launch", "view", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield Shown(re.search(r"http://\S+", line)[0])
    finally:
        process.terminate()
        process.wait(100)
        process.stdout.close()


def build(run):
    """Bring the index of a run up to date."""
    builder = IndexBuilder(run)
    while builder.work():
        pass
    builder.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps; nobody changes it."""
    return unpack("finished", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(finished):
    """The run, one that is damaged, and one whose metrics lack what ours have; served."""
    damaged, strange = (finished.root.parent / name for name in ("damaged", "strange"))
    damaged.mkdir()
    (damaged / "config.toml").write_text("seed = 'none'")
    strange.mkdir()
    (strange / "config.toml").write_text(finished.config.read_text())
    (strange / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0}\n')
    build(RunDirectory(strange))
    with shown(finished.root.parent) as made:
        yield made
