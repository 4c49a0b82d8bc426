"""Whole trials in environments of other libraries, in a chat template and token by token."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Prompt
from mage_async.config import config_file
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rollout import Stage, play_trial
from mage_services.environments.call_runner import CallRunner
from tests.environments.loaders.serving import served
from tests.helpers.scripted_engine import Answer, ScriptedEngine, at_once

TEMPLATE = Path(__file__).parents[2] / "inference" / "chat_templates" / "smollm2.jinja"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """SmolLM2's template over a tokenizer of bytes."""
    folder, tokenizer = tmp_path_factory.mktemp("policy"), build_tokenizer(["row"])
    special = [AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(special)
    save_tokenizer(tokenizer, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<|im_end|>", "chat_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return load_chat(folder)


def trial_of(chat: ChatFormat, name: str, member: str, actions: Sequence[str]) -> Trial:
    """Two episodes of one task by the same actions, as an actor plays them."""
    given = ["policy.kind=pretrained", "policy.source=none", f"environment.name={name}"]
    given += ["engine.max_tokens=8192"]  # this tokenizer writes bytes
    config = config_file.load(config_file.find(None), given)
    environment = environment_of(config)
    rules = trial_config_of(config, environment, chat, 2)

    def answers(prompt: Prompt, turn: int) -> Answer:
        opening = "" if rules.parser.prefill(Kind.ACT) else "<action>"
        said = f"{opening}{actions[turn % len(actions)]}</action><|im_end|>"
        return Answer(chat.encode(said), 0.0)

    async def main() -> Trial:
        stage = Stage(environment, rules, chat, ScriptedEngine(answers, at_once))
        async with CallRunner(EnvironmentConfig(step_deadline_s=30.0)) as workers:
            run = stage.begin(Task(environment.facts.name, member, 5), 0, "0")
            return await play_trial(run, stage.engine, workers)

    return asyncio.run(main())


def lake() -> tuple[list[str], float]:
    """Moves on slippery ice until an episode of Gymnasium's own ends, and its return."""
    own = pytest.importorskip("gymnasium").make("FrozenLake-v1")
    own.reset(seed=7)
    moves, earned, is_done = list[str](), 0.0, False
    while not is_done:
        move = len(moves) % 4
        _, reward, is_done, _, _ = own.step(move)
        moves.append(("left", "down", "right", "up")[move])
        earned += reward
    return moves, earned


def number() -> tuple[list[str], float]:
    """Guesses until a game of TextArena's own ends, and its return."""
    arena, before = pytest.importorskip("textarena"), random.getstate()
    own, guesses, is_done = arena.make("GuessTheNumber-v0-raw"), list[str](), False
    own.reset(num_players=1, seed=7)
    while not is_done:
        guesses.append(f"[{2 * len(guesses) + 1}]")
        is_done, _ = own.step(guesses[-1])
    random.setstate(before)
    return guesses, own.close()[0][0]


def question() -> tuple[list[str], float]:
    """The answer to a question of reasoning-gym's own, and its score."""
    factory = pytest.importorskip("reasoning_gym.factory")
    own = factory.create_dataset("chain_sum", size=1280, seed=0)
    return [own[7]["answer"]], own.score_answer(own[7]["answer"], own[7])


@pytest.mark.parametrize(
    ("name", "own_loop"),
    [
        ("gymnasium:FrozenLake-v1", lake),
        ("reasoning-gym:chain_sum", question),
        ("textarena:GuessTheNumber-v0", number),
    ],
)
def test_both_episodes_of_a_trial_earn_what_the_librarys_own_does(
    chat: ChatFormat, name: str, own_loop: Callable[[], tuple[list[str], float]]
) -> None:
    actions, earned = own_loop()
    trial = trial_of(chat, name, "7", actions)
    assert trial.episode_rewards() == pytest.approx([earned, earned])
    assert trial.num_invalid() == 0
    assert len(trial.turns) == 2 * len(actions)
    first, again = chat.decode(trial.segments[0].tokens.tolist()).split("episode 2")
    assert actions[-1] in first
    assert actions[-1] in again


def test_a_trial_over_the_network_is_the_trial_here(chat: ChatFormat) -> None:
    pytest.importorskip("aiohttp")
    actions, _ = lake()
    here = trial_of(chat, "gymnasium:FrozenLake-v1", "7", actions)
    with served("gymnasium:FrozenLake-v1") as address:
        there = trial_of(chat, f"openenv:{address}", "7", actions)
    assert there.episode_rewards() == here.episode_rewards()
    assert [turn.action for turn in there.turns] == [turn.action for turn in here.turns]
