"""Fixtures of the core's tests."""

import pytest
from hypothesis import HealthCheck, settings

from mage_async.assembly import WORDS, environment_of
from mage_async.config import config_file
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.run_directory import RunDirectory
from tests.helpers import made_up_runs

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # how long an example takes says nothing on a loaded one


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """How the quickstart's policy reads and writes."""
    folder = tmp_path_factory.mktemp("policy")
    words = environment_of(config_file.load(config_file.find(None), [])).facts.words
    save_tokenizer(build_tokenizer((*words, *WORDS)), folder)
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
