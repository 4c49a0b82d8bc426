"""Fixtures of the core's tests, and the number of processes that run the whole suite."""

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.run_directory import RunDirectory
from tests.helpers import made_up_runs

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # how long an example takes says nothing on a loaded one

GIB_PER_WORKER = 1.5  # torch and transformers, and what the processes of a test need
MAX_WORKERS = 8  # each collects all tests, so that more workers save nothing


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite on all cores; a part of it, or the slow tests, in one process.

    An option `-n` or `--pdb` goes before this, and without pytest-xdist nothing changes.
    """
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist itself, which would start workers of its own
    options, tests = config.option, config.rootpath / "tests"
    if getattr(options, "numprocesses", 0) is not None or options.markexpr != "not slow":
        return
    if options.usepdb or options.collectonly or options.keyword:
        return
    if any((config.invocation_params.dir / path).resolve() != tests for path in config.args):
        return
    num_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_workers = min(num_cores, int(num_gib / GIB_PER_WORKER), MAX_WORKERS)
    if num_workers > 1:
        options.numprocesses, options.dist = num_workers, "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker's torch would use all cores


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without the garbage collector, which would look at all modules and tests again
    and again although they live until the end; from then on it leaves them out.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """Give the tests of a process a cache of their own: no test finds what an earlier session
    stored, and none writes into the cache of the person who runs them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """How the quickstart's policy reads and writes."""
    folder = tmp_path_factory.mktemp("policy")
    words = environment_of(config_file.load(config_file.find(None), [])).facts.words
    save_tokenizer(build_tokenizer(words), folder)
    return load_chat(folder)


@pytest.fixture
def make_run(tmp_path):
    """Makes a run directory of the quickstart; see `helpers/made_up_runs.py`."""

    def make(name="run", **options):
        run = RunDirectory(tmp_path / name)
        made_up_runs.make_run(run, **options)
        return run

    return make


@pytest.fixture
def learned():
    """Returns by set and episode that every made-up run ends with, give or take 0.04."""
    return made_up_runs.LEARNED
