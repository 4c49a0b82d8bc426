"""A loop in a thread hides no failure of the context manager that is open on it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mage_services.api.background import Background


@asynccontextmanager
async def failing(*, early: bool) -> AsyncIterator[int]:
    """Fail when it is entered, or when it is left."""
    if early:
        raise OSError("no room")
    yield 7
    raise OSError("not flushed")


async def doubled(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def test_a_failure_at_the_beginning_is_raised_where_it_is_entered() -> None:
    with pytest.raises(OSError, match="no room"), Background(lambda: failing(early=True)):
        pytest.fail("entered")


def test_a_failure_at_the_end_is_raised_where_it_is_left() -> None:
    with (
        pytest.raises(OSError, match="not flushed"),
        Background(lambda: failing(early=False)) as background,
    ):
        assert background.run(doubled(background.value)) == 14
    background.__exit__()  # what was left is not left again, and nothing is raised
