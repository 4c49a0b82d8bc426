"""Trials in which both seats remember: who is asked what, and what is left of each side."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mage_async.assembly import trial_config_of
from mage_async.completion import Completion, Prompt
from mage_async.config.config_file import find, load
from mage_async.environments import catalogue
from mage_async.environments.environment import Environment
from mage_async.environments.games.tictactoe import MAX_TURNS
from mage_async.errors import TrialFault
from mage_async.policy_version import VersionRun
from mage_async.tasks.league import ITSELF
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import TwoMemoriesRun, begin_trial
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialStart

NAMES = ("kuhn", "rps", "tictactoe")
OPTIONS = {"kuhn": {"opponents": "contrasts", "hands": 2, "redeals": True}}
REFLECTING = {"reflects": True, "keeps_history": False}


def made(name: str) -> Environment:
    return catalogue.load(name, **OPTIONS.get(name, {}))


def rules(name: str, chat: ChatFormat, **changes: object) -> TrialConfig:
    own = trial_config_of(load(find("kuhn"), ["engine.max_tokens=4096"]), made(name), chat, 3)
    return replace(own, rivals_remember=True, **changes)  # type: ignore[arg-type]


def play(
    task: Task, chat: ChatFormat, own: TrialConfig, index: int = 0
) -> tuple[tuple[Trial, ...], list[Prompt], TwoMemoriesRun]:
    """A whole trial in which everyone draws a legal word by the prompt's seed."""
    environment = made(task.environment)
    run = begin_trial(TrialStart(environment, task, index, own, chat, name=f"t{index}"))
    assert isinstance(run, TwoMemoriesRun)
    asked: list[Prompt] = []
    while (prompt := run.next_prompt()) is not None:
        asked.append(prompt)
        duel = run._duels[run._runs[run._side_to_sample].episode]
        legal = list(duel.legal_actions()) or ["bet"]
        word = random.Random(f"{prompt.seed}/{prompt.tokens.tolist()}").choice(legal)
        ids = np.array(chat.encode(f" {word}"), np.int32)
        drawn = (VersionRun(0, 9, 9),)
        logprobs = np.full(len(ids), -0.5, np.float32)
        run.receive(Completion(ids, logprobs, drawn, "stop", 0))
    return run.trials(), asked, run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changes", [{}, REFLECTING], ids=["history", "remarks"])
def test_both_seats_are_trials_of_the_same_play(
    name: str, changes: dict[str, object], chat: ChatFormat
) -> None:
    for seed in range(20):
        task = Task(name, ITSELF, seed, made(name).seats()[seed % len(made(name).seats())])
        trials, asked, _ = play(task, chat, rules(name, chat, **changes), index=4)
        one, other = trials
        assert (one.task, other.task) == (task, task.from_other_seat())
        assert (one.index, other.index) == (4, 5)
        assert all(prompt.rival is None for prompt in asked)
        assert len(one.turns) + len(other.turns) == len(asked)
        assert [trial.num_played() for trial in trials] == [3, 3]
        for trial in trials:
            remarks = [turn for turn in trial.turns if turn.kind is Kind.REFLECT]
            assert len(remarks) == (2 if changes else 0)
            assert len(trial.segments) == (3 if changes else 1)
            assert trial.num_sampled() == sum(turn.stop - turn.start for turn in trial.turns)
        if name != "rps":  # where an invalid move costs both
            sums = [a + b for a, b in zip(*(t.episode_rewards() for t in trials), strict=True)]
            assert sums == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_each_seat_has_contexts_of_its_own_which_only_grow(name: str, chat: ChatFormat) -> None:
    _, asked, run = play(Task(name, ITSELF, 3), chat, rules(name, chat))
    contexts: dict[str, np.ndarray] = {}
    for prompt in asked:
        before = contexts.get(prompt.context, np.array([], np.int32))
        assert (prompt.tokens[: len(before)] == before).all()
        contexts[prompt.context] = prompt.tokens
    assert set(contexts) == set(run.contexts()) == {"t0.1", "t0.across.1"}
    assert len({prompt.seed for prompt in asked}) == len(asked)
    for tokens in contexts.values():
        assert [word in chat.decode(tokens.tolist()) for word in ("episode 1", "episode 3")] == [
            True,
            True,
        ]


def test_each_seat_reads_what_it_would_read_from_the_agents(chat: ChatFormat) -> None:
    """The other seat's own words, given to the agent in that seat, make the same transcript."""
    own = rules("tictactoe", chat)
    (one, other), _, _ = play(Task("tictactoe", ITSELF, 8, 0), chat, own)
    words = {0: [t.action for t in one.turns], 1: [t.action for t in other.turns]}
    run = begin_trial(
        TrialStart(made("tictactoe"), Task("tictactoe", ITSELF, 8, 1), 0, own, chat, name="u")
    )
    assert isinstance(run, TwoMemoriesRun)
    while (_ := run.next_prompt()) is not None:
        ids = np.array(chat.encode(f" {words[1 - run._side_to_sample].pop(0)}"), np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32)
        run.receive(Completion(ids, logprobs, (VersionRun(0, 9, 9),), "stop", 0))
    turned = run.trials()
    for there, here in zip((one, other), reversed(turned), strict=True):
        assert (there.segments[0].tokens == here.segments[0].tokens).all()
        assert there.episode_rewards() == here.episode_rewards()


@pytest.mark.parametrize("changes", [{}, REFLECTING], ids=["history", "remarks"])
def test_an_older_version_remembers_and_belongs_to_no_trial(
    changes: dict[str, object], chat: ChatFormat
) -> None:
    task = Task("kuhn", "policy-7", 11, 1)
    trials, asked, _ = play(task, chat, rules("kuhn", chat, **changes))
    (trial,) = trials
    rivals = [prompt for prompt in asked if prompt.rival == 7]
    mine = [prompt for prompt in asked if prompt.rival is None]
    assert len(trial.turns) == len(mine) == len(asked) - len(rivals)
    contexts = {prompt.context for prompt in rivals}
    assert len(contexts) == (3 if changes else 1)
    last = chat.decode(rivals[-1].tokens.tolist())
    assert "episode 3" in last
    assert ("remark" if changes else "episode 2") in last


def test_an_older_version_has_the_same_luck_in_all_trials_of_a_group(chat: ChatFormat) -> None:
    task, own = Task("kuhn", "policy-7", 11, 1), rules("kuhn", chat)
    drawn: dict[bytes, set[int]] = {}
    for index in range(8):
        for prompt in play(task, chat, own, index)[1]:
            if prompt.rival is not None:
                drawn.setdefault(prompt.tokens.tobytes(), set()).add(prompt.seed)
    assert all(len(seeds) == 1 for seeds in drawn.values()), "the same words, the same noise"


def test_a_win_ends_the_trial_of_the_agent_alone(chat: ChatFormat) -> None:
    for seed in range(20):
        own = rules("kuhn", chat, stops_on_success=True)
        (trial,), _, _ = play(Task("kuhn", "policy-7", seed), chat, own)
        rewards = trial.episode_rewards()[: trial.num_played()]
        assert all(reward <= 0 for reward in rewards[:-1])


def test_an_episode_in_which_a_side_never_acts_is_given_up(chat: ChatFormat) -> None:
    """Words that are no cell use up a side's turns."""
    task = Task("tictactoe", ITSELF, 0, 0)
    run = begin_trial(
        TrialStart(made("tictactoe"), task, 0, rules("tictactoe", chat), chat, name="t")
    )
    ids = np.array(chat.encode(" bet"), np.int32)
    said = Completion(ids, np.zeros(len(ids), np.float32), (VersionRun(0, 9, 9),), "stop", 0)
    for _ in range(MAX_TURNS - 1):
        assert run.next_prompt() is not None
        run.receive(said)
    assert run.next_prompt() is not None
    with pytest.raises(TrialFault, match="over before the other seat could act"):
        run.receive(said)


GOLDEN = Path(__file__).parents[1] / "environments" / "golden" / "kuhn_both_seats.txt"


def test_both_seats_read_as_chat(chat: ChatFormat) -> None:
    assert transcript(chat) == GOLDEN.read_text()


def transcript(chat: ChatFormat) -> str:
    """What each seat reads and says in three episodes."""
    trials, _, _ = play(Task("kuhn", ITSELF, 4, 1), chat, rules("kuhn", chat, **REFLECTING))
    parts = (
        f"trial {trial.index}, seat {trial.task.seat}\n"
        + chat.decode(segment.tokens.tolist()).replace("<|", "\n  <|").lstrip("\n")
        for trial in trials
        for segment in trial.segments
    )
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_each_seat_writes_notes_where_its_own_context_is_full(name: str, chat: ChatFormat) -> None:
    room = {"compaction": "notes", "room": 90, "max_reflection_tokens": 5}
    for seed in range(5):
        task = Task(name, ITSELF, seed, made(name).seats()[0])
        trials, asked, _ = play(task, chat, rules(name, chat, **room))
        assert max(len(prompt.tokens) for prompt in asked) < 90
        for trial in trials:
            notes = [turn for turn in trial.turns if turn.kind is Kind.NOTES]
            assert len(notes) == len(trial.segments) - 1 > 0
            assert trial.num_played() == 3
