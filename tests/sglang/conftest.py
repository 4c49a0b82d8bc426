"""Nothing here is collected where SGLang is not installed; the reason is shown by `-rs`."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `served`, which the tests share

ABSENT = (
    "SGLang is not installed here: run python tests/sglang/make_env.py, "
    "then .sglang_env/bin/python -m pytest tests/sglang"
)


class Absent(pytest.File):
    """A file of tests that cannot be imported."""

    def collect(self):
        """Say why."""
        pytest.skip(ABSENT, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Absent | None:
    """Skip the whole file, or leave it to pytest."""
    return None if find_spec("sglang") else Absent.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory):
    """Small models of random weights; version 0 is a model directory, others are files."""
    from served import Policies

    return Policies(tmp_path_factory.mktemp("policies"))
