"""StepAgent's discriminator of steps: its optimum, what it pays, and to whom."""

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_async.learning.packing import credited
from mage_async.methods.stepagent import Settings, StepAgent, fitted_log_odds, step_rewards
from mage_async.trajectory import Alternative, Group, Kind, Task, Trial, Turn

STATES, ACTIONS = ("a b", "a c", "d c"), ("up", "down", "left")
EXPERT = ((6, 3, 1), (1, 1, 8), (4, 4, 2))
POLICY = ((2, 2, 6), (5, 4, 1), (1, 7, 2))


def counted(table: tuple[tuple[int, ...], ...]) -> Counter[tuple[str, str]]:
    pairs = itertools.product(STATES, ACTIONS)
    return Counter(dict(zip(pairs, itertools.chain(*table), strict=True)))


def test_the_best_discriminator_is_the_experts_share_of_a_step() -> None:
    expert, policy = counted(EXPERT), counted(POLICY)
    found = fitted_log_odds(expert, policy, smoothing=1e-6)
    for step in expert:
        share = 1 / (1 + math.exp(-found[step]))
        assert share == pytest.approx(expert[step] / (expert[step] + policy[step]), abs=1e-3)


def test_a_step_is_judged_by_what_is_alike_where_it_was_never_seen() -> None:
    """The word `c` at its place tells `left` from the others, in a state that the fit met once."""
    expert = Counter({("x c", "left"): 5, ("y c", "left"): 5, ("z b", "up"): 5})
    policy = Counter({("x c", "up"): 5, ("y c", "up"): 5, ("z c", "left"): 1, ("z c", "up"): 1})
    found = fitted_log_odds(expert, policy, smoothing=1.0)
    assert found["z c", "left"] > 0 > found["z c", "up"]


def turn(number: int, action: str, anchor: str, kind: Kind = Kind.ACT) -> Turn:
    return Turn(kind, 0, number, 0, 0, 1, 0.0, True, action, anchor)


def trial_of(*steps: tuple[str, str, str]) -> Trial:
    """One episode of (state, the policy's action, the expert's)."""
    turns = tuple(turn(n, action, state) for n, (state, action, _) in enumerate(steps))
    experts = tuple(Alternative(n, wanted) for n, (_, _, wanted) in enumerate(steps) if wanted)
    return Trial(Task("scout", "x", 0), 0, 1, (), turns, alternatives=experts)


def test_a_turn_is_paid_for_acting_as_the_expert_and_nothing_where_none_was_asked() -> None:
    trials = [trial_of(("s", "up", "up"), ("t", "up", "down"), ("u", "up", ""))] * 4
    (first, second, third), *rest = step_rewards(trials, Settings("irl"))
    assert first == pytest.approx(-0.0, abs=2.0)
    assert second < first < 2.0
    assert third == 0.0
    assert rest == [[first, second, third]] * 3
    doubled = step_rewards(trials, Settings("irl", weight=2.0))
    assert doubled[0] == [2 * first, 2 * second, 0.0]
    assert StepAgent(Settings(), Config()).batch_metrics(trials) == {"expert_agreement": 0.5}


def test_where_expert_and_policy_do_the_same_nothing_is_paid_and_nothing_is_asked() -> None:
    same = [trial_of(("s", "up", "up"), ("t", "down", "down"))]
    assert step_rewards(same, Settings("irl")) == [[0.0, 0.0]]
    assert step_rewards([trial_of(("s", "up", ""))], Settings("irl")) == [[0.0]]
    assert StepAgent(Settings(), Config()).batch_metrics([trial_of(("s", "up", ""))]) == {}


@pytest.mark.parametrize("times", [1, 2, 3, 12])
def test_an_expert_that_plays_itself_pays_alike_with_any_number_of_steps(times: int) -> None:
    trials = [trial_of(("s", "up", "up"), ("t", "up", "up"), ("t", "left", "up"))] * 4
    settings = Settings("irl", states="expert")
    own = Counter({("s", "up"): times, ("t", "up"): times, ("t", "left"): times})
    for rewards in step_rewards(trials, settings, own):
        assert rewards == pytest.approx([0.0] * 3, abs=1e-9)
    other = Counter({("s", "up"): 1, ("t", "up"): 2})
    as_often = Counter({step: 4 * count for step, count in other.items()})
    many = Counter({step: times * count for step, count in other.items()})
    paid, expected = (step_rewards(trials, settings, each)[0] for each in (many, as_often))
    assert paid == pytest.approx(expected)
    assert paid[1] > 0 > paid[2]


def test_rewards_of_steps_reach_returns_by_the_method_alone() -> None:
    given = ["credit.kind=single_episode"]
    groups = [Group(0, 0, (trial_of(("s", "up", "down"), ("t", "up", "up")),) * 2)]
    plain = credited(groups, config_file.load(config_file.find(None), given))
    paid = credited(groups, config_file.load(config_file.find(None), given, "stepagent_irl"))
    implicit = config_file.load(config_file.find(None), given, "stepagent_implicit")
    first, second = step_rewards(groups[0].trials, Settings("irl"))[0]
    assert plain.returns.tolist() == credited(groups, implicit).returns.tolist() == [0.0] * 4
    assert paid.returns.tolist() == pytest.approx([first + second, second] * 2)


def test_an_expert_needs_a_script_or_a_file() -> None:
    check(config_file.load(config_file.find(None), [], "stepagent_implicit"))
    nowhere = ["methods.stepagent.source=nowhere.jsonl"]
    with pytest.raises(
        ConfigError, match=r'methods.stepagent.source = "nowhere.jsonl" is neither "script"'
    ):
        check(config_file.load(config_file.find(None), nowhere, "stepagent_irl"))


def test_a_policy_can_be_the_expert_of_the_implicit_form_alone(tmp_path: Path) -> None:
    changes = [f"methods.stepagent.source={tmp_path}"]
    check(config_file.load(config_file.find(None), changes, "stepagent_implicit"))
    with pytest.raises(ConfigError, match="is a model directory, whose actions are not written"):
        check(config_file.load(config_file.find(None), changes, "stepagent_irl"))
