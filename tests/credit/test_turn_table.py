"""From trials to columns."""

import time

import numpy as np

from mage_async.credit.returns import CumulativeCode, Differential
from mage_async.credit.turn_table import build_table
from mage_async.trajectory import Group, Kind, Task, Trial, Turn


def act(episode, index, reward=0.0, *, is_valid=True, anchor="start"):
    return Turn(Kind.ACT, episode, index, 0, 0, 1, reward, is_valid, "move", anchor)


def reflect(episode, *, is_valid=True):
    return Turn(Kind.REFLECT, episode, 0, 0, 0, 1, 0.0, is_valid, "remark")


def trial(*turns, index=0, environment="rps", member="rock", seat=0, num_episodes=3):
    return Trial(Task(environment, member, 7, seat), index, num_episodes, (), turns)


def table_of(*trials, credit=Differential, turn_discount=0.95, episode_discount=0.6):
    groups = [Group(0, 0, trials)]
    discounts = {"turn_discount": turn_discount, "episode_discount": episode_discount}
    return build_table(groups, credit(**discounts))


LOST_LOST_WON = (
    *(act(0, 0), act(0, 1, -10.0)),
    *(reflect(0), act(1, 0), act(1, 1, -10.0)),
    *(reflect(1), act(2, 0), act(2, 1, 10.0)),
)


def test_rows_follow_the_order_of_play_and_reflections_get_the_next_episodes_return():
    table = table_of(trial(*LOST_LOST_WON))
    expected = [-3.3269, -3.502, 10.83, 10.83, 11.4, 19.0, 19.0, 20.0]
    np.testing.assert_allclose(table.returns, expected, rtol=1e-12)
    assert table.episode_score.tolist() == [-10.0, -10.0, 0.0, 0.0, 0.0, 0.0, 20.0, 20.0]
    assert table.kind.tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    assert table.episode.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert table.index.tolist() == [0, 1, 0, 0, 1, 0, 0, 1]


def test_a_trial_that_ended_early_has_rows_for_what_was_played():
    table = table_of(trial(act(0, 0), act(0, 1, 10.0), num_episodes=3))
    assert table.returns.tolist() == [9.5, 10.0]


def test_a_reflection_that_was_left_out_leaves_no_row():
    table = table_of(trial(act(0, 0), act(1, 0), reflect(1), act(2, 0, 1.0)), credit=CumulativeCode)
    assert table.kind.tolist() == [0, 0, 1, 0]
    np.testing.assert_allclose(table.returns, [0.36, 0.6, 1.0, 1.0])


def test_groups_and_trials_are_numbered_over_the_batch():
    alone = trial(act(0, 0))
    groups = [Group(9, 0, (alone, alone)), Group(4, 0, (alone,))]
    table = build_table(groups, Differential())
    assert table.group.tolist() == [0, 0, 1]
    assert table.trial.tolist() == [0, 1, 2]


def test_members_seats_and_validity_are_the_trials_own():
    first = trial(act(0, 0), act(0, 1, is_valid=False), member="rock", seat=1)
    second = trial(act(0, 0), member="paper")
    table = table_of(first, second)
    assert table.member.tolist() == [0, 0, 1]
    assert table.seat.tolist() == [1, 1, 0]
    assert table.is_valid.tolist() == [True, False, True]


def test_a_component_is_an_environment_or_a_part_of_a_mix():
    members = ("boxes/red", "boxes/blue", "hangman/red")
    mixed = [trial(act(0, 0), environment="mix", member=member) for member in members]
    assert table_of(*mixed).component.tolist() == [0, 0, 1]
    # The names of other environments' members mean nothing, slash or not.
    alone = [trial(act(0, 0), environment="mine:Game", member=member) for member in members]
    assert table_of(*alone).component.tolist() == [0, 0, 0]


def test_equal_states_share_an_anchor_and_reflections_have_one_an_episode():
    table = table_of(
        trial(
            *(act(0, 0, anchor="a"), act(0, 1, anchor="b"), reflect(0)),
            *(act(1, 0, anchor="a"), act(1, 1, anchor=""), reflect(1), act(2, 0, anchor="b")),
        )
    )
    a, b, remark, again_a, empty, again_remark, again_b = table.anchor
    assert (a, b) == (again_a, again_b)
    assert len({a, b, remark, empty, again_remark}) == 5


def test_cells_hold_the_rows_that_agree_in_every_column_of_a_key():
    table = table_of(trial(*LOST_LOST_WON), trial(*LOST_LOST_WON, index=1))
    cells = table.cells(("group", "kind", "episode", "index"))
    assert cells[:8].tolist() == cells[8:].tolist()
    assert len(set(cells.tolist())) == 8
    assert set(table.cells(()).tolist()) == {0}
    assert len(set(table.cells(("kind",)).tolist())) == 2


def test_a_batch_of_144_trials_is_laid_out_in_milliseconds():
    trials = tuple(
        trial(*(act(k, t, float(t == 3)) for k in range(3) for t in range(4)), index=i)
        for i in range(144)
    )
    table_of(*trials)
    best = min(_seconds(lambda: table_of(*trials)) for _ in range(10))
    assert best < 0.02  # measured 0.0013: an order of magnitude whatever else the machine does


def _seconds(run):
    start = time.thread_time()
    run()
    return time.thread_time() - start
