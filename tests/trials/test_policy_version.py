"""Runs of versions over tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mage_async.policy_version import (
    PROVENANCES,
    VersionRun,
    append_run,
    moved,
    tokens_by_provenance,
)


def test_a_run_is_added_only_where_it_says_something_else() -> None:
    runs: list[VersionRun] = []
    for run in (
        VersionRun(0, 1, 1),
        VersionRun(4, 1, 1),
        VersionRun(5, 1, 1, "segment"),
        VersionRun(9, 2, 1, "segment"),
    ):
        append_run(runs, run)
    assert [run.start for run in runs] == [0, 5, 9]


def test_a_run_of_a_piece_is_moved_to_its_place_in_the_whole() -> None:
    assert moved(VersionRun(2, 4, 3, "reply"), 10) == VersionRun(12, 4, 3, "reply")


def test_sampled_tokens_are_counted_by_how_their_version_is_known() -> None:
    runs = (VersionRun(2, 1, 1), VersionRun(5, 2, 1, "segment"))
    is_sampled = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
    assert tokens_by_provenance(runs, is_sampled) == {"exact": 2, "segment": 3, "reply": 0}
    assert tokens_by_provenance((), np.zeros(3, bool)) == dict.fromkeys(PROVENANCES, 0)


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(PROVENANCES)), max_size=6))
def test_every_sampled_token_is_counted_once(parts: list[tuple[int, str]]) -> None:
    runs, start = [], 0
    for number, (length, provenance) in enumerate(parts):
        runs.append(VersionRun(start, number, 0, provenance))
        start += length
    counts = tokens_by_provenance(runs, np.ones(start, bool))
    for provenance in PROVENANCES:
        assert counts[provenance] == sum(n for n, kind in parts if kind == provenance)
