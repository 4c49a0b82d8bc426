"""A player that repeats what paid: which rule it finds in which task, and what a model clones."""

import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np
import pytest

import mage_async as mage
from mage_async.assembly import environment_of, trial_config_of
from mage_async.environments.user_calls import make_pending_calls
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault
from mage_async.inference.chat_files import load_chat
from mage_async.policy import demonstrations
from mage_async.policy.demonstrations import (
    TRIED_WEIGHT,
    WIN_STAY_RULE,
    compare_win_stay,
    examples_to_clone,
    untimed,
    win_stay_examples,
)
from mage_async.policy.initial_policy import prepare_policy
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.summary import reference_rows
from mage_async.trajectory import Guidance, Task
from mage_async.trials.scripted_play import random_play, random_task, scripted_trial, word_tokens
from mage_async.trials.win_stay import (
    LEAST_COMPARED,
    NUM_COMPARED,
    NUM_MORE,
    Comparison,
    Rule,
    answers_of,
    best_rule,
    known_actions,
    player_of,
)
from mage_services.actor.evaluator import played_references
from mage_services.processes.process import in_time

TREES = ("oak", "ash", "elm")
ARMS = ("red", "green", "blue", "black")


class Arms:
    """Pull one of four arms four times; one pays, the same in all episodes."""

    legal_actions = ARMS
    words = (*ARMS, "pull", "paid", "nothing")
    max_turns = 4

    def reset(self, seed, task):
        self.arm, self.left = random.Random(task).choice(ARMS), 4
        return "pull"

    def step(self, action):
        self.left -= 1
        pays = action == self.arm
        return "paid" if pays else "nothing", float(pays), not self.left


class Boxes(Arms):
    """Open four boxes in a row; each has its own arm."""

    def reset(self, seed, task):
        self.arms = random.Random(task).choices(ARMS, k=4)
        return "pull"

    def step(self, action):
        pays = action == self.arms.pop(0)
        return "paid" if pays else "nothing", float(pays), not self.arms


class Asked(Arms):
    """Be asked three trees, in an order that changes, each with an arm of its own."""

    words = (*ARMS, *TREES, "paid", "nothing", "over")
    max_turns = 3

    def reset(self, seed, task, episode):
        self.arms = dict(zip(TREES, random.Random(task).sample(ARMS, 3), strict=True))
        self.left = random.Random(f"{seed}-{episode}").sample([*self.arms], 3)
        return self.left[0]

    def step(self, action):
        pays = action == self.arms[self.left.pop(0)]
        return self.said("paid" if pays else "nothing"), float(pays), not self.left

    def said(self, pay):
        return f"{pay} {self.left[0] if self.left else 'over'}"


class AskedFirst(Asked):
    """The same, with what is asked now before what the last action earned."""

    def said(self, pay):
        return f"{self.left[0] if self.left else 'over'} {pay}"


class AskedBetween(Asked):
    """The same, with what is asked now between other words."""

    words = (*Asked.words, "now", "please")

    def reset(self, seed, task, episode):
        return f"now {super().reset(seed, task, episode)} please"

    def said(self, pay):
        return f"{pay} now {self.left[0] if self.left else 'over'} please"


class Crowd(Asked):
    """The same with twenty trees, of which a trial meets hardly one twice."""

    trees = tuple(f"tree{number}" for number in range(20))
    words = (*ARMS, *trees, "paid", "nothing", "over")

    def reset(self, seed, task, episode):
        self.arms = dict(zip(self.trees, random.Random(task).choices(ARMS, k=20), strict=True))
        self.left = random.Random(f"{seed}-{episode}").sample(self.trees, 3)
        return self.left[0]


class Told(Asked):
    """The same, and be told the right arm after a wrong one."""

    words = (*ARMS, *TREES, "right", "no", "over")

    def step(self, action):
        arm = self.arms[self.left[0]]
        said, reward, is_over = super().step(action)
        return said.replace("nothing", f"no {arm}").replace("paid", "right"), reward, is_over


class Late(Boxes):
    """Open four boxes in a row, and be paid for all of them at the end."""

    def reset(self, seed, task):
        self.earned = 0.0
        return super().reset(seed, task)

    def step(self, action):
        said, reward, is_over = super().step(action)
        self.earned += reward
        return said, self.earned if is_over else 0.0, is_over


class Luck(Arms):
    """Be paid at random."""

    def step(self, action):
        said, _, is_over = super().step(action)
        return said, float(random.random() < 0.3), is_over


class Hangs(Arms):
    """Never answer."""

    def step(self, action):
        time.sleep(30)


class Slow(Arms):
    """Take a hundredth of a second: 0.12 s for the 12 steps of a trial."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


class Raises(Arms):
    """Fail at each step."""

    def step(self, action):
        raise OSError("the server is down")


class Seller:
    """A seller with a hidden lowest price, and costs of the way home that are luck: returns differ
    by more than they can be raised.
    """

    legal_actions = tuple(map(str, range(10, 100, 10)))
    words = (*legal_actions, "deal", "no")
    max_turns, min_return, max_return = 5, -70.0, 90.0

    def reset(self, seed, task, episode):
        self.costs = random.Random(f"{seed}-{episode}")
        self.lowest = 20 + 10 * (task % 8)
        return "no"

    def step(self, action):
        cost = self.costs.choice((0, 70))
        is_deal = int(action) >= self.lowest
        return ("deal", 100.0 - int(action) - cost, True) if is_deal else ("no", 0.0, False)


class Songs:
    """Play four of eight songs to a guest who loves one and likes three."""

    legal_actions = tuple(f"song{number}" for number in range(8))
    words = (*legal_actions, "dances", "hums", "skips", "play")
    max_turns = 4

    def reset(self, seed, task):
        songs = random.Random(task).sample(self.legal_actions, 8)
        self.pays = dict(zip(songs, (2, 1, 1, 1, 0, 0, 0, -1), strict=True))
        self.left = 4
        return "play"

    def step(self, action):
        self.left -= 1
        said = ("skips", "skips", "hums", "dances")[self.pays[action] + 1]
        return said, float(self.pays[action]), self.left == 0


class Failing(Arms):
    """Lose the connection at the third pull of the second episode."""

    open, pulls = 0, 0

    def reset(self, seed, task):
        Failing.open += 1
        return super().reset(seed, task)

    def step(self, action):
        Failing.pulls += 1
        if Failing.pulls == 7:
            raise ConnectionError
        return super().step(action)

    def close(self):
        Failing.open -= 1


def configured(kind, **keys):
    return mage.configure(keys={"policy.kind": "tiny"} | keys, environment=kind)


def player(kind, chat, guidance=None):
    """Return a function that lets a player play trials."""
    config = configured(kind)
    environment = environment_of(config)
    rules = trial_config_of(config, environment, chat, 3)

    def play(made, count=NUM_COMPARED, seed=0):
        source = random.Random(seed)
        for index in range(count):
            task = random_task(environment, "train", source)
            yield scripted_trial(environment, task, index, rules, chat, guidance, made)

    return play


def never(made):
    """Fail: a clear comparison is not repeated."""
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Arms, "anywhere"),
        (Boxes, "turn"),
        (Asked, "last_word"),
        (AskedFirst, "first_word"),
        (AskedBetween, "asked_words"),
    ],
)
def test_the_best_rule_is_that_of_the_task(chat, kind, place):
    play = player(kind, chat)
    found = best_rule(play, never, chat.decode)
    rule = found.rule
    assert found.is_better
    assert (rule.place, rule.pay) == (place, "reward")
    earned = np.mean([trial.episode_rewards() for trial in play(player_of(rule))], axis=0)
    by_random = np.mean([trial.episode_rewards() for trial in play(random_play)], axis=0)
    assert earned[-1] > 2 * by_random[-1]
    assert found.gain[0] == pytest.approx(earned[-1] - earned[0])
    assert found.lead[0] == pytest.approx(earned[-1] - by_random[-1])


def test_a_rule_takes_what_the_answer_to_a_wrong_action_named(chat):
    play = player(Told, chat)
    found = best_rule(play, never, chat.decode)
    assert (found.rule.place, found.rule.pay) == ("last_word", "reward")
    assert found.rule.follows_answers
    for trial in play(player_of(found.rule), 20):
        # The answer to the last action of an episode is read too.
        assert trial.episode_rewards()[1:] == [3.0, 3.0]
        known = known_actions(trial, found.rule, chat.decode)
        assert known == {number for number, turn in enumerate(trial.turns) if turn.episode}


def test_a_player_that_slips_is_told_again(chat):
    rule = Rule("last_word", "reward", 0.25, follows_answers=True)
    trials = list(player(Told, chat)(player_of(rule, 0.3), 20))
    returns = np.array([trial.episode_rewards() for trial in trials])
    assert 1.5 < returns[:, 1:].mean() < 2.9
    for trial in trials:
        known = known_actions(trial, rule, chat.decode)
        assert all(trial.turns[number].reward for number in known)
    assert any(a < b for a, b in returns[:, 1:]), "the answer to a second mistake was used"


def test_further_trials_alone_have_slips(chat, tmp_path):
    save_tokenizer(build_tokenizer(Told.words), tmp_path)
    keys = {"warm_start.kind": "win_stay", "warm_start.trials": 20}
    config = configured(Told, **keys, **{"warm_start.further_trials": 30})
    examples, _, rule = examples_to_clone(config, config.warm_start, tmp_path, untimed)
    assert rule.follows_answers
    tried = {is_further: [] for is_further in (False, True)}
    for each in examples:
        tried[each.is_further].append(int((each.episodes == 0).sum()))
    assert tried[False] == [3] * 20, "only the first episode tries actions"
    assert len(tried[True]) == 30
    assert max(tried[True]) > 3


class Numbered(Told):
    """The same, with actions that are also numbers of episodes."""

    legal_actions = ("1", "2", "3", "4")
    words = (*legal_actions, *TREES, "right", "no", "over")

    def reset(self, seed, task, episode):
        first = super().reset(seed, task, episode)
        self.arms = {tree: str(1 + ARMS.index(arm)) for tree, arm in self.arms.items()}
        return first


def test_the_number_of_an_episode_is_no_answer(chat):
    trials = list(player(Numbered, chat)(random_play, 8))
    answers = [answer for trial in trials for answer in answers_of(trial, chat.decode)]
    assert any(" over" in each for each in answers)
    assert not any("episode" in each for each in answers)


def test_the_first_and_the_last_word_of_a_long_observation_are_places_too():
    class Long(Arms):
        """Pull an arm, and read much."""

        def reset(self, seed, task):
            return f"red {'nothing ' * (task + 30)}green"

    environment, anchors = ResetStep(Long, {}), set()
    for member in ("0", "1"):
        play = environment.begin(Task("long", member, 0), 0)
        make_pending_calls(play)
        anchors.add(play.anchor)
        assert len(play.anchor) <= 200 < len(play.observation)
        assert Rule("first_word", "reward", 0.0).place_of(play.anchor, 0) == "red"
        assert Rule("last_word", "reward", 0.0).place_of(play.anchor, 0) == "green"
    assert len(anchors) == 2


@pytest.mark.parametrize(
    ("kind", "num_rules"), [(Arms, 6), (Boxes, 6), (Asked, 10), (Crowd, 6), (Told, 20)]
)
def test_rules_that_cannot_differ_or_be_learned_are_not_played(chat, kind, num_rules):
    play, made = player(kind, chat), []

    def counted(each):
        made.append(each)
        return play(each)

    assert best_rule(counted, play, chat.decode) is not None
    assert len(made) == 1 + num_rules  # and random play


def test_a_reward_at_the_end_of_an_episode_is_that_of_its_actions(chat):
    assert best_rule(player(Late, chat), never, chat.decode).rule.pay == "return"


def test_no_rule_is_better_than_random_play_where_pay_is_luck(chat):
    random.seed(0)
    play = player(Luck, chat)
    assert not best_rule(play, partial(play, count=NUM_MORE, seed=1), chat.decode).is_better


def test_a_rule_whose_lead_is_not_clear_in_64_trials_is_compared_again(chat):
    play = player(Seller, chat)

    def more(made):
        return play(made, NUM_MORE, 1)

    few, many = best_rule(play, lambda made: [], chat.decode), best_rule(play, more, chat.decode)
    assert (few.is_better, few.is_promising, few.num_tasks) == (False, True, NUM_COMPARED)
    assert (many.is_better, many.num_tasks) == (True, NUM_MORE)
    assert many.is_complete
    assert not few.is_complete


def test_what_pays_a_little_is_repeated_only_in_the_last_episode(chat):
    play = player(Songs, chat)
    found = best_rule(play, never, chat.decode)
    assert (found.rule.usual, found.rule.good, found.rule.last) == (
        pytest.approx(0.5, abs=0.1),
        2,
        2,
    )
    # A player that is content with what pays more than the mean.
    content = Rule(found.rule.place, found.rule.pay, found.rule.usual)
    by_content = [trial.episode_rewards()[-1] for trial in play(player_of(content))]
    assert found.by_rule[0] > 1.3 * np.mean(by_content)
    assert not found.rule.has_won(1.0, 1)
    assert found.rule.has_won(1.0, 2)


@pytest.mark.parametrize("has_few", [True, False])
def test_no_rule_is_found_in_a_few_trials_of_either_player(chat, has_few):
    def play(made):
        is_short = (made is random_play) == has_few
        return player(Arms, chat)(made, LEAST_COMPARED - is_short)

    assert best_rule(play, never, chat.decode) is None


def test_a_rule_is_cloned_if_its_lead_and_its_gain_are_clear():
    rule, clear, unclear = Rule("anywhere", "reward", 0.25), (1.0, 0.67), (1.0, 0.68)
    for lead, gain, is_better in (
        (clear, clear, True),
        (clear, None, True),
        (unclear, clear, False),
        (clear, unclear, False),
    ):
        found = Comparison(rule, (2.0, 0.5), (1.0, 0.5), lead, gain, 64, num_rules=10)
        assert found.is_better == is_better
        is_said = ", but not clearly more than in its first: +1.0" in found.sentence(1.0)
        assert is_said == (gain == unclear)


@pytest.mark.parametrize("guidance", [None, Guidance(0, 1, (), "", 0.0)])
def test_the_player_repeats_what_paid_and_tries_what_it_has_not_tried(chat, guidance):
    for trial in player(Arms, chat, guidance)(player_of(Rule("anywhere", "reward", 0.25)), 20):
        tried = set()
        for turn, following in pairwise(trial.turns):
            tried.add(turn.action)
            if turn.reward:
                assert following.action == turn.action
            else:
                assert following.action not in tried


def test_the_player_repeats_the_first_of_the_actions_that_paid_the_same(chat):
    # All actions of an episode of `Late` earned the same return.
    for trial in player(Late, chat)(player_of(Rule("anywhere", "return", 0.0)), 20):
        first, second = ([each.action for each in trial.turns if each.is_act_of(i)] for i in (0, 1))
        if trial.episode_rewards()[0] > 0:
            assert set(second) == {first[0]}


def test_actions_that_are_only_tried_have_little_weight(chat):
    rule = Rule("anywhere", "reward", 0.25)
    trials = list(player(Arms, chat)(player_of(rule), 20))
    words = word_tokens(environment_of(configured(Arms)), chat)
    examples = win_stay_examples(trials, rule, words, 0.0, chat)
    for trial, example in zip(trials, examples, strict=True):
        wins, paid = known_actions(trial, rule, chat.decode), set()
        for number, turn in enumerate(trial.turns):
            assert (number in wins) == (turn.action in paid)
            places = np.flatnonzero(trial.segments[0].is_sampled[turn.start : turn.stop])
            weights = example.weights[turn.start + places]
            assert np.allclose(weights, 1.0 if number in wins else TRIED_WEIGHT)
            if turn.reward:
                paid.add(turn.action)


def test_the_table_has_rows_of_players_where_a_class_states_no_references(tmp_path):
    config = configured(Arms, **{"trial.episodes": 3, "evaluation.episodes": 3})
    save_tokenizer(build_tokenizer(Arms.words), tmp_path)
    (tmp_path / WIN_STAY_RULE).write_bytes(msgspec.json.encode(Rule("anywhere", "reward", 0.25)))
    known = played_references(config, tmp_path, 64)
    rows = {row.label: row for row in reference_rows(known)}
    assert list(rows) == ["random", "win-stay"]
    better = rows["win-stay"].values[-1] - rows["win-stay"].half_widths[-1]
    assert better > rows["random"].values[-1] + rows["random"].half_widths[-1]
    # The rule belongs to the environment of the warm start.
    other = played_references(config, tmp_path, 64, with_rule=False)
    assert list(other["references"]["heldout"]) == ["random"]
    # Shipped games state references of their own.
    assert played_references(mage.configure(), tmp_path, 64) == {}


@pytest.mark.parametrize(
    ("kind", "limits", "why"),
    [
        (
            Hangs,
            {"LATE_S": 0.5},
            "takes more than 0.5 s, too long for a warm start; set warm_start = none",
        ),
        (Raises, {}, "8 of 8 trials of random play failed: "),
        (Slow, {"QUICK_S": 0.1}, "each of 8 trials of random play took over 0.1 s"),
        (Luck, {}, "not clearly more than random play"),
    ],
)
def test_a_run_begins_without_a_warm_start_where_there_is_nothing_to_clone(
    tmp_path, monkeypatch, kind, limits, why
):
    random.seed(0)
    for name, seconds in limits.items():
        monkeypatch.setattr(demonstrations, name, seconds)
    origin = prepare_policy(configured(kind), tmp_path / "policy", lambda progress: None, in_time)
    assert origin.startswith("without a warm start: ")
    assert why in origin
    assert load_chat(tmp_path / "policy").encode(" red")


@pytest.mark.parametrize(
    ("kind", "limits", "is_kept", "is_tiny"),
    [(Luck, {}, True, True), (Luck, {}, True, False), (Slow, {"QUICK_S": 0.1}, False, True)],
)
def test_that_there_is_nothing_to_clone_is_cached_unless_the_machine_may_be_the_cause(
    tmp_path, monkeypatch, chat, kind, limits, is_kept, is_tiny
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, seconds in limits.items():
        monkeypatch.setattr(demonstrations, name, seconds)
    source = tmp_path / "model"
    own = {} if is_tiny else {"policy.kind": "pretrained", "policy.source": str(source)}
    if not is_tiny:
        prepare_policy(configured(kind, **{"warm_start": "none"}), source, lambda at: None)
    config = configured(kind, **{"warm_start.kind": "win_stay", "warm_start.cache": True}, **own)
    random.seed(0)
    first = prepare_policy(config, tmp_path / "one", lambda at: None, in_time)
    assert first.startswith("without a warm start: ")

    def play(*given):
        raise AssertionError("it is played again")

    monkeypatch.setattr(demonstrations, "compare_win_stay", play)
    if not is_kept:
        with pytest.raises(AssertionError, match="played again"):
            prepare_policy(config, tmp_path / "two", lambda at: None, in_time)
        return
    second = prepare_policy(config, tmp_path / "two", lambda at: None, in_time)
    assert second == first.replace(": ", ": as an earlier start found, ", 1)
    for name in ("one", "two"):
        assert (tmp_path / name).is_symlink() != is_tiny
        assert load_chat(tmp_path / name).encode(" red")
    (cached,) = (tmp_path / "cache" / "mage_async").iterdir()
    assert [each.name for each in cached.iterdir()] == ["nothing_to_clone.json"]


def test_a_reason_that_cannot_be_cached_ends_no_start(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file in place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    config = configured(Luck, **{"warm_start.kind": "win_stay", "warm_start.cache": True})
    random.seed(0)
    origin = prepare_policy(config, tmp_path / "policy", lambda progress: None, in_time)
    assert "not clearly more than random play" in origin
    assert ", not cached: " in origin


def test_of_returns_that_are_all_equal_that_is_said_and_no_interval():
    rule = Rule("anywhere", "reward", 0.0)
    said = Comparison(rule, (2.0, 0.0), (0.5, 0.25), (1.5, 0.25), None, 40).sentence(2)
    assert "earns +1.000 every time in the last episode of 40 training tasks" in said
    assert said.endswith("random play with +0.250 ±0.125")


def test_slow_trials_are_timed_until_they_took_as_long_as_a_late_one(chat):
    config = configured(Slow)

    def timed(trials, seconds):
        return ((number, 3.0) for number in range(8))

    found = compare_win_stay(config, environment_of(config), chat, timed)
    assert found == "each of 2 trials of random play took over 0.3 s"


def test_play_that_was_late_ends_with_its_trial():
    before, goes_on, played = set(threading.enumerate()), threading.Event(), []

    def trials():
        for number in range(4):
            if number == 1:
                goes_on.wait()
            played.append(number)
            yield number

    assert [number for number, _ in in_time(trials(), 0.5)] == [0]
    goes_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert played == [0, 1]


def test_a_scripted_trial_that_fails_closes_its_object(chat):
    with pytest.raises(CallFault, match="raised ConnectionError"):
        next(player(Failing, chat)(random_play))
    assert Failing.open == 0


def test_a_stop_of_the_process_makes_no_play_late():
    code = """
import time
from mage_services.processes.process import in_time
def trials():
    for number in range(3):
        if number == 1:
            print("stop", flush=True)
        end = time.process_time() + 0.1  # a stopped process does not compute
        while time.process_time() < end:
            pass
        yield number
print([number for number, _ in in_time(trials(), 5.0)])
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as played:
        assert played.stdout.readline() == "stop\n"
        played.send_signal(signal.SIGSTOP)
        time.sleep(5.5)
        played.send_signal(signal.SIGCONT)
        assert played.stdout.read() == "[0, 1, 2]\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_model_that_has_cloned_the_player_uses_its_earlier_episodes(tmp_path):
    config = configured(
        Boxes, **{"warm_start.cache": False, "learner.steps": 1, "evaluation.final_trials": 64}
    )
    run = mage.train(config, actors=1, run_dir=tmp_path / "run", progress=False)
    found = run.evaluate(trials=200)
    rows = found if isinstance(found, list) else found.to_dict("records")
    # Rows of a set are in the order of its episodes.
    last = {row["set"]: row["return"] for row in rows}
    assert last["heldout"] > 2.0
    assert last["heldout_blind"] < 1.6
