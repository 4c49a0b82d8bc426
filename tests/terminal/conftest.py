"""What every test of the terminal shows: a run of 60 steps."""

import pytest

from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory


@pytest.fixture
def config():
    return config_file.load(config_file.find(None), ["learner.steps=60"])


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)
