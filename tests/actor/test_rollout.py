"""Trials on the scripted engine: the waiting around a trial, and the engine itself."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev

import numpy as np
import pytest

from mage_async.completion import Prompt, Sampling, check_prompt
from mage_async.environments.catalogue import load, names
from mage_async.environments.environment import Outcome
from mage_async.environments.games.rps import Rps, RpsPlay
from mage_async.errors import ConfigError, EnvironmentFault, Fault
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.policy_version import VersionRun
from mage_async.results.score import score
from mage_async.tasks.task_stream import TaskStream
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.action_parser import ActionParser, Forced
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.prompts import prompts_for
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun
from mage_services.actor.rollout import Planned, Stage, play_all, play_trial
from mage_services.environments.call_runner import CallRunner
from tests.helpers.scripted_engine import (
    Answer,
    Answers,
    LogNormalPace,
    Pace,
    ScriptedEngine,
    UniformWords,
    WordsInOrder,
    action_words,
    at_once,
)

RPS = Rps()
MOVES = ("paper", "rock", "scissors")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory = tmp_path_factory.mktemp("policy")
    words = {word for name in names() for word in load(name).facts.words}
    save_tokenizer(build_tokenizer(words), directory)
    return load_chat(directory)


def rules(forced: Forced = "both", *, reflects: bool = False) -> TrialConfig:
    return TrialConfig(
        num_episodes=3,
        sampling=Sampling(max_tokens=6),
        max_reflection_tokens=6,
        parser=ActionParser(forced),
        prompts=prompts_for(RPS, 3, rules=False),
        keeps_history=not reflects,
        reflects=reflects,
    )


def stage(chat: ChatFormat, pace: Pace = at_once, answers: Answers | None = None) -> Stage:
    engine = ScriptedEngine(answers or UniformWords(chat, ActionParser("both"), MOVES), pace)
    return Stage(RPS, rules(), chat, engine)


def runs(made: Stage, count: int) -> list[TrialRun]:
    return [planned.begin() for planned in plans(made, count)]


def plans(made: Stage, count: int) -> list[Planned]:
    tasks = TaskStream(RPS, 0)
    return [made.plan(tasks.task(number), 0, f"{number}.0.0") for number in range(count)]


def num_contexts(made: Stage) -> int:
    return made.engine.statistics().num_contexts


def test_a_trial_is_played_to_its_end_and_its_contexts_are_released(chat: ChatFormat) -> None:
    async def main() -> None:
        made = stage(chat)
        (run,) = runs(made, 1)
        trial = await play_trial(run, made.engine, CallRunner())
        assert [turn.episode for turn in trial.turns] == [0] * 4 + [1] * 4 + [2] * 4
        assert trial.num_invalid() == trial.num_extension_faults == 0
        assert trial.duration_s > 0
        assert num_contexts(made) == 0

    asyncio.run(main())


def test_a_cancelled_trial_is_released_too(chat: ChatFormat) -> None:
    async def main() -> None:
        turns: list[int] = []

        def told(prompt: Prompt, turn: int) -> Answer:
            turns.append(turn)
            if turn == 3:
                task.cancel()
            return Answer(chat.encode(" rock"), 0.0)

        made = stage(chat, answers=told)
        task = asyncio.ensure_future(play_trial(runs(made, 1)[0], made.engine, CallRunner()))
        await asyncio.wait([task])
        assert task.cancelled()
        assert turns == [0, 1, 2, 3]
        assert num_contexts(made) == 0

    asyncio.run(main())


class Cheating(Rps):
    """Rock-paper-scissors in which the third turn of an episode fails."""

    def begin(self, task: Task, episode: int) -> RpsPlay:
        play = super().begin(task, episode)
        return _Cheated(play._opponent, play.chance)


class _Cheated(RpsPlay):
    error = KeyError("spock")

    def act(self, action: str) -> Outcome:
        if self.turn == 2:
            raise self.error
        return super().act(action)


class Mute(Exception):
    """Has a text that cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("spock"), "KeyError: 'spock'"),
        (ValueError("caf\udce9"), r"ValueError: caf\?"),
        (Fault("caf\udce9"), r"caf\?"),
        (Mute(), r"Mute: \(its text cannot be read: str\(\) raised RuntimeError"),
    ],
)
def test_an_environment_that_raises_is_named_and_its_contexts_are_released(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    monkeypatch.setattr(_Cheated, "error", error)

    async def main() -> None:
        made = replace(stage(chat), environment=Cheating())
        with pytest.raises(EnvironmentFault, match=f"rps against .*: (raised )?{text}"):
            await play_trial(runs(made, 1)[0], made.engine, CallRunner())
        assert num_contexts(made) == 0

    asyncio.run(main())


def test_results_come_in_the_order_of_the_runs_though_later_ones_end_first(
    chat: ChatFormat,
) -> None:
    async def main() -> tuple[list[Trial], list[Task]]:
        made = stage(chat, lambda trial: 0.003 / (1 + int(trial.split(".")[0])))
        return await play_all(plans(made, 4), made, 4), [
            TaskStream(RPS, 0).task(number) for number in range(4)
        ]

    trials, tasks = asyncio.run(main())
    assert [trial.task for trial in trials] == tasks


def test_no_more_trials_are_played_at_once_than_allowed(chat: ChatFormat) -> None:
    async def main() -> None:
        held: list[int] = []
        uniform = UniformWords(chat, ActionParser("both"), MOVES)

        def counted(prompt: Prompt, turn: int) -> Answer:
            held.append(num_contexts(made))
            return uniform(prompt, turn)

        made = stage(chat, answers=counted)
        trials = await play_all(plans(made, 8), made, 3)
        assert len(trials) == 8
        assert max(held) == 3

    asyncio.run(main())


class Closed(Rps):
    """Rock-paper-scissors that cannot be begun."""

    def begin(self, task: Task, episode: int) -> RpsPlay:
        raise KeyError("no room")


@pytest.mark.parametrize(("environment", "num_turns"), [(Cheating(), 2), (Closed(), 0)])
def test_trials_that_their_environment_fails_are_cut_and_said(
    chat: ChatFormat, environment: Rps, num_turns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> list[Trial]:
        made = replace(stage(chat), environment=environment)
        trials = await play_all(plans(made, 4), made, 2)
        assert num_contexts(made) == 0
        return trials

    trials = asyncio.run(main())
    assert [(trial.cut_at, len(trial.turns)) for trial in trials] == [(0, num_turns)] * 4
    assert capsys.readouterr().err.count("raised KeyError") == 4
    found = score(trials, RPS)
    assert (found.cut_short, found.return_by_episode) == (1.0, [-1.0] * 3)

    asyncio.run(main())


def test_a_trial_that_outgrows_the_context_ends_there_and_counts_among_the_others(
    chat: ChatFormat,
) -> None:
    """As in an evaluation of more episodes than the engine was given room for."""

    async def main() -> list[Trial]:
        uniform = UniformWords(chat, ActionParser("both"), MOVES)

        def within(prompt: Prompt, turn: int) -> Answer:
            check_prompt(prompt, max_tokens=60, vocabulary=10**6)  # as real engines do
            return uniform(prompt, turn)

        made = stage(chat, answers=within)
        trials = await play_all(plans(made, 3), made, 2)
        assert num_contexts(made) == 0
        return trials

    trials = asyncio.run(main())
    assert [trial.cut_at for trial in trials] == [1, 1, 1]
    assert all(trial.turns[-1].episode == 1 for trial in trials)
    found = score(trials, RPS)
    assert found.cut_short == 1.0
    assert found.return_by_episode[1:] == [-1.0, -1.0]
    assert found.lost_by_episode[1:] == [1.0, 1.0]


@pytest.mark.parametrize("forced", ["both", "open", "none"])
def test_scripted_words_are_parsed_whatever_the_transcript_writes_itself(
    chat: ChatFormat, forced: Forced
) -> None:
    async def main() -> Trial:
        parser = ActionParser(forced)
        engine = ScriptedEngine(WordsInOrder(chat, parser, ("rock", "paper")))
        made = Stage(RPS, rules(forced, reflects=forced != "none"), chat, engine)
        return await play_trial(runs(made, 1)[0], engine, CallRunner())

    turns = asyncio.run(main()).turns
    assert all(turn.is_valid for turn in turns)
    acts = [turn.action for turn in turns if turn.kind is Kind.ACT]
    assert acts[:4] == ["rock", "paper", "rock", "paper"]


def test_the_legal_words_of_every_shipped_environment_are_found() -> None:
    assert action_words(load("rps")) == MOVES
    assert action_words(load("kuhn")) == ("bet", "call", "check", "fold")
    assert len(action_words(load("tictactoe"))) == 9


def prompt(
    tokens: Sequence[int], *, context: str = "0.0.0.1", seed: int = 0, fresh: bool = False
) -> Prompt:
    return Prompt(context, np.array(tokens, np.int32), Sampling(), seed, fresh)


def test_uniform_words_have_their_log_prob_and_depend_on_the_seed_alone(chat: ChatFormat) -> None:
    words = UniformWords(chat, ActionParser("both"), MOVES)
    said = [words(prompt([1, 2], seed=seed), 0) for seed in range(50)]
    assert {answer.logprob for answer in said} == {-math.log(3)}
    assert {tuple(answer.tokens) for answer in said} == {chat.encode(f" {word}") for word in MOVES}
    assert words(prompt([7], seed=3), 5) == said[3]


def test_a_trial_keeps_its_pace_whoever_plays_it() -> None:
    assert LogNormalPace(1.0, 0.6, 0)("3.0.1") == LogNormalPace(1.0, 0.6, 0)("3.0.1")
    assert LogNormalPace(1.0, 0.6, 0)("3.0.1") != LogNormalPace(1.0, 0.6, 1)("3.0.1")
    assert LogNormalPace(1.0, 0.6, 0)("3.0.1") != LogNormalPace(1.0, 0.6, 0)("3.0.0")


@pytest.mark.parametrize("sigma", [0.0, 0.6, 1.2])
def test_paces_have_the_mean_and_the_spread_asked_for(sigma: float) -> None:
    pace = LogNormalPace(2.0, sigma)
    drawn = [pace(f"{number}.0.0") for number in range(20_000)]
    assert mean(drawn) == pytest.approx(2.0, rel=0.05)
    assert pstdev(map(math.log, drawn)) == pytest.approx(sigma, abs=0.02)


def test_a_pace_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean_s above 0 and sigma of at least 0, got 0 and -1"):
        LogNormalPace(0.0, -1.0)


def test_a_turn_takes_its_trials_time() -> None:
    async def main() -> None:
        asked: list[str] = []

        def pace(trial: str) -> float:
            asked.append(trial)
            return 0.02

        engine = ScriptedEngine(lambda prompt, turn: Answer([5], 0.0), pace)
        began = asyncio.get_running_loop().time()
        await engine.complete(prompt([1, 2]))
        assert asyncio.get_running_loop().time() - began >= 0.019
        assert asked == ["0.0.0"]
        assert engine.statistics().forward_s >= 0.019

    asyncio.run(main())


def test_tokens_are_drawn_by_the_version_loaded_at_the_turns_end() -> None:
    async def main() -> None:
        engine = ScriptedEngine(lambda prompt, turn: Answer([5], 0.0))
        turn = asyncio.ensure_future(engine.complete(prompt([1, 2])))
        await asyncio.sleep(0)  # the turn has begun
        await engine.load(3, Path("none"))
        assert (await turn).versions == (VersionRun(0, 3, 3),)
        await engine.load(4, Path("none"))
        assert (await engine.complete(prompt([1, 2, 5, 6]))).versions == (VersionRun(0, 4, 3),)
        fresh = await engine.complete(prompt([1, 2, 5, 6, 5, 6], fresh=True))
        assert fresh.versions == (VersionRun(0, 4, 4),)
        assert (fresh.num_reused, fresh.num_repeated) == (0, 4)

    asyncio.run(main())


def test_a_prompt_that_does_not_extend_its_context_is_counted() -> None:
    async def main() -> None:
        engine = ScriptedEngine(lambda prompt, turn: Answer([5], 0.0))
        first = await engine.complete(prompt([1, 2]))
        second = await engine.complete(prompt([1, 2, 5, 6]))
        third = await engine.complete(prompt([1, 9, 5, 6]))
        assert [first.num_reused, second.num_reused, third.num_reused] == [0, 2, 1]
        assert [first.is_extension, second.is_extension, third.is_extension] == [True, True, False]
        counters = engine.statistics().counters()
        assert counters["num_extension_faults"] == 1
        assert counters["num_prompt_tokens"] == 10
        assert counters["num_reused_tokens"] == 3

    asyncio.run(main())


def test_an_answer_that_is_too_long_is_cut() -> None:
    async def main() -> None:
        engine = ScriptedEngine(lambda prompt, turn: Answer([5, 6, 7], -1.0))
        completion = await engine.complete(prompt([1]))
        assert completion.tokens.tolist() == [5]
        assert completion.finish == "length"
        assert completion.logprobs.tolist() == [-1.0]

    asyncio.run(main())
