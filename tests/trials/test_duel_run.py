"""A trial against a version of the policy: who is asked what, and what is left of it."""

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
from mage_async.errors import EnvironmentFault
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import DuelRun
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialStart

NAMES = ("kuhn", "rps", "tictactoe")
OPTIONS = {"kuhn": {"opponents": "contrasts", "hands": 2, "redeals": False}}


def made(name: str) -> Environment:
    return catalogue.load(name, **OPTIONS.get(name, {}))


def rules(environment: Environment, chat: ChatFormat) -> TrialConfig:
    return trial_config_of(load(find("kuhn"), []), environment, chat, 3)


def says(chat: ChatFormat, word: str, version: int) -> Completion:
    ids = np.array(chat.encode(f" {word}"), np.int32)
    runs = (VersionRun(0, version, version),)
    return Completion(ids, np.full(len(ids), -0.5, np.float32), runs, "stop", 0)


def play(
    name: str, chat: ChatFormat, task: Task, index: int = 0, changed: TrialConfig | None = None
) -> tuple[Trial, list[Prompt], DuelRun]:
    """A whole trial in which everyone draws a word by the prompt's seed, as an engine would."""
    environment = made(name)
    run = DuelRun(
        TrialStart(
            environment, task, index, changed or rules(environment, chat), chat, name=f"t{index}"
        ),
        version=7,
    )
    asked: list[Prompt] = []
    while (prompt := run.next_prompt()) is not None:
        asked.append(prompt)
        legal = list(run._opponent.duel.legal_actions()) or ["rock"]
        word = random.Random(f"{prompt.seed}/{prompt.tokens.tolist()}").choice(legal)
        run.receive(says(chat, word, 9 if prompt.rival is None else prompt.rival))
    return run.trial(), asked, run


@pytest.mark.parametrize("name", NAMES)
def test_only_the_agents_turns_are_the_trials(name: str, chat: ChatFormat) -> None:
    for seed in range(20):
        task = Task(name, "policy-7", seed, made(name).seats()[seed % len(made(name).seats())])
        trial, asked, _ = play(name, chat, task)
        mine = [prompt for prompt in asked if prompt.rival is None]
        assert len(trial.turns) == len(mine) < len(asked)
        assert {prompt.rival for prompt in asked} == {None, 7}
        for segment in trial.segments:
            drawn = {run.policy for run in segment.versions}
            assert drawn == {9}, "a rival's tokens would have been drawn by version 7"
        spans = [(turn.start, turn.stop) for turn in trial.turns]
        sampled = trial.segments[0].is_sampled
        assert sampled.sum() == sum(stop - start for start, stop in spans)


@pytest.mark.parametrize("name", NAMES)
def test_the_agents_context_only_grows_and_the_rival_begins_anew(
    name: str, chat: ChatFormat
) -> None:
    _, asked, run = play(name, chat, Task(name, "policy-7", 3, 0))
    contexts: dict[str, np.ndarray] = {}
    for prompt in asked:
        before = contexts.get(prompt.context, np.array([], np.int32))
        assert (prompt.tokens[: len(before)] == before).all()
        contexts[prompt.context] = prompt.tokens
    rivals = {prompt.context for prompt in asked if prompt.rival is not None}
    assert len(rivals) == 3
    assert not rivals & {prompt.context for prompt in asked if prompt.rival is None}
    assert set(contexts) == set(run.contexts())
    for context in rivals:
        assert "episode 1" in chat.decode(contexts[context].tolist())


def test_all_trials_of_a_group_meet_the_same_luck(chat: ChatFormat) -> None:
    task = Task("kuhn", "policy-7", 11, 1)
    first = [play("kuhn", chat, task, index)[1] for index in range(8)]
    drawn: dict[tuple[bytes, int], set[int]] = {}
    for asked in first:
        for prompt in asked:
            if prompt.rival is not None:
                key = prompt.tokens.tobytes(), len(prompt.tokens)
                drawn.setdefault(key, set()).add(prompt.seed)
    assert all(len(seeds) == 1 for seeds in drawn.values()), "the same words, the same noise"
    mine = [prompt.seed for asked in first for prompt in asked if prompt.rival is None]
    assert len(set(mine)) == len(mine)


def test_the_rivals_seeds_follow_from_the_chance_of_its_episode(chat: ChatFormat) -> None:
    """`run` holds the duel of the last episode."""
    _, asked, run = play("rps", chat, Task("rps", "policy-7", 5, 0))
    chance = run._opponent.duel.chance
    drawn = random.Random(f"{chance.seed}/{chance.episode}/rival").getrandbits(40)
    assert run._opponent._run._task.seed == drawn
    assert len({prompt.seed for prompt in asked}) == len(asked), "episodes are of different luck"


def test_a_restart_repeats_the_rivals_moves_with_its_luck(chat: ChatFormat) -> None:
    trial, _, _ = play("kuhn", chat, Task("kuhn", "policy-7", 5, 0))
    text = chat.decode(trial.segments[0].tokens.tolist())
    cards = [part.split("<|assistant|>")[0] for part in text.split("episode")[1:]]
    assert len({said.split(" ", 2)[2] for said in cards}) == 1


def test_reflections_and_a_stop_are_the_agents_alone(chat: ChatFormat) -> None:
    environment = made("kuhn")
    reflecting = replace(rules(environment, chat), reflects=True, keeps_history=False)
    trial, asked, _ = play("kuhn", chat, Task("kuhn", "policy-7", 5, 1), changed=reflecting)
    assert [turn.kind.name for turn in trial.turns].count("REFLECT") == 2
    assert sum(prompt.rival is None for prompt in asked) == len(trial.turns)
    for seed in range(20):
        stopping = replace(rules(environment, chat), stops_on_success=True)
        task = Task("kuhn", "policy-7", seed, 0)
        trial, _, _ = play("kuhn", chat, task, changed=stopping)
        rewards = trial.episode_rewards()[: trial.num_played()]
        assert all(reward <= 0 for reward in rewards[:-1])


GOLDEN = Path(__file__).parents[1] / "environments" / "golden" / "kuhn_duel.txt"


def test_a_trial_against_a_version_reads_as_chat(chat: ChatFormat) -> None:
    assert transcript(chat) == GOLDEN.read_text()


def transcript(chat: ChatFormat) -> str:
    """What the agent reads and says in three episodes, and the rival in each."""
    trial, asked, _ = play("kuhn", chat, Task("kuhn", "policy-7", 4, 1))
    rivals = {prompt.context: prompt.tokens for prompt in asked if prompt.rival is not None}
    texts = {"the agent": trial.segments[0].tokens, **rivals}
    parts = (
        f"{name}\n" + chat.decode(tokens.tolist()).replace("<|", "\n  <|").lstrip("\n")
        for name, tokens in texts.items()
    )
    return "\n".join(parts) + "\n"


def test_where_nobody_can_sit_the_group_is_given_up(chat: ChatFormat) -> None:
    environment = catalogue.load("scout")
    with pytest.raises(EnvironmentFault, match="scout: nobody can play the opponent's seat"):
        DuelRun(
            TrialStart(
                environment,
                Task("scout", "policy-7", 0),
                0,
                rules(environment, chat),
                chat,
                name="t",
            ),
            version=7,
        )
