"""Where a process's time goes."""

import time

from mage_services.processes.time_accounting import TimeAccounting


def test_the_states_of_a_process_sum_to_its_age() -> None:
    before, book, after = time.monotonic(), TimeAccounting("no grant"), time.monotonic()
    for state in ("playing", "no grant", "playing", "no fresh weights"):
        book.enter(state)
    youngest, seconds, oldest = time.monotonic(), book.seconds(), time.monotonic()
    assert set(seconds) == {"no grant", "playing", "no fresh weights"}
    rounding = 1e-6
    assert youngest - after - rounding <= sum(seconds.values()) <= oldest - before + rounding


def test_reading_the_book_changes_nothing() -> None:
    book = TimeAccounting("no grant")
    before = book.seconds()["no grant"]
    assert book.seconds()["no grant"] >= before
    assert set(book.seconds()) == {"no grant"}
