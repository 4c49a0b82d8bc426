"""Where a test opens channels: of every kind, or over ipc alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.channel_site import Site


@pytest.fixture(params=["ipc", "tcp", "memory"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made = Site(request.param, tmp_path)
    with made.open:
        yield made


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Site]:
    made = Site("ipc", tmp_path)
    with made.open:
        yield made
