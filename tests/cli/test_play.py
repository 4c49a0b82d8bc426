"""A person in the agent's place: what is asked, what counts, what is shown beside it."""

import asyncio

import pytest

from mage_async.config import config_file
from mage_async.environments.catalogue import load
from mage_async.environments.user_calls import Call
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ConfigError
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import Kind, Task, Trial, Turn
from mage_async.trials.human_play import MAX_SHOWN, episode_lines, human_play, reward_table, shown
from mage_async.trials.scripted_play import chat_in_words
from mage_services.actor import play_session
from mage_services.actor.play_session import drawn_task, play_by_person
from mage_services.environments.call_runner import CallRunner

RPS = load("rps")
MEMBER = "seq-rock-scissors-scissors"
TASK = Task("rps", MEMBER, 3)


def asked(*answers):
    """What a person is asked who gives these answers, and what the episodes earned."""
    play, heard, left = human_play(RPS, TASK, 2), [], iter(answers)
    item = next(play)
    while True:
        heard.append(item)
        try:
            item = play.send(next(left) if item.choices else "")
        except StopIteration as end:
            return heard, end.value


def test_a_person_plays_the_task_that_the_agent_would():
    by_hand = asked(*["rock"] * 8)[1]
    outcomes = []
    for episode in range(2):
        play = RPS.begin(TASK, episode)
        outcomes.append(sum(play.act("rock").reward for _ in range(4)))
    assert by_hand == outcomes


def test_an_illegal_action_counts_and_is_said():
    heard, earned = asked("stone", *["rock"] * 7)
    told = "that was no legal action; the environment answers:"
    assert heard[1].text.startswith(told)
    assert earned[0] == asked(*["rock"] * 8)[1][0] - 1.0


def test_who_was_hidden_is_said_at_the_end_and_not_before():
    heard, _ = asked(*["rock"] * 8)
    assert heard[-1].text.endswith(f"hidden from you was {MEMBER}")
    assert not any(MEMBER in item.text for item in heard[:-1])


def test_many_choices_are_counted():
    names = [str(number) for number in range(MAX_SHOWN + 3)]
    assert shown(names).endswith("… 3 more")
    assert shown(names[:2]) == "0 | 1"


@pytest.mark.parametrize(("pattern", "listed"), [("[ab] 1", ("a 1", "b 1")), ("[a-z]{5}", ())])
def test_a_person_chooses_among_the_texts_of_a_pattern_if_they_are_few(pattern, listed):
    class Own:
        """Say anything."""

        legal_pattern = pattern

        def reset(self, seed, task):
            return "go"

        def step(self, action):
            return "on", 0.0, True

    play = human_play(ResetStep(Own, {}), Task("own", "0", 0), 1)
    prompt = next(play)
    while isinstance(prompt, Call):
        prompt = play.send(prompt.now())
    assert prompt.choices == listed
    assert prompt.text.endswith(f"go\nan action matches {pattern}")
    # A typing error is no turn: the only one of this episode is still to come.
    again = play.send("typo error")
    assert (again.text, again.choices) == ("'typo error' is no legal action here", listed)
    call = play.send("a 1" if listed else "crane")
    assert isinstance(call, Call)


@pytest.mark.parametrize("environment", ["rps", "scout", "kuhn", "tictactoe", "minesweeper"])
def test_every_environment_can_be_played_by_a_person(environment, capsys):
    found = load(environment)
    task = drawn_task(found, None, 5)
    prompts = []

    def first_choice(wanted):
        prompts.append(wanted)
        return wanted.choices[0]

    async def nobody(prompt):
        raise AssertionError("a script needs no engine")

    earned = asyncio.run(
        play_by_person(human_play(found, task, 2), first_choice, nobody, CallRunner())
    )
    assert len(earned) == 2
    assert prompts
    assert task.member in capsys.readouterr().out


def test_a_seed_draws_the_same_task_again_and_a_member_may_be_chosen():
    assert drawn_task(RPS, None, 5) == drawn_task(RPS, None, 5)
    assert drawn_task(RPS, None, 5).member in RPS.members("heldout")
    assert drawn_task(RPS, MEMBER, 5).member == MEMBER


def test_the_agents_trial_is_told_an_episode_a_line():
    turns = (
        Turn(Kind.ACT, 0, 0, 0, 0, 1, -1.0, True, "rock"),
        Turn(Kind.REFLECT, 0, 0, 0, 1, 2, 0.0, True, "paper next"),
        Turn(Kind.ACT, 1, 0, 0, 2, 3, 1.0, False, ""),
    )
    said = episode_lines(Trial(TASK, 0, 2, (), turns))
    assert said == "episode 1: rock   (-1)\n   “paper next”\nepisode 2: ?   (+1)"
    words = [Turn(Kind.ACT, 0, 0, 0, 0, 1, 0.0, True, each) for each in ("go left", "go")]
    assert "1: go left | go   (" in episode_lines(Trial(TASK, 0, 1, (), tuple(words)))


def test_a_person_and_the_agent_stand_in_one_table():
    assert reward_table([-1.0, 2.0], [0.5, 1.0]) == (
        "you      -1.00    2.00\n" + "agent     0.50    1.00"
    )


def test_a_wrong_member_is_answered_with_the_closest_and_the_first_few(tmp_path, monkeypatch):
    monkeypatch.setattr(RunDirectory, "check_policy", lambda run: None)
    config = config_file.load(config_file.find(None), ["environment.name=scout"])
    monkeypatch.setattr(config_file, "load_recorded", lambda file, **more: config)
    known = [name for split in ("train", "heldout") for name in load("scout").members(split)]
    assert len(known) > MAX_SHOWN
    with pytest.raises(ConfigError) as refused:
        play_session.prepare(RunDirectory(tmp_path), f"{known[-1]}x", None, None)
    assert f"no member '{known[-1]}x' (did you mean `{known[-1]}`?); there are" in str(
        refused.value
    )
    assert str(refused.value).endswith(f"… {len(known) - MAX_SHOWN} more")


@pytest.mark.parametrize(("episodes", "max_tokens"), [(None, 160), (2, 160), (12, 640)])
def test_more_episodes_than_in_training_get_a_longer_context(
    tmp_path, monkeypatch, episodes, max_tokens
):
    config = config_file.load(config_file.find(None), [])
    monkeypatch.setattr(RunDirectory, "check_policy", lambda run: None)
    monkeypatch.setattr(config_file, "load_recorded", lambda file, **more: config)
    monkeypatch.setattr(play_session, "chosen_policy", lambda *_: (tmp_path, 0))
    monkeypatch.setattr(
        "mage_async.inference.chat_files.load_chat", lambda *_, **__: chat_in_words()
    )
    monkeypatch.setattr(
        "mage_services.engines.engine.make_engine", lambda config, *_, **__: config.engine
    )
    stage = play_session.prepare(RunDirectory(tmp_path), None, 5, episodes).make()
    assert stage.engine.max_tokens == stage.config.max_tokens == max_tokens
