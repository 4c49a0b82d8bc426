"""Which versions are in the population, and how good everyone is."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import replay
from mage_async.config.schema import Keep
from mage_async.protocol.journal_records import (
    Commit,
    Granted,
    Published,
    Record,
    first_segment_header,
)
from mage_async.protocol.messages import GroupGrant, Rival, TrialResult
from mage_async.tasks.league import (
    League,
    LeagueState,
    expected,
    name_of,
    version_of,
    version_to_remove,
)
from mage_async.trajectory import Task
from mage_services.journal.record_bytes import decode_record, encode_record, scan
from tests.helpers.populations import KUHN, group, population, trial

KEEPS: tuple[Keep, ...] = ("newest", "best", "spread")


@given(st.integers(0, 2**40))
def test_a_version_has_a_name_and_is_found_by_it(version: int) -> None:
    assert version_of(name_of(version)) == version


@pytest.mark.parametrize("name", ["policy-", "policy-x", "policy--1", "nash", "", "policy", "7"])
def test_no_other_name_is_a_versions(name: str) -> None:
    assert version_of(name) is None


@settings(max_examples=200, deadline=None)
@given(
    keep=st.sampled_from(KEEPS),
    every=st.integers(1, 4),
    kept=st.integers(1, 6),
    returns=st.lists(st.floats(-4, 4), min_size=1, max_size=60),
)
def test_few_versions_are_kept_and_the_newest_always(
    keep: Keep, every: int, kept: int, returns: list[float]
) -> None:
    league = League(population(every=every, kept=kept, keep=keep), KUHN.facts)
    source = random.Random(len(returns))
    due: list[int] = []
    for version, earned in enumerate(returns):
        rivals = [name_of(each) for each in league.rivals()]
        league.trained([group(source.choice([*rivals, "x"]), earned)])
        league.published(version)
        due += [version] if version % every == 0 else []
        now = league.rivals()
        assert len(now) == min(kept, len(due))
        assert now[-1] == due[-1]
        assert list(now) == sorted(set(now) & set(due))
        if keep == "newest":
            assert list(now) == due[-kept:]
        if keep == "spread" and kept > 2:
            assert now[0] == 0


def test_spread_keeps_all_times_alike() -> None:
    league = League(population(every=1, kept=5), KUHN.facts)
    for version in range(200):
        league.published(version)
        gaps = np.diff(league.rivals())[:-1]  # the newest is as near as it is
        assert version < 5 or gaps.max() <= 5 * gaps.min(), league.rivals()


def test_of_the_best_rated_the_worst_goes() -> None:
    assert version_to_remove([2, 4, 6, 8], {2: 10.0, 4: -5.0, 6: 0.0, 8: -50.0}, "best") == 4
    assert version_to_remove([2, 4], {2: 0.0, 4: -1.0}, "best") == 2
    assert version_to_remove([2, 4], {2: 0.0, 4: -1.0}, "spread") == 2


@given(st.integers(-2000, 2000), st.integers(-2000, 2000))
def test_two_expectations_make_one_game(mine: float, theirs: float) -> None:
    assert expected(mine, theirs) + expected(theirs, mine) == pytest.approx(1)
    assert (expected(mine, theirs) >= 0.5) == (mine >= theirs)


def test_four_hundred_points_are_ten_to_one() -> None:
    assert expected(400.0, 0.0) == pytest.approx(10 / 11)


def test_ratings_are_won_from_each_other_and_order_members_by_strength() -> None:
    league = League(population("resampled", rivals=0.0), KUHN.facts)
    for _ in range(300):
        league.trained([group("strong", -2.0), group("even", 0.0), group("weak", 3.0)])
    ratings = {name: each.rating for name, each in league.state().standings.items()}
    assert ratings["weak"] < ratings["even"] < ratings["strong"]
    assert league.rating + sum(ratings.values()) == pytest.approx(0)
    # Of Kuhn's -4 … 4, a return of 3 is a score of 7/8: 338 points.
    assert league.rating - ratings["weak"] == pytest.approx(400 * np.log10(7), abs=10)


def test_against_itself_nothing_is_rated() -> None:
    league = League(population(every=0), KUHN.facts)
    league.published(3)
    assert league.rivals() == (3,)
    league.trained([group(name_of(3), 4.0)])
    league.published(4)
    assert league.rivals() == (4,)
    table = league.state()
    assert (table.rating, table.rivals) == (0.0, ())
    assert table.standings["policy"].groups == 1


def test_a_run_without_a_population_counts_nothing() -> None:
    league = League(population(rivals=0.0), KUHN.facts)
    league.published(0)
    league.trained([group("x", 1.0)])
    assert league.state() == LeagueState()
    assert not league.awaits(0)
    assert not league.kept()


def grant_of(number: int, member: str) -> GroupGrant:
    version = version_of(member)
    rival = None if version is None else Rival(version=version, path=f"/w/{version}")
    return GroupGrant(
        grant=number,
        epoch=0,
        environment="kuhn",
        member=member,
        seat=0,
        seed=5,
        num_trials=1,
        num_episodes=2,
        version=0,
        deadline_s=9.0,
        rival=rival,
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), keep=st.sampled_from(KEEPS), head_at=st.integers(1, 24))
def test_a_restarted_learner_knows_the_same_population(seed: int, keep: Keep, head_at: int) -> None:
    """Its journal ends anywhere, and perhaps began anew with a head in between."""
    source, rules = random.Random(seed), population(keep=keep)
    league, ledger = League(rules, KUHN.facts), Ledger(1, 3, 1)
    records: list[Record] = [first_segment_header(0, 0)]
    replayed_at = source.randrange(1, 25)
    records.append(Published(version=0, path="w", digest="d"))
    league.published(0)
    for version in range(1, 25):
        members = ["x", "y", *(name_of(each) for each in league.rivals())]
        grant = grant_of(version - 1, source.choice(members))
        result = TrialResult(
            grant.grant, 0, trial(grant.member, [source.uniform(-4, 4), source.uniform(-4, 4)])
        )
        records += [Granted(peer="a", version=version - 1, grant=grant), result]
        task = Task("kuhn", grant.member, 5)
        ledger.grant(task, num_episodes=2, peer="a", now=0.0, deadline_s=9.0)
        ledger.receive(result)
        groups = ledger.take_batch()
        assert groups is not None
        league.trained(groups)
        records.append(
            Commit(version=version, grants=(version - 1,), digest="d", tensors={}, time_s=1.0)
        )
        ledger.trained(version)
        if version % source.choice((1, 2)) == 0:
            records.append(Published(version=version, path="w", digest="d"))
            league.published(version)
        if version == head_at:
            head = ledger.segment_header("", 9.0)
            records = [type(head)(**{**_fields(head), "population": league.state()})]
        if version == replayed_at and version >= head_at:
            break
    again = League(rules, KUHN.facts)
    on_disk = [decode_record(scan(_file([record])).bodies[0]) for record in records]
    for _ in replay(on_disk, Ledger(1, 3, 1), again):
        continue
    assert again.state() == league.state()
    assert again.rivals() == league.rivals()


def _fields(head: object) -> dict[str, object]:
    return {name: getattr(head, name) for name in head.__struct_fields__}


def _file(records: list[Record]) -> bytes:
    from mage_services.journal.record_bytes import MAGIC

    return MAGIC + b"".join(bytes(piece) for record in records for piece in encode_record(record))
