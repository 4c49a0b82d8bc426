"""The ledger under any order of grants, results, drops, deadlines, deaths and steps."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mage_async.admission.ledger import Accepted, Duplicate, Ledger
from mage_async.admission.policies import POLICIES
from mage_async.policy_version import VersionRun
from mage_async.protocol.messages import GroupGrant, TrialResult
from mage_async.trajectory import Segment, Task, Trial

DEADLINE_S = 10.0
CREDITS = {"a": 1, "b": 2}
"""Peers that may be granted groups, were they granted by how free they are."""
SEGMENT = Segment(
    np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
)
indices = st.integers(0, 10**6)


class Learner(RuleBasedStateMachine):
    """A learner with peers that do anything, and a second, plainer book of what happened."""

    rule_name = "slots"

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        trials_per_group=st.integers(1, 3),
        version=st.integers(0, 5),
    )
    def begin(
        self, groups_per_step: int, max_staleness: int, trials_per_group: int, version: int
    ) -> None:
        self.slots = Ledger(
            groups_per_step,
            max_staleness,
            trials_per_group,
            max_expiries=3,
            version=version,
            policy=POLICIES[self.rule_name],
        )
        self.start = version
        self.now = 0.0
        self.grants: list[GroupGrant] = []
        self.accepted: dict[tuple[int, int], Trial] = {}
        self.dropped: set[int] = set()
        self.batches: list[list[int]] = []
        self.trained: set[int] = set()
        for peer, credits in CREDITS.items():
            self.slots.set_quota(peer, credits)
        self.slots.set_quota("c", 1)
        self.slots.set_quota("c", 0)

    @precondition(lambda self: self.slots.may_grant())
    @rule(peer=st.sampled_from("abc"), seed=st.integers(0, 9))
    def grant(self, peer: str, seed: int) -> None:
        task = Task("rps", "cycle-1", seed)
        granted = self.slots.grant(
            task, num_episodes=1, peer=peer, now=self.now, deadline_s=DEADLINE_S
        )
        assert granted.version == self.slots.version
        self.grants.append(granted)

    @precondition(lambda self: self.slots.lapsed())
    @rule(peer=st.sampled_from("abc"), which=indices)
    def grant_again(self, peer: str, which: int) -> None:
        lapsed = self.slots.lapsed()
        number = lapsed[which % len(lapsed)]
        first = next(g for g in self.grants if g.grant == number)
        last = [g for g in self.grants if g.grant == number][-1]
        again = self.slots.grant_again(number, peer=peer, now=self.now, deadline_s=DEADLINE_S)
        assert (again.seed, again.version, again.epoch) == (
            first.seed,
            first.version,
            last.epoch + 1,
        )
        assert set(again.held) == {trial for grant, trial in self.accepted if grant == number}
        self.grants.append(again)

    @precondition(lambda self: self.grants)
    @rule(which=indices, index=indices)
    def receive(self, which: int, index: int) -> None:
        """A result of any grant ever made, at any time, as often as it likes."""
        granted = self.grants[which % len(self.grants)]
        index %= granted.num_trials
        self.deliver(granted, index)

    @precondition(lambda self: self.grants)
    @rule(back=st.integers(0, 5))
    def finish(self, back: int) -> None:
        """All results of a late grant, so that groups do complete, and not in order."""
        granted = self.grants[-1 - back % len(self.grants)]
        for index in range(granted.num_trials):
            self.deliver(granted, index)

    def deliver(self, granted: GroupGrant, index: int) -> None:
        task = Task(granted.environment, granted.member, granted.seed, granted.seat)
        trial = Trial(task, index, 1, (SEGMENT,), ())
        outcome = self.slots.receive(TrialResult(granted.grant, granted.epoch, trial))
        is_first = (granted.grant, index) not in self.accepted
        if is_first and granted.grant not in self.dropped:
            assert isinstance(outcome, Accepted)
            self.accepted[granted.grant, index] = trial
        else:
            assert outcome == Duplicate()

    @precondition(lambda self: self.grants)
    @rule(which=indices)
    def drop(self, which: int) -> None:
        granted = self.grants[which % len(self.grants)]
        if self.slots.drop(granted.grant, granted.epoch, "environment raised"):
            assert granted.grant not in self.dropped | self.trained
            self.dropped.add(granted.grant)

    @rule(elapsed_s=st.floats(0.0, 2 * DEADLINE_S))
    def pass_time(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        before = self.slots.counts().groups.dropped
        playing = {
            s.grant for s in self.slots._pending.values() if s.peer and s.deadline <= self.now
        }
        ended = {record.grant for record in self.slots.expire(self.now)}
        assert ended <= playing
        assert playing - ended <= set(self.slots.lapsed())
        assert self.slots.counts().groups.dropped == before + len(ended)
        self.dropped |= ended
        assert not self.slots.late_peers(self.now)

    @rule(peer=st.sampled_from("abc"))
    def kill(self, peer: str) -> None:
        assert set(self.slots.peer_gone(peer)) <= set(self.slots.lapsed())
        assert len(self.slots.played_by(peer)) == 0

    @rule()
    def take_batch(self) -> None:
        batch = self.slots.take_batch()
        if batch is None:
            return
        assert len(batch) == self.slots.groups_per_step
        trained_at = self.start + len(self.batches)
        for group in batch:
            assert trained_at - group.version <= self.slots.max_staleness
            assert group.grant not in self.trained | self.dropped
            assert [t.index for t in group.trials] == list(range(self.slots.trials_per_group))
            for trial in group.trials:
                assert trial is self.accepted[group.grant, trial.index]
            self.trained.add(group.grant)
        self.batches.append([group.grant for group in batch])

    @precondition(lambda self: self.start + len(self.batches) > self.slots.version)
    @rule()
    def publish(self) -> None:
        self.slots.trained(self.slots.version + 1)

    @invariant()
    def batches_are_in_order_of_grant(self) -> None:
        batches = getattr(self, "batches", [])
        if self.rule_name == "slots":
            batches = [[grant for batch in batches for grant in batch]]
        assert all(batch == sorted(batch) for batch in batches)

    @invariant()
    def groups_in_play_are_those_that_lack_a_trial(self) -> None:
        slots = getattr(self, "slots", None)
        if slots is None:
            return
        lacking = [slot for slot in slots._pending.values() if not slot.is_complete]
        assert slots.num_incomplete() == len(lacking)
        assert slots.lapsed() == [slot.grant for slot in lacking if slot.peer is None]
        assert slots.playing_peers() == {slot.peer for slot in lacking} - {None}
        for peer in "abc":
            mine = tuple((s.grant, s.epoch) for s in lacking if s.peer == peer)
            assert slots.played_by(peer) == mine
            assert len(slots.played_by(peer)) == len(mine)
        free = {peer: CREDITS[peer] - len(slots.played_by(peer)) for peer in CREDITS}
        freest = slots.peer_with_largest_free_quota()
        assert max(free.values()) <= 0 if freest is None else free[freest] == max(free.values())

    @invariant()
    def every_granted_trial_is_trained_dropped_or_in_flight(self) -> None:
        if not hasattr(self, "slots"):
            return
        counts = self.slots.counts()
        for each in (counts.groups, counts.trials):
            assert each.granted == each.trained + each.dropped + each.in_flight
        published = self.slots.version - self.start
        assert counts.groups.granted == len({g.grant for g in self.grants})
        assert counts.groups.trained == published * self.slots.groups_per_step
        assert counts.groups.dropped == len(self.dropped)
        num_slots = (self.slots.max_staleness + 1) * self.slots.groups_per_step
        assert counts.groups.in_flight <= num_slots
        assert counts.acknowledged == len(self.accepted)

    def do(self, name: str, source: random.Random) -> None:
        """One rule, with arguments from `source`, if it may be done now."""
        which, peer = source.randrange(10**6), source.choice("abc")
        actions = {
            "grant": (self.slots.may_grant(), lambda: self.grant(peer, which % 10)),
            "grant_again": (self.slots.lapsed(), lambda: self.grant_again(peer, which)),
            "finish": (self.grants, lambda: self.finish(which % 6)),
            "receive": (self.grants, lambda: self.receive(which, source.randrange(3))),
            "drop": (self.grants, lambda: self.drop(len(self.grants) - 1 - which % 6)),
            "pass_time": (True, lambda: self.pass_time(source.uniform(0, DEADLINE_S))),
            "kill": (True, lambda: self.kill(peer)),
            "take_batch": (True, self.take_batch),
            "publish": (self.start + len(self.batches) > self.slots.version, self.publish),
        }
        is_possible, action = actions[name]
        if is_possible:
            action()

    def teardown(self) -> None:
        """Progress: when all peers behave again, everything granted is trained, and steps go on."""
        if not hasattr(self, "slots"):
            return
        target = len(self.batches) + self.slots.max_staleness + 2
        while len(self.batches) < target:
            steps = len(self.batches)
            while self.start + len(self.batches) > self.slots.version:
                self.publish()
            while self.slots.may_grant():
                self.grant("a", 0)
            for number in self.slots.lapsed():
                self.grants.append(
                    self.slots.grant_again(number, peer="a", now=self.now, deadline_s=DEADLINE_S)
                )
            for granted in list(self.grants):
                for index in range(granted.num_trials):
                    self.deliver(granted, index)
            self.take_batch()
            assert len(self.batches) > steps, "no step although every group is complete"
        self.every_granted_trial_is_trained_dropped_or_in_flight()
        self.no_acknowledged_trial_is_lost()

    def no_acknowledged_trial_is_lost(self) -> None:
        """Only trials of dropped groups and of those still in flight were not trained."""
        for grant, _ in self.accepted:
            assert grant in self.trained | self.dropped | self.slots._pending.keys()


class Overtaking(Learner):
    """The same peers, and a learner whose groups overtake each other."""

    rule_name = "overtake"


class TestLearner(Learner.TestCase):
    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


class TestOvertaking(Overtaking.TestCase):
    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("kind", [Learner, Overtaking])
@pytest.mark.parametrize("seed", range(40))
def test_every_rule_holds_through_a_long_history(seed: int, kind: type[Learner]) -> None:
    """The same machine with likelier results and steps, so that many steps are trained."""
    source = random.Random(seed)
    machine = kind()
    machine.begin(*(source.randint(low, 3) for low in (1, 0, 1, 0)))
    likely = {"grant": 6, "finish": 6, "receive": 4, "take_batch": 6, "publish": 6}
    rare = {"grant_again": 4, "drop": 1, "pass_time": 1, "kill": 1}
    names, weights = zip(*(likely | rare).items(), strict=True)
    for name in source.choices(names, weights, k=1000):
        machine.do(name, source)
        machine.batches_are_in_order_of_grant()
        machine.every_granted_trial_is_trained_dropped_or_in_flight()
    assert len(machine.batches) >= 5
    assert machine.dropped
    machine.teardown()


@pytest.mark.parametrize("rule_name", ["slots", "overtake"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_bound_is_reached_when_the_oldest_group_is_always_last(
    max_staleness: int, rule_name: str
) -> None:
    """With all slots full, the last group granted waits for exactly max_staleness steps."""
    slots = Ledger(2, max_staleness, 1, policy=POLICIES[rule_name])
    staleness = []
    for version in range(10):
        while slots.may_grant():
            granted = slots.grant(
                Task("rps", "m", 0), num_episodes=1, peer="a", now=0.0, deadline_s=1.0
            )
            trial = Trial(Task("rps", "m", 0), 0, 1, (SEGMENT,), ())
            slots.receive(TrialResult(granted.grant, 0, trial))
        batch = slots.take_batch()
        assert batch is not None
        staleness += [version - group.version for group in batch]
        slots.trained(version + 1)
    assert max(staleness) == staleness[-1] == max_staleness
