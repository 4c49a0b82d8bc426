"""The contextual bandit: what an arm pays, and the best a player can do."""

import itertools
import random
from collections import Counter

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.game_references import scripted_returns
from mage_async.environments.games.bandit import Bandit, BanditScript, best_returns, posterior
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")


def test_the_right_arm_pays_nearly_always_and_others_hardly_ever() -> None:
    bandit = Bandit(rounds=20)
    paid: Counter[bool] = Counter()
    met: Counter[bool] = Counter()
    source = random.Random(0)
    for seed in range(150):
        play = bandit.begin(Task("bandit", "red-green-blue-red", seed), 0)
        while legal := play.legal_actions():
            arm, context = source.choice(legal), play.context
            is_right = arm == ("red", "green", "blue", "red")[context]
            paid[is_right] += int(play.act(arm).reward)
            met[is_right] += 1
    assert paid[True] / met[True] == pytest.approx(0.9, abs=0.03)
    assert paid[False] / met[False] == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("split", SPLITS)
def test_arms_and_pairs_of_arms_are_equally_frequent_in_both_splits(split: Split) -> None:
    codes = [member.split("-") for member in Bandit().members(split)]
    for one, two in itertools.combinations(range(4), 2):
        assert len(set(Counter((code[one], code[two]) for code in codes).values())) == 1


def test_a_swapped_code_differs_for_every_context() -> None:
    bandit = Bandit()
    for split in SPLITS:
        for member in bandit.members(split):
            for other in bandit.swaps(member, split):
                pairs = zip(member.split("-"), other.split("-"), strict=True)
                assert all(one != two for one, two in pairs)


def test_beliefs_are_bayes_rule() -> None:
    """Two wins of the first arm, a loss of the second: by the likelihood of each."""
    likelihoods = [0.9 * 0.9 * 0.9, 0.1 * 0.1 * 0.1, 0.1 * 0.1 * 0.9]
    wanted = [each / sum(likelihoods) for each in likelihoods]
    assert posterior((2, -1, 0), 0.1) == pytest.approx(wanted)


def test_the_best_plan_of_two_pulls_is_the_one_worked_out_by_hand() -> None:
    """One context, two arms: after a win the same arm again, after a loss the other one."""
    right = 0.9 * 0.9 + 0.1 * 0.1
    assert best_returns(2, 1, 2, 0.1, (1.0,)) == pytest.approx(((0.5 + right) / 2,))
    assert best_returns(2, 1, 1, 0.1, (0.0, 1.0)) == pytest.approx((0.5, right))


def test_the_best_plan_is_known_of_many_arms_and_turns() -> None:
    """Turns are as many as no recursion may be deep, and arms as many as names would be slow."""
    one, _, last = best_returns(4, 4, 8, 0.1, (0.0, 0.0, 1.0))
    assert (one, last) == pytest.approx((0.43267099, 0.78547309))
    assert best_returns(2, 4, 20, 0.1, (0.0,) * 7 + (1.0,))[-1] == pytest.approx(0.9, abs=1e-3)


def test_no_script_beats_the_best_plan_and_a_likely_arm_comes_near() -> None:
    bandit = Bandit()
    known = bandit.references("train", 3)

    def make(source: random.Random) -> BanditScript:
        return BanditScript(source, 3, 0.1, care=1.0, remembers=True)

    played = scripted_returns(bandit, "train", 3, make, num_trials=1500)
    assert known["without_memory"][0] == pytest.approx(known["with_memory"][0], abs=0.01)
    assert played[0] == pytest.approx(known["without_memory"][0], abs=0.02)
    assert played[2] == pytest.approx(known["with_memory"][2], abs=0.03)
    assert played[2] < known["with_memory"][2] + 0.015
    assert known["with_memory"][2] > known["without_memory"][2] + 0.25


@pytest.mark.parametrize("noise", [0, 0.5, "much", True])
def test_noise_that_tells_nothing_or_is_none_is_refused(noise: object) -> None:
    with pytest.raises(ConfigError, match=r"bandit: `noise` must be above 0 and below 0\.5"):
        Bandit(noise=noise)


def test_the_rules_say_small_chances_without_rounding_them_away() -> None:
    assert "pays 1 in 99.5% of rounds, the others in 0.5%." in Bandit(noise=0.005).rules()
