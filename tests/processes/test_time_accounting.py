"""Where a process's time goes."""

import time

import pytest

from mage_services.processes.time_accounting import TimeAccounting


def test_the_states_of_a_process_sum_to_its_age() -> None:
    began, book = time.monotonic(), TimeAccounting("no grant")
    for state in ("playing", "no grant", "playing", "no fresh weights"):
        book.enter(state)
    seconds = book.seconds()
    assert set(seconds) == {"no grant", "playing", "no fresh weights"}
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - began, abs=0.05)


def test_reading_the_book_changes_nothing() -> None:
    book = TimeAccounting("no grant")
    before = book.seconds()["no grant"]
    assert book.seconds()["no grant"] >= before
    assert set(book.seconds()) == {"no grant"}
