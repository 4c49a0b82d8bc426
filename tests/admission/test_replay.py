"""A ledger whose every decision is journaled is the same ledger after a replay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.admission.ledger import Ledger
from mage_async.admission.policies import POLICIES
from mage_async.admission.replay import first_difference, plays_the_same, replay
from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.policy_version import VersionRun
from mage_async.protocol.journal_records import (
    Commit,
    Dropped,
    Record,
    SegmentHeader,
    first_segment_header,
)
from mage_async.protocol.messages import TrialResult
from mage_async.tasks.league import League
from mage_async.trajectory import Segment, Task, Trial
from mage_services.journal.record_bytes import MAGIC, decode_record, encode_record, scan

B, S, G = 2, 1, 2


def commit(version: int, grants: list[int]) -> Commit:
    return Commit(
        version=version, grants=tuple(grants), digest=f"d{version}", tensors={"w": "1"}, time_s=1.0
    )


def result(grant: int, epoch: int, index: int) -> TrialResult:
    part = Segment(
        np.ones(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
    )
    return TrialResult(grant, epoch, Trial(Task("rps", "m", grant), index, 3, (part,), ()))


def test_a_restarted_ledger_counts_drops_in_a_row_anew() -> None:
    play = Play()
    play.grant()
    play.ledger.drop(0, 0, "the environment is gone")
    play.records.append(Dropped(grant=0, reason="the environment is gone"))
    again = Ledger(B, S, G, max_expiries=2)
    list(replay(on_disk(play.records), again, League()))
    again.restart_timers(0.0)
    counts = again.counts()
    assert (counts.drops_in_a_row, counts.last_drop) == (0, "")
    assert counts.dropped_by_reason == {"the environment is gone": 1}


class Play:
    """A learner's decisions, journaled as the coordinator does."""

    def __init__(self, rule: str = "slots") -> None:
        self.ledger, self.now = Ledger(B, S, G, max_expiries=2, policy=POLICIES[rule]), 0.0
        self.records: list[Record] = [first_segment_header(0, 0)]
        self.batches: list[list[tuple[int, list[int]]]] = []

    def grant(self) -> None:
        lapsed = self.ledger.lapsed()
        if lapsed:
            message = self.ledger.grant_again(lapsed[0], peer="b", now=self.now, deadline_s=9.0)
        elif self.ledger.may_grant():
            task = Task("rps", "m", self.ledger.next_grant)
            message = self.ledger.grant(
                task, num_episodes=3, peer="a", now=self.now, deadline_s=9.0
            )
        else:
            return
        self.records.append(self.ledger.grant_record(message))

    def finish(self, choice: int) -> None:
        open_groups = [
            g for p in ("a", "b") for g in self.ledger.renew_grants(p, now=self.now, deadline_s=9.0)
        ]
        if open_groups:
            group = open_groups[choice % len(open_groups)]
            index = min(set(range(G)) - set(group.held))
            trial = result(group.grant, group.epoch, index)
            self.ledger.receive(trial)
            self.records.append(trial)

    def drop(self) -> None:
        for group in self.ledger.renew_grants("a", now=self.now, deadline_s=9.0)[:1]:
            assert self.ledger.drop(group.grant, group.epoch, "cursed")
            self.records.append(Dropped(grant=group.grant, reason="cursed"))

    def expire(self) -> None:
        self.now += 10.0
        self.records += self.ledger.expire(self.now)

    def step(self) -> None:
        groups = self.ledger.take_batch()
        if groups is not None:
            version = self.ledger.version + 1
            self.batches.append([(g.grant, [t.index for t in g.trials]) for g in groups])
            self.records.append(commit(version, [group.grant for group in groups]))
            self.records += self.ledger.trained(version)

    def roll(self) -> None:
        self.records.append(self.ledger.segment_header("", 9.0))

    def do(self, move: int) -> None:
        if move < 3:
            self.grant()
        elif move < 10:
            self.finish(move)
        else:
            [self.drop, self.expire, self.step, self.step, self.roll][move - 10]()


def on_disk(records: list[Record]) -> list[Record]:
    data = MAGIC + b"".join(bytes(piece) for record in records for piece in encode_record(record))
    return [decode_record(body) for body in scan(data).bodies]


def state(ledger: Ledger) -> tuple[object, ...]:
    head, counts = ledger.segment_header("", 9.0), ledger.counts()
    return head, counts.groups, counts.trials, counts.acknowledged


@settings(max_examples=300)
@given(st.lists(st.integers(0, 14), max_size=80), st.sampled_from(sorted(POLICIES)))
def test_a_replayed_ledger_is_the_one_that_wrote_the_journal(moves: list[int], rule: str) -> None:
    play = Play(rule)
    for move in moves:
        play.do(move)
    again = Ledger(B, S, G, max_expiries=2, policy=POLICIES[rule])
    done = list(replay(on_disk(play.records), again, League()))
    assert [
        [(g.grant, [t.index for t in g.trials]) for g in one.groups or []] for one in done
    ] == play.batches
    # a group that nobody plays has its last owner in the journal, who is asked first
    for ledger in (play.ledger, again):
        for owner in ledger.playing_peers():
            ledger.peer_gone(owner)
    assert state(again) == state(play.ledger)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 14), max_size=80), st.data())
def test_a_later_head_stands_for_all_before_it(moves: list[int], data: st.DataObject) -> None:
    play = Play()
    for move in moves:
        play.do(move)
    heads = [n for n, record in enumerate(play.records) if isinstance(record, SegmentHeader)]
    start = data.draw(st.sampled_from(heads))
    again = Ledger(B, S, G, max_expiries=2)
    list(replay(on_disk(play.records[start:]), again, League()))
    for ledger in (play.ledger, again):
        for owner in ledger.playing_peers():
            ledger.peer_gone(owner)
    mine, theirs = again.counts(), play.ledger.counts()
    assert (mine.groups, mine.trials) == (theirs.groups, theirs.trials)
    assert again.next_grant == play.ledger.next_grant
    assert mine.dropped_by_reason == theirs.dropped_by_reason


def test_groups_given_up_between_two_lives_stay_given_up() -> None:
    play = Play()
    for move in (0, 0, 3):
        play.do(move)
    play.ledger.drop_all("the configuration was changed")
    play.roll()
    play.grant()
    again = Ledger(B, S, G)
    list(replay(on_disk(play.records), again, League()))
    assert again._pending.keys() == play.ledger._pending.keys() == {2}
    assert again.counts() == play.ledger.counts()


def test_a_result_known_before_the_crash_is_a_duplicate_after_it() -> None:
    play = Play()
    for move in (0, 0, 3, 3, 3, 3, 12):
        play.do(move)
    again = Ledger(B, S, G)
    list(replay(on_disk(play.records), again, League()))
    assert again.version == 1
    assert type(again.receive(result(0, 0, 0))).__name__ == "Duplicate"


def test_a_restarted_ledger_says_again_only_the_drops_that_no_step_has_said() -> None:
    play = Play()
    for move in (0, 10, 0, 0, 3, 3, 3, 3, 12, 0, 10):
        play.do(move)
    again = Ledger(B, S, G)
    (step,) = replay(on_disk(play.records), again, League())
    assert again.version == 1
    assert len(step.drops) == len(again.take_drops()) == 1
    assert len(play.ledger.take_drops()) == 2


def test_groups_that_another_configuration_gives_up_are_no_failure_of_a_member() -> None:
    play = Play()
    play.do(0)
    play.ledger.drop_all("the configuration was changed")
    assert play.ledger.counts().groups.dropped == 1
    assert play.ledger.take_drops() == []


def test_missing_steps_are_named() -> None:
    with pytest.raises(RunError, match="the journal has step 3 after 0"):
        list(replay([first_segment_header(0, 0), commit(3, [])], Ledger(B, S, G), League()))


def test_a_step_whose_trials_were_deleted_has_no_groups() -> None:
    (one,) = replay([first_segment_header(0, 2), commit(1, [0, 1])], Ledger(B, S, G), League())
    assert one.groups is None


def test_the_first_tensor_that_differs_is_named() -> None:
    assert first_difference(commit(1, []), {"w": "2"}) == "w"
    assert first_difference(commit(1, []), {"w": "1", "extra": "3"}) == "extra"
    assert first_difference(commit(1, []), {}) == "w"


def test_more_steps_play_the_same_and_another_seed_does_not() -> None:
    file = config_file.find(None)
    own = config_file.load(file, [])
    assert plays_the_same(own, config_file.load(file, ["learner.steps=900"]))
    assert not plays_the_same(own, config_file.load(file, ["seed=1"]))
    assert not plays_the_same(own, config_file.load(file, ["trial.episodes=2"]))


@pytest.mark.parametrize(
    "change",
    [
        "environment.retries=16",
        "environment.step_deadline_s=600",
        "environment.workers=1",
        "environment.most_open=7",
        "environment.idle_s=5",
        "environment.wait_for_room_s=60",
        "admission.grant_deadline_s=1800",
        "admission.max_groups_in_play=7",
        "admission.over_age_target=0.5",
    ],
)
def test_a_key_that_people_change_after_faults_drops_no_group(change: str) -> None:
    file = config_file.find(None)
    own, other = config_file.load(file, []), config_file.load(file, [change])
    assert own != other
    assert plays_the_same(own, other)
