"""The bonus for finding out who is hidden: MetaCURE's, with an exact filter."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.credit.turn_table import build_table
from mage_async.environments import catalogue
from mage_async.environments.games.rps import TRAIN
from mage_async.errors import ConfigError
from mage_async.methods.metacure import bonuses, information_gain
from mage_async.trajectory import Group, Kind, Task, Trial, Turn
from tests.helpers.credits import CREDITS, credit_of


def act(episode, index, action, reward=0.0):
    return Turn(Kind.ACT, episode, index, 0, 0, 1, reward, True, action)


def trial_of(task, *episodes, num_episodes=None):
    turns = [act(k, t, word) for k, words in enumerate(episodes) for t, word in enumerate(words)]
    return Trial(task, 0, num_episodes or len(episodes), (), tuple(turns))


def test_scouting_a_dial_gains_the_log_of_the_codes_it_excludes():
    scout = catalogue.load("scout")
    codes = [member.split("-") for member in scout.members("train")]
    hidden = codes[5]
    gains = information_gain(
        trial_of(Task("scout", "-".join(hidden), 1), ["scout", "pass", "pass"]), scout
    )
    left = sum(code[0] == hidden[0] for code in codes)
    assert gains == [pytest.approx(math.log(len(codes) / left)), 0.0, 0.0]


def test_a_wrong_key_gains_less_and_what_is_known_gains_nothing_more():
    scout = catalogue.load("scout")
    codes = [member.split("-") for member in scout.members("train")]
    hidden = codes[0]
    wrong = next(key for key in ("red", "green", "blue", "gold") if key != hidden[0])
    trial = trial_of(
        Task("scout", "-".join(hidden), 1), [wrong, "pass", "pass"], [hidden[0], "scout", "pass"]
    )
    gains = information_gain(trial, scout)
    excluded = sum(code[0] == wrong for code in codes)
    assert gains[0] == pytest.approx(math.log(len(codes) / (len(codes) - excluded)))
    again = information_gain(trial_of(trial.task, ["scout"] * 3, ["scout"] * 3), scout)
    assert again[3:] == [0.0, 0.0, 0.0]
    assert sum(again) == pytest.approx(math.log(len(codes)))


@pytest.mark.parametrize(
    ("name", "options"),
    [("rps", {}), ("kuhn", {}), ("kuhn", {"redeals": False}), ("kuhn", {"opponents": "mage"})],
)
def test_gains_sum_to_what_the_filter_says_at_the_end_and_are_right_on_average(name, options):
    """An expert under its own prior gains information on average, whoever is hidden."""
    environment = catalogue.load(name, **options)
    members, source = environment.members("train"), random.Random(4)
    found = []
    for seed in range(120):
        task = Task(name, source.choice(members), seed, source.choice(environment.seats()))
        plays, words = [], []
        for episode in range(2):
            play = environment.begin(task, episode)
            begun = environment.belief("train")([*plays, play])[task.member]
            plays.append(play)
            words.append([])
            while legal := play.legal_actions():
                words[-1].append(source.choice(legal))
                play.act(words[-1][-1])
            ended = environment.belief("train")(plays)
            assert sum(ended.values()) == pytest.approx(1.0)
            gains = information_gain(trial_of(task, *words), environment)[-len(words[-1]) :]
            assert sum(gains) == pytest.approx(math.log(ended[task.member] / begun))
        found.append(math.log(ended[task.member] * len(members)))
    assert sum(found) / len(found) > 0.1


def test_a_move_that_only_noise_explains_is_bayes_by_hand():
    rps = catalogue.load("rps")
    members = rps.members("train")
    for seed in range(40):
        play = rps.begin(Task("rps", "fixed-rock", seed), 0)
        play.act("rock")
        (seen,) = play.seen
        rules = {each.name: each for each in TRAIN}
        likely = {
            name: 0.05 / 3 + 0.95 * (rules[name].move(0, None) == seen.theirs) for name in members
        }
        total = sum(likely.values())
        assert rps.belief("train")([play]) == pytest.approx(
            {name: value / total for name, value in likely.items()}
        )


def test_deals_that_are_repeated_teach_nothing_twice():
    kuhn = catalogue.load("kuhn", redeals=False)
    task = Task("kuhn", kuhn.members("train")[3], 11)
    once = [kuhn.begin(task, 0)]
    while legal := once[0].legal_actions():
        once[0].act(legal[0])
    again = kuhn.begin(task, 1)
    while legal := again.legal_actions():
        again.act(legal[0])
    assert kuhn.belief("train")([*once, again]) == pytest.approx(kuhn.belief("train")(once))


def test_an_explorer_is_paid_what_it_finds_out_and_an_exploiter_what_it_earns():
    """Whatever is tried first, and whatever the last episode earns."""
    scout = catalogue.load("scout")
    codes = scout.members("train")
    task, first = Task("scout", codes[0], 1), [code.split("-")[0] for code in codes]
    left = {word: sum((each == word) == (first[0] == word) for each in first) for word in first}
    left |= {"pass": len(codes), "scout": first.count(first[0])}
    assert len(left) == 6
    for word, reward in product(left, (0.0, 1.0, 5.0)):
        turns = trial_of(task, [word, "pass"], ["pass"]).turns
        turns = (replace(turns[0], reward=0.3), turns[1], replace(turns[2], reward=reward))
        trial = Trial(task, 0, 2, (), turns)
        table = build_table(
            [Group(0, 0, (trial,))],
            credit_of(CREDITS["final_only"]),
            exploration_share=0.0,
            bonuses=bonuses([trial], [information_gain(trial, scout)], 2.0),
        )
        gained = pytest.approx(2.0 * math.log(len(codes) / left[word]))
        assert table.returns.tolist() == [gained, 0.0, reward]
        assert table.episode_score.tolist() == [gained, gained, reward]


def test_a_remark_of_the_explorer_gets_its_share_of_what_the_last_episode_earns():
    task = Task("rps", "fixed-rock", 1)
    acts = trial_of(task, ["rock"], ["rock"], ["rock"]).turns
    acts = [replace(turn, reward=float(3 + turn.episode)) for turn in acts]
    remarks = [replace(turn, kind=Kind.REFLECT, reward=0.0, action="") for turn in acts[:2]]
    turns = (acts[0], remarks[0], acts[1], remarks[1], acts[2])
    found = {}
    for share in (0.0, 0.5, 1.0):
        table = build_table(
            [Group(0, 0, (Trial(task, 0, 3, (), turns),))],
            credit_of(CREDITS["final_only"]),
            exploration_share=share,
        )
        found[share] = table.returns.tolist()
    assert found == {s: [5.0 * s, 5.0 * s, 5.0 * s, 5.0 * s, 5.0] for s in found}


def test_the_last_episode_is_to_be_won_and_pays_no_bonus():
    scout = catalogue.load("scout")
    trial = trial_of(Task("scout", scout.members("train")[0], 1), ["pass"] * 3, ["scout"] * 3)
    ((*_, first, second, third),) = bonuses([trial], [information_gain(trial, scout)], 2.0)
    assert (first, second, third) == (0.0, 0.0, 0.0)
    early = trial_of(trial.task, ["scout"] * 3, ["pass"] * 3)
    gains = information_gain(early, scout)
    assert bonuses([early], [gains], 2.0) == [[2.0 * gain for gain in gains]]


@pytest.mark.parametrize("credit", sorted(CREDITS))
def test_a_bonus_stays_in_its_episode_whatever_the_credit(credit):
    remark = Turn(Kind.REFLECT, 0, 0, 0, 0, 1, 0.0, True, "so")
    turns = (act(0, 0, "a", 1.0), act(0, 1, "b"), remark, act(1, 0, "c"), act(1, 1, "d", 5.0))
    group = Group(0, 0, (Trial(Task("rps", "x", 1), 0, 2, (), turns),))
    build = partial(
        build_table, [group], credit_of(CREDITS[credit], turn_discount=0.5, episode_discount=0.9)
    )
    plain, paid = build(), build(bonuses=[[0.25, 2.0, 0.0, 4.0, 0.0]])
    assert (paid.returns - plain.returns).tolist() == pytest.approx([1.25, 2.0, 4.0, 4.0, 0.0])
    added = (paid.episode_score - plain.episode_score).tolist()
    assert added == pytest.approx([2.25, 2.25, 0.0, 4.0, 4.0])


@pytest.mark.parametrize("name", ["tictactoe", "minesweeper", "sokoban", "shop"])
def test_where_there_is_no_filter_a_bonus_is_refused(name):
    file = config_file.find(None)
    settings = [f"environment.name={name}", "methods.metacure.information_bonus=0.1"]
    with pytest.raises(ConfigError, match="knows what its observations say of its members"):
        check(config_file.load(file, settings))


def test_trials_that_may_end_before_their_last_episode_are_refused():
    settings = ["methods.metacure.exploration_share=0", "trial.stop_on_success=true"]
    with pytest.raises(ConfigError, match="would have no last episode"):
        check(config_file.load(config_file.find(None), settings))
    budget = ["trial.episodes=4", "trial.episode_budget=3", "evaluation.episodes=3"]
    for key in ("exploration_share=0", "separate_roles=true"):
        settings = [*budget, "engine.max_tokens=300", f"methods.metacure.{key}"]
        with pytest.raises(ConfigError, match=r"^methods\.metacure: trial\.episode_budget ends"):
            check(config_file.load(config_file.find(None), settings))


def test_actions_that_would_be_answered_otherwise_are_not_played_again_for_a_bonus():
    settings = ["trial.repeats=fresh", "methods.metacure.information_bonus=0.1"]
    with pytest.raises(ConfigError, match="the environment would answer them differently"):
        check(config_file.load(config_file.find(None), settings))
    learned = "methods.metacure.inference=learned"
    check(config_file.load(config_file.find(None), [*settings, learned]))


def test_the_share_of_early_returns_is_no_share_of_their_bonuses():
    remark = Turn(Kind.REFLECT, 0, 0, 0, 0, 1, 0.0, True, "so")
    turns = (act(0, 0, "a", 1.0), remark, act(1, 0, "b", 5.0))
    group = Group(0, 0, (Trial(Task("rps", "x", 1), 0, 2, (), turns),))
    credit = credit_of(CREDITS["differential"], turn_discount=1.0, episode_discount=0.0)
    table = build_table([group], credit, exploration_share=0.5, bonuses=[[0.25, 0.0, 4.0]])
    plain = build_table([group], credit)
    own = [0.5 * plain.returns[0] + 0.25, 0.5 * plain.returns[1] + 4.0, plain.returns[2] + 4.0]
    assert table.returns.tolist() == own


@pytest.mark.parametrize("name", ["rps", "scout", "kuhn"])
def test_where_there_is_one_it_is_taken(name):
    settings = [f"environment.name={name}", "methods.metacure.information_bonus=0.1"]
    check(config_file.load(config_file.find(None), settings))
