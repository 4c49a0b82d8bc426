"""GiGPO's two terms, penalties, and what each estimator of a configuration makes of a batch."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mage_async.config import config_file
from mage_async.config.components import ESTIMATORS, decode_component
from mage_async.config.schema import Transcript
from mage_async.credit.turn_table import TurnTable
from mage_async.errors import ConfigError
from mage_async.learning.advantages import Gigpo, GroupMean, turn_advantages

ACT, REFLECT = 0, 1
SHIPPED = config_file.load(config_file.find(None), [])


def table(returns, **columns):
    """A table of one group, one trial a row, all else equal, unless said."""
    returns = np.array(returns, np.float64)
    zeros = np.zeros(len(returns), np.int64)
    names = ("group", "component", "member", "seat", "kind", "episode", "index", "anchor")
    given = {name: np.array(values) for name, values in columns.items()}
    defaults = {name: zeros for name in names} | {
        "trial": np.arange(len(returns)),
        "returns": returns,
        "episode_score": returns,
        "is_valid": np.ones(len(returns), bool),
        "num_tokens": np.ones(len(returns), np.int64),
        "memory": np.zeros(len(returns), np.int64),
        "num_sampled": np.ones(len(returns), np.int64),
    }
    return TurnTable(**defaults | given)


def rules(**changes):
    estimator = changes.pop("estimator", "group_mean")
    plain = {"baseline": ["group"], "scale": "none", "weight": "sample"}
    plain |= {} if estimator == "gigpo" else {"epsilon": 0.0}
    return decode_component(ESTIMATORS, {"estimator": estimator, **plain, **changes})


def checked(advantage, trials_per_group=8):
    admission = msgspec.structs.replace(SHIPPED.admission, trials_per_group=trials_per_group)
    advantage.check(msgspec.structs.replace(SHIPPED, admission=admission))


def estimated(rows, **changes):
    return turn_advantages(
        rows, rules(**changes), Transcript(max_action_tokens=8, max_reflection_tokens=16), "cpu"
    ).tolist()


def gigpo(rows, **changes):
    # Both of its terms count equally, unless a weight is given.
    as_coded = {"baseline": ["group"], "scale": "none", "weight": "sample"}
    return Gigpo(**as_coded | changes).estimate(rows, "cpu").numpy()


def test_gigpo_adds_score_against_group_and_return_against_state():
    rows = table(
        [10.0, 20.0, -10.0, 6.0],
        trial=[0, 0, 1, 1],
        anchor=[0, 1, 0, 2],
        episode_score=np.array([4.0, 8.0, 0.0, 0.0]),
    )
    assert gigpo(rows).tolist() == [1.0 + 10.0, 5.0, -3.0 - 10.0, -3.0]
    assert gigpo(rows, anchor_weight=0.5).tolist() == [6.0, 5.0, -8.0, -3.0]


def test_states_are_compared_only_against_the_same_opponent():
    rows = table([10.0, 20.0, -10.0], member=[0, 1, 0], episode_score=np.zeros(3))
    assert gigpo(rows).tolist() == [10.0, 0.0, -10.0]


def test_a_score_without_company_stays_whole_as_coded_or_says_nothing():
    rows = table([7.0, 1.0, 3.0], group=[0, 1, 1])
    assert gigpo(rows, anchor_weight=0.0).tolist() == [7.0, -1.0, 1.0]
    silent = gigpo(rows, anchor_weight=0.0, baseline=["group", "seat"])
    assert silent.tolist() == [0.0, -1.0, 1.0]


def two_trials(scores):
    """Two episodes a trial, one turn each, a reflection between them; returns are zero."""
    return table(
        [0.0] * 6,
        trial=[0, 0, 0, 1, 1, 1],
        kind=[ACT, REFLECT, ACT] * 2,
        anchor=[0, 1, 0] * 2,
        episode=[0, 0, 1] * 2,
        episode_score=np.array(scores, np.float64),
    )


def test_defect_10_reflections_are_pushed_down_in_winning_groups_unless_kind_is_in_the_key():
    rows = two_trials([10.0, 0.0, 10.0, 10.0, 0.0, 10.0])
    as_coded = gigpo(rows)
    assert as_coded[[1, 4]] == pytest.approx([-20 / 3] * 2)
    assert as_coded[0] == pytest.approx(10 / 3)
    assert not gigpo(rows, baseline=["group", "kind"]).any()


def test_defect_11_as_coded_a_penalty_misses_the_second_term():
    rows = table([0.0, 0.0], is_valid=[False, True])
    as_coded = estimated(rows, estimator="gigpo", anchor_weight=1.0, penalise="score")
    both = estimated(rows, estimator="gigpo", anchor_weight=1.0, penalise="return")
    assert as_coded == [-0.5, 0.5]
    assert both == [-1.0, 1.0]


def test_defect_11_the_penalty_reaches_every_invalid_turn_in_every_episode():
    rows = table(
        [0.0, 0.0, 1.0, 1.0],
        trial=[0, 0, 1, 1],
        kind=[ACT, REFLECT, ACT, ACT],
        episode=[0, 0, 0, 1],
        is_valid=[False, False, True, False],
    )
    made = np.array(estimated(rows, format_penalty=0.0))
    penalised = np.array(estimated(rows, format_penalty=1.0))
    assert (made - penalised).tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "gigpo"])
def test_the_penalty_remains_where_all_trials_of_a_group_are_invalid(estimator):
    rows = table([-1.0, -1.0], is_valid=[False, False])
    made = estimated(rows, estimator=estimator, format_penalty=0.5, anchor_weight=0.0)
    assert made == [-0.5, -0.5]
    inside = estimated(
        rows, estimator=estimator, format_penalty=0.5, anchor_weight=0.0, penalise="return"
    )
    assert inside == [0.0, 0.0]


def test_a_state_of_both_seats_is_one_for_each_seat_but_not_as_coded():
    """Rock-paper-scissors has one name for the first state of both seats, whose returns differ."""
    rows = table([1.0, 3.0, -5.0, -7.0], seat=[0, 0, 1, 1])
    apart = {"baseline": ["group", "seat"], "anchor_weight": 1.0}
    for estimator, anchor in itertools.product(("gigpo", "group_mean"), ("global", "local")):
        found = estimated(rows, estimator=estimator, anchor=anchor, **apart)
        assert found == [-2.0, 2.0, 2.0, -2.0]
    for estimator in ("gigpo", "group_mean"):
        shared = estimated(rows, estimator=estimator, anchor="coded", **apart)
        assert shared == [2.0, 6.0, -2.0, -6.0]


def test_length_costs_nothing_up_to_half_the_limit_and_all_of_it_at_the_limit():
    rows = table([0.0] * 5, num_tokens=[1, 4, 6, 8, 9])
    taken = GroupMean(format_penalty=1.0, length_penalty=2.0).penalties(rows, 8)
    assert taken.tolist() == [0.0, 0.0, 1.0, 2.0, 2.0]


def test_a_reflection_has_a_limit_of_its_own():
    rows = table([0.0, 0.0], kind=[ACT, REFLECT], num_tokens=[8, 8])
    assert estimated(rows, length_penalty=2.0) == [-2.0, 0.0]


def test_leave_one_out_compares_with_the_other_trials():
    rows = table([1.0, 2.0, 6.0])
    assert estimated(rows, estimator="leave_one_out") == [-3.0, -1.5, 4.5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"estimator": "gigpo", "scale": ["member"]}, 'must be "none" or equal to'),
        ({"penalise": "score"}, 'needs the estimator "gigpo"'),
    ],
)
def test_what_an_estimator_cannot_do_is_said_before_a_run(changes, said):
    with pytest.raises(ConfigError, match=said):
        checked(rules(**changes))


@pytest.mark.parametrize("limit", ["max_action_tokens", "max_reflection_tokens"])
def test_a_penalty_on_length_needs_limits_with_a_half(limit):
    limits = {"max_action_tokens": 8, "max_reflection_tokens": 64, limit: 1}
    transcript = msgspec.structs.replace(SHIPPED.transcript, **limits)
    with pytest.raises(ConfigError, match=f"raise transcript.{limit}"):
        rules(length_penalty=1.0).check(msgspec.structs.replace(SHIPPED, transcript=transcript))


SAME_TURN = ["group", "kind", "episode", "index"]


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"baseline": SAME_TURN}, True),
        ({"estimator": "leave_one_out"}, True),
        ({}, False),
        ({"baseline": ["member", *SAME_TURN[1:]]}, False),
        ({"baseline": SAME_TURN, "anchor_weight": 1.0}, False),
        ({"value": "trial_score", "baseline": ["group"], "anchor_weight": 1.0}, True),
    ],
)
def test_a_group_of_one_is_refused_where_it_teaches_nothing(changes, is_refused):
    own, two_groups = rules(**changes), [0, 0, 1, 1]
    rows = table([1.0, 2.0, 4.0, 8.0], group=two_groups, trial=two_groups, index=[0, 1, 0, 1])
    taught = estimated(rows, **changes)
    assert any(taught) == (not is_refused)
    if is_refused:
        with pytest.raises(ConfigError, match="must be at least 2 with"):
            checked(own, 1)
    else:
        checked(own, 1)
    checked(own, 2)


def test_the_shipped_configuration_passes_and_a_table_can_be_estimated_as_it_says():
    SHIPPED.advantage.check(SHIPPED)
    rows = replace(table([1.0, 3.0]), member=np.array([0, 0]))
    limits = Transcript(max_action_tokens=1, max_reflection_tokens=1)
    made = turn_advantages(rows, SHIPPED.advantage, limits, "cpu").numpy()
    assert made == pytest.approx([-1 / 1.05, 1 / 1.05])
