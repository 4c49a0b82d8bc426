"""The ledger of slots: examples small enough to follow by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mage_async.admission.ledger import (
    MAX_REASONS,
    NO_VARIANCE,
    Accepted,
    Counts,
    Duplicate,
    Ledger,
    Unknown,
)
from mage_async.admission.policies import POLICIES
from mage_async.environments.catalogue import load
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.messages import EpisodeResult, GroupGrant, TrialResult
from mage_async.results.dropped_bias import Kinds, Selection, dropped_groups
from mage_async.trajectory import FinishedEpisodes, Group, Kind, Segment, Task, Trial, Turn

SEGMENT = Segment(
    np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
)


def ledger(**changes: object) -> Ledger:
    """One group of two trials a step, at most one step stale: two slots."""
    return Ledger(
        **{"groups_per_step": 1, "max_staleness": 1, "trials_per_group": 2} | changes  # type: ignore[arg-type]
    )


def grant(slots: Ledger, *, seed: int = 0, peer: str = "a", now: float = 0.0) -> GroupGrant:
    task = Task("rps", "cycle-1", seed)
    return slots.grant(task, num_episodes=3, peer=peer, now=now, deadline_s=10.0)


def result(granted: GroupGrant, index: int, epoch: int | None = None) -> TrialResult:
    task = Task(granted.environment, granted.member, granted.seed, granted.seat)
    trial = Trial(task, index, granted.num_episodes, (SEGMENT,), ())
    return TrialResult(granted.grant, granted.epoch if epoch is None else epoch, trial)


def complete(slots: Ledger, granted: GroupGrant) -> None:
    for index in range(granted.num_trials):
        slots.receive(result(granted, index))


def test_a_grant_carries_the_task_and_can_be_sent() -> None:
    slots = ledger(version=4, next_grant=9)
    granted = grant(slots, seed=5)
    assert granted == GroupGrant(
        grant=9,
        epoch=0,
        environment="rps",
        member="cycle-1",
        seat=0,
        seed=5,
        num_trials=2,
        num_episodes=3,
        version=4,
        deadline_s=10.0,
    )
    assert decode(encode(granted)) == granted


def test_a_slot_is_held_until_its_step_is_published() -> None:
    slots = ledger()
    first, second = grant(slots), grant(slots)
    assert not slots.may_grant()
    complete(slots, first)
    assert not slots.may_grant()
    assert [group.grant for group in slots.take_batch() or []] == [first.grant]
    assert not slots.may_grant()
    slots.trained(1)
    assert slots.may_grant()
    assert grant(slots).version == 1
    assert second.version == 0


def test_a_complete_group_waits_for_an_older_one() -> None:
    slots = ledger()
    first, second = grant(slots), grant(slots)
    complete(slots, second)
    assert slots.take_batch() is None
    complete(slots, first)
    assert [group.grant for group in slots.take_batch() or []] == [first.grant]
    assert [group.grant for group in slots.take_batch() or []] == [second.grant]


def test_a_group_holds_its_trials_in_order_of_index() -> None:
    slots = ledger()
    granted = grant(slots)
    assert slots.receive(result(granted, 1)) == Accepted(is_complete=False)
    assert slots.receive(result(granted, 0)) == Accepted(is_complete=True)
    (group,) = slots.take_batch() or []
    assert [trial.index for trial in group.trials] == [0, 1]


def test_dropping_the_oldest_group_lets_the_next_one_train() -> None:
    slots = ledger()
    first, second = grant(slots), grant(slots)
    complete(slots, second)
    assert slots.drop(first.grant, 0, "environment raised")
    assert slots.may_grant()
    assert [group.grant for group in slots.take_batch() or []] == [second.grant]
    assert slots.counts().dropped_by_reason == {"environment raised": 1}


def test_a_late_drop_of_an_earlier_epoch_changes_nothing() -> None:
    slots = ledger()
    granted = grant(slots)
    slots.expire(10.0)
    slots.grant_again(granted.grant, peer="b", now=10.0, deadline_s=10.0)
    assert not slots.drop(granted.grant, 0, "late")
    assert slots.counts().groups.dropped == 0


def test_a_complete_group_cannot_be_dropped() -> None:
    slots = ledger()
    granted = grant(slots)
    complete(slots, granted)
    assert not slots.drop(granted.grant, 0, "too late")


def test_a_group_past_its_deadline_is_granted_again_with_the_same_seed_and_the_next_epoch() -> None:
    slots = ledger()
    granted = grant(slots, seed=5, now=1.0)
    assert (slots.late_peers(10.9), slots.late_peers(11.0)) == (set(), {"a"})
    assert slots.expire(10.9) == slots.lapsed() == []
    assert slots.expire(11.0) == []
    assert slots.lapsed() == [granted.grant]
    assert slots.late_peers(math.inf) == set()
    again = slots.grant_again(granted.grant, peer="b", now=12.0, deadline_s=10.0)
    assert (again.seed, again.epoch, again.version) == (5, 1, granted.version)
    assert (slots.late_peers(21.9), slots.late_peers(22.0), slots.lapsed()) == (set(), {"b"}, [])


def test_trials_that_arrived_before_the_deadline_are_kept_and_named_in_the_next_grant() -> None:
    slots = ledger()
    granted = grant(slots)
    slots.receive(result(granted, 1))
    slots.expire(10.0)
    assert slots.grant_again(granted.grant, peer="b", now=10.0, deadline_s=10.0).held == (1,)


def test_the_first_result_counts_whatever_its_epoch_and_the_second_is_a_duplicate() -> None:
    slots = ledger()
    old = grant(slots)
    slots.expire(10.0)
    new = slots.grant_again(old.grant, peer="b", now=10.0, deadline_s=10.0)
    assert slots.receive(result(old, 0)) == Accepted(is_complete=False)
    assert slots.receive(result(new, 0)) == Duplicate()
    assert slots.receive(result(new, 1)) == Accepted(is_complete=True)
    assert slots.receive(result(old, 1)) == Duplicate()
    counts = slots.counts()
    assert (counts.acknowledged, counts.duplicate, counts.granted_again) == (2, 2, 1)


def test_late_results_can_complete_a_group_that_nobody_plays() -> None:
    slots = ledger()
    granted = grant(slots)
    slots.expire(10.0)
    complete(slots, granted)
    assert slots.lapsed() == []
    assert slots.take_batch() is not None


@pytest.mark.parametrize("end", ["trained", "dropped"])
def test_a_result_for_a_group_that_ended_is_a_duplicate(end: str) -> None:
    slots = ledger()
    granted = grant(slots)
    if end == "dropped":
        slots.drop(granted.grant, 0, "environment raised")
    else:
        complete(slots, granted)
        slots.take_batch()
        slots.trained(1)
    assert slots.receive(result(granted, 0)) == Duplicate()


def test_a_dead_peer_frees_only_its_own_groups() -> None:
    slots = ledger()
    first, second = grant(slots, peer="a"), grant(slots, peer="b")
    assert slots.peer_gone("a") == [first.grant]
    assert (len(slots.played_by("a")), len(slots.played_by("b"))) == (0, 1)
    assert slots.lapsed() == [first.grant]
    assert slots.peer_gone("a") == []
    complete(slots, second)
    assert slots.peer_gone("b") == []


def test_a_group_that_always_misses_its_deadline_is_dropped() -> None:
    slots = ledger(max_expiries=2)
    granted = grant(slots)
    assert slots.expire(10.0) == []
    slots.grant_again(granted.grant, peer="a", now=10.0, deadline_s=10.0)
    assert [record.grant for record in slots.expire(20.0)] == [granted.grant]
    assert slots.counts().dropped_by_reason == {"missed its deadline 2 times": 1}
    assert slots.may_grant()


def played(granted: GroupGrant, index: int, num_turns: int) -> TrialResult:
    """A trial of so many turns."""
    turns = (Turn(Kind.ACT, 0, 0, 0, 0, 1, 0.0, True, "rock"),) * num_turns
    arrived = result(granted, index)
    return TrialResult(granted.grant, granted.epoch, replace(arrived.trial, turns=turns))


@pytest.mark.parametrize(
    ("reports", "kept", "num_turns"),
    [((), 0, 0), ((), 5, 5), ((3, 7, 2), 5, 7), ((3,), 5, 5)],
)
def test_a_group_that_missed_its_deadlines_is_dropped_with_the_turns_that_it_had(
    reports: Sequence[int], kept: int, num_turns: int
) -> None:
    slots = ledger(max_expiries=1)
    granted = grant(slots)
    slots.receive(played(granted, 0, 10))
    for number in reports:
        slots.note_turns(granted.grant, granted.epoch, number)
    slots.note_turns(granted.grant, granted.epoch + 1, 99)  # no such grant
    if kept:
        finished = FinishedEpisodes(played(granted, 1, kept).trial, "")
        slots.keep(EpisodeResult(granted.grant, granted.epoch, finished))
    (record,) = slots.expire(10.0)
    assert record.num_turns == num_turns
    (drop,) = slots.take_drops()
    assert drop.num_turns == 10 + num_turns


def test_long_groups_that_miss_their_deadlines_are_seen_in_the_ratio_of_selection() -> None:
    slots = ledger(groups_per_step=100, max_expiries=1, trials_per_group=1)
    rps = load("rps")
    task = Task("rps", rps.members("train")[0], 0)
    for _ in range(40):
        granted = slots.grant(task, num_episodes=3, peer="a", now=0.0, deadline_s=10.0)
        slots.note_turns(granted.grant, granted.epoch, 60)
        assert len(slots.expire(10.0)) == 1
    lost = dropped_groups(slots.take_drops(), Kinds(rps, pytest.fail))
    trained = [["kind", "task", 8, 50], ["kind", "task", 80, 10]]
    found = Selection.of([{"trained_groups": trained, "dropped_groups": lost}])
    ratio = found.long_over_short(1)
    assert ratio is not None
    assert ratio.high < 0.5, "of fifty long groups, ten were trained"


def test_deaths_of_peers_never_drop_a_group() -> None:
    slots = ledger(max_expiries=1)
    granted = grant(slots)
    for life in range(20):
        assert slots.peer_gone("a") == [granted.grant]
        again = slots.grant_again(granted.grant, peer="a", now=0.0, deadline_s=10.0)
        assert again.epoch == life + 1
    assert slots.counts().groups == Counts(granted=1, trained=0, dropped=0, in_flight=1)


def test_what_was_never_granted_is_unknown() -> None:
    slots = ledger(next_grant=5)
    granted = grant(slots)
    other = TrialResult(5, 0, Trial(Task("rps", "cycle-1", 99), 0, 3, (SEGMENT,), ()))
    for strange, reason in (
        (TrialResult(6, 0, result(granted, 0).trial), "group 6 was never granted"),
        (TrialResult(4, 0, result(granted, 0).trial), "group 4 was never granted"),
        (result(granted, 2), "a group has 2 trials, got number 2"),
        (result(granted, -1), "a group has 2 trials, got number -1"),
        (result(granted, 0, epoch=1), "group 5 is at epoch 0, got 1"),
        (other, "group 5 is another task than the trial's"),
    ):
        outcome = slots.receive(strange)
        assert isinstance(outcome, Unknown)
        assert reason in outcome.reason
    assert slots.counts().unknown == 6
    assert slots.counts().acknowledged == 0


def test_a_row_of_drops_ends_with_a_complete_group() -> None:
    slots = ledger(max_staleness=2)
    for _ in range(2):
        slots.drop(grant(slots).grant, 0, "environment raised")
    assert slots.counts().drops_in_a_row == 2
    assert slots.counts().last_drop == "environment raised"
    complete(slots, grant(slots))
    assert slots.counts().drops_in_a_row == 0
    assert slots.counts().last_drop == ""


def test_the_number_of_reasons_that_are_remembered_is_bounded() -> None:
    slots = ledger()
    for number in range(MAX_REASONS + 10):
        slots.drop(grant(slots).grant, 0, f"reason {number}")
    counts = slots.counts()
    assert len(counts.dropped_by_reason) == MAX_REASONS + 1
    assert counts.dropped_by_reason["other reasons"] == 10
    assert counts.groups.dropped == MAX_REASONS + 10


def test_granting_without_a_free_slot_is_a_bug() -> None:
    slots = ledger(max_staleness=0)
    grant(slots)
    with pytest.raises(AssertionError, match="no slot is free"):
        grant(slots)


def test_versions_are_published_one_by_one() -> None:
    slots = ledger()
    complete(slots, grant(slots))
    slots.take_batch()
    with pytest.raises(AssertionError, match="after version 0 came 2"):
        slots.trained(2)


def test_what_is_over_age_after_a_step_is_dropped_under_the_rule_drop_and_no_row_of_drops() -> None:
    slots = ledger(max_staleness=0, policy=POLICIES["drop"])
    first, second = grant(slots), grant(slots)
    complete(slots, first)
    assert slots.take_batch() is not None
    slots.trained(1)
    assert slots.counts().dropped_by_reason == {"over age": 1}
    assert slots.counts().drops_in_a_row == 0
    assert isinstance(slots.receive(result(second, 0)), Duplicate)


def test_a_lag_asks_actors_for_older_weights_and_keeps_the_version_of_the_grant() -> None:
    slots = ledger(version=9, lag=4)
    granted = grant(slots)
    assert granted.version == 5
    complete(slots, granted)
    (group,) = slots.take_batch() or []
    assert group.version == 9


def test_a_groups_life_is_since_its_grant_beside_the_mean_number_in_play() -> None:
    slots = ledger(max_staleness=3)
    first = grant(slots, now=5.0)
    for _ in range(3):
        grant(slots, now=6.0)
    complete(slots, first)
    assert slots.playing_time(first.grant, now=9.0) == (4.0, (1 + 4) / 2)
    assert slots.num_incomplete() == 3


def test_members_are_in_play_until_their_groups_are_complete() -> None:
    slots = ledger()
    first, second = (
        slots.grant(Task("kuhn", who, 0), num_episodes=3, peer="a", now=0.0, deadline_s=10.0)
        for who in ("policy-0", "policy-5")
    )
    slots.receive(result(first, 0))
    slots.peer_gone("a")
    assert slots.incomplete_members() == {"policy-0", "policy-5"}
    slots.receive(result(first, 1))
    assert slots.incomplete_members() == {"policy-5"}
    complete(slots, second)
    assert slots.incomplete_members() == set()


def test_no_more_groups_are_in_play_than_concurrency_admits() -> None:
    slots = ledger(max_staleness=3, max_concurrent_groups=1)
    first = grant(slots)
    assert not slots.may_grant()
    complete(slots, first)
    assert slots.may_grant()


def test_the_next_batch_is_of_the_oldest_groups_or_of_those_that_are_nearly_complete() -> None:
    for name, arrived in (("slots", 1), ("count", 3)):
        slots = ledger(policy=POLICIES[name], groups_per_step=2, max_staleness=1)
        old, second, third = (grant(slots) for _ in range(3))
        slots.receive(result(second, 0))
        complete(slots, third)
        assert old.num_trials == 2
        assert slots.trials_of_next_batch() == (arrived, 4)
        slots.note_turns(old.grant, old.epoch, 5)
        assert slots.under_way() == (3, 5)


def earns(slots: Ledger, *rewards: float) -> int:
    """Grant a group and complete it by trials that earn these rewards in one episode."""
    granted = grant(slots)
    for index, reward in enumerate(rewards):
        played = result(granted, index)
        turn = Turn(Kind.ACT, 0, 0, 0, 0, 1, reward, True, "rock")
        trial = replace(played.trial, turns=(turn,))
        slots.receive(TrialResult(granted.grant, granted.epoch, trial))
    return granted.grant


def none_has_advantage(group: Group) -> bool:
    return False


def test_a_group_with_an_advantage_is_not_replaced_though_its_trials_earned_the_same() -> None:
    slots = ledger()
    group = earns(slots, 0.0, 0.0)
    assert not slots.drop_if_no_variance(group, 2, lambda group: True)
    assert slots.drop_if_no_variance(group, 2, none_has_advantage)


def test_groups_whose_trials_all_earned_the_same_are_replaced_up_to_a_bound() -> None:
    slots = ledger()
    assert not slots.drop_if_no_variance(earns(slots, 0.0, 1.0), 2, none_has_advantage)
    assert slots.take_batch() is not None
    assert slots.drop_if_no_variance(earns(slots, 1.0, 1.0), 2, none_has_advantage)
    assert slots.drop_if_no_variance(earns(slots, 0.0, 0.0), 2, none_has_advantage)
    kept = earns(slots, 0.0, 0.0)
    assert not slots.drop_if_no_variance(kept, 2, none_has_advantage)
    counts = slots.counts()
    assert counts.dropped_by_reason == {NO_VARIANCE: 2}
    assert (counts.groups.granted, counts.groups.dropped, counts.groups.in_flight) == (4, 2, 2)
    # They are no fault, and neither end a run nor count as selection by faults.
    assert (counts.drops_in_a_row, slots.take_drops()) == (0, [])
    slots.trained(1)
    assert slots.drop_if_no_variance(kept, 2, none_has_advantage)
