"""Scout: what its turns tell and cost."""

import random
from collections import Counter
from itertools import combinations

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games.scout import Scout
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")


def test_turns_tell_and_cost_what_the_rules_say() -> None:
    play = Scout().begin(Task("scout", "red-blue-gold", 0), 0)
    assert play.observation == "alpha"
    outcomes = [play.act(action) for action in ("scout", "pass", "gold")]
    assert [each.observation for each in outcomes] == [
        "cost alpha red beta",
        "ok gamma",
        "win gamma gold",
    ]
    assert [each.reward for each in outcomes] == [-2.0, 0.3, 1.0]
    assert [each.is_done for each in outcomes] == [False, False, True]


def test_a_wrong_key_and_nonsense_tell_nothing() -> None:
    play = Scout().begin(Task("scout", "red-blue-gold", 0), 0)
    outcomes = [play.act(action) for action in ("blue", "dial", "red")]
    assert [each.observation for each in outcomes] == ["lose beta", "invalid gamma", "lose"]
    assert [each.reward for each in outcomes] == [-1.0, -2.0, -1.0]
    assert [each.is_valid for each in outcomes] == [True, False, True]


def test_payoffs_are_options_and_stand_in_the_rules() -> None:
    scout = Scout(safe=0.2, cost=0.7, wrong=0.5)
    play = scout.begin(Task("scout", "red-blue-gold", 0), 0)
    assert [play.act(action).reward for action in ("scout", "pass", "red")] == [-0.7, 0.2, -0.5]
    assert "Scout earns -0.7" in scout.rules()
    assert scout.facts.min_return == pytest.approx(-2.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": -1.0}, "scout: `cost` is a price and must be at least 0, got -1.0"),
        ({"safe": "much"}, "scout: `safe` must be a finite number, got 'much'"),
        ({"wrong": float("nan")}, "scout: `wrong` must be a finite number, got nan"),
    ],
)
def test_an_impossible_payoff_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Scout(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(("split", "size"), [("train", 48), ("heldout", 16)])
def test_keys_and_pairs_of_keys_are_equally_frequent_in_both_splits(
    split: Split, size: int
) -> None:
    codes = [member.split("-") for member in Scout().members(split)]
    assert len(codes) == size
    for one, two in combinations(range(3), 2):
        pairs = Counter((code[one], code[two]) for code in codes)
        assert set(pairs.values()) == {size // 16}


@pytest.mark.parametrize("split", SPLITS)
def test_a_swapped_code_differs_on_every_dial(split: Split) -> None:
    scout = Scout()
    for member in scout.members(split):
        for other in scout.swaps(member, split):
            keys = zip(member.split("-"), other.split("-"), strict=True)
            assert all(mine != theirs for mine, theirs in keys)


def test_scripts_use_a_key_they_saw_in_an_earlier_episode() -> None:
    scout = Scout()
    used, met = 0, 0
    for seed in range(300):
        script = scout.script(random.Random(seed))
        known: set[int] = set()
        for episode in range(3):
            play = scout.begin(Task("scout", "gold-gold-gold", seed), episode)
            for dial in range(3):
                action = script.choose(play)
                met += dial in known
                used += dial in known and action == "gold"
                if "gold" in play.act(action).observation:
                    known.add(dial)
    assert met > 300
    assert 0.92 < used / met < 0.98
