"""Diversity and harder tasks, played on an engine without a model."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Pretrained
from mage_async.environments.catalogue import load
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.run_directory import RunDirectory
from mage_async.results.score import Diversity, Harder, Score
from mage_async.trials.action_parser import ActionParser
from mage_services.actor.evaluator import Evaluator, write_evaluation
from mage_services.api.evaluation import ladder_of, score_rungs
from mage_services.environments.call_runner import CallRunner
from tests.helpers.scripted_engine import (
    Answers,
    ScriptedEngine,
    UniformWords,
    WordsInOrder,
    at_once,
)

BOXES = config_file.load(
    config_file.find(None), ["environment.name=boxes", "engine.max_tokens=4096"]
)
CONFIG = config_file.load(
    config_file.find(None), ["environment.name=sokoban", "engine.max_tokens=4096"]
)
Measured = tuple[dict[str, Score], Diversity, Harder]
PLAYED: list[tuple[int, int]] = []


def _note(played: int, of: int) -> None:
    PLAYED.append((played, of))


def measured(folder: Path, kind: type[UniformWords] | type[WordsInOrder]) -> Measured:
    """What is measured of a policy that says up or down."""
    save_tokenizer(build_tokenizer(load("sokoban").facts.words), folder)
    chat = load_chat(folder)
    answers: Answers = kind(chat, ActionParser("both"), ("up", "down"))

    async def main() -> Measured:
        engine = ScriptedEngine(answers, at_once)
        async with CallRunner() as workers:
            evaluator = Evaluator(CONFIG, chat, engine, workers, 2)
            sets = {"heldout": await evaluator.play("heldout", 8, 1)}
            spread = await evaluator.diversity(24, 8, _note)
            ladder = ladder_of(CONFIG, "boxes")
            harder = await score_rungs(ladder, sets["heldout"], evaluator, _note)
        return sets, spread, harder

    return asyncio.run(main())


def test_a_policy_of_chance_is_diverse_and_a_fixed_one_is_not(tmp_path: Path) -> None:
    _, by_chance, _ = measured(tmp_path, UniformWords)
    assert (by_chance.num_tasks, by_chance.repeats) == (3, 8)
    assert all(1.5 < each <= math.log(8) + 1e-9 for each in by_chance.entropy_by_episode)
    _, fixed, _ = measured(tmp_path, WordsInOrder)
    assert fixed.entropy_by_episode == [0.0, 0.0]
    assert fixed.distinct_by_episode == [1.0, 1.0]


def test_harder_tasks_are_scored_beside_those_as_trained(tmp_path: Path) -> None:
    PLAYED.clear()
    sets, spread, harder = measured(tmp_path, UniformWords)
    assert harder.ladder == "boxes"
    assert [rung.label for rung in harder.rungs] == ["as trained", "boxes 3", "boxes 4"]
    assert harder.rungs[0].score == sets["heldout"]
    assert [rung.score.num_trials for rung in harder.rungs] == [8, 8, 8]
    # Each trial is reported: three tasks eight times, then two rungs.
    assert [*((n, 24) for n in range(1, 25)), *((n, 16) for n in range(1, 17))] == PLAYED

    run = RunDirectory(tmp_path)

    def written(version: int, **more: Any) -> dict[str, Any]:
        environment = environment_of(CONFIG)
        write_evaluation(
            run, sets, environment, version, blocked_s={}, more=msgspec.to_builtins(more)
        )
        return json.loads(run.evaluation.read_text())

    assert written(3, diversity=spread)["diversity"]["repeats"] == 8
    both = written(3, harder=harder)
    assert both["diversity"]["repeats"] == 8
    assert both["harder"]["rungs"][1]["options"] == {"boxes": 3}
    assert "harder" not in written(4)


def test_a_part_of_a_mix_is_played_alone_on_its_harder_rungs(tmp_path: Path) -> None:
    parts = '[{name = "rps"}, {name = "boxes", label = "few", options = {boxes = 5}}]'
    config = config_file.load(
        config_file.find(None), ["environment.name=mix", f"environment.options.parts={parts}"]
    )
    pretrained = msgspec.structs.replace(config, policy=Pretrained(source="none"))
    ladder = ladder_of(pretrained, "few")
    words = load("boxes", boxes=6).facts.words
    save_tokenizer(build_tokenizer(words), tmp_path)
    chat = load_chat(tmp_path)
    answers = UniformWords(chat, ActionParser("both"), ("left", "right"))

    async def main() -> Harder:
        engine = ScriptedEngine(answers, at_once)
        async with CallRunner() as workers:
            own = Evaluator(BOXES, chat, engine, workers, 2)
            heldout = await own.play("heldout", 4, 1)
            return await score_rungs(ladder, heldout, own)

    harder = asyncio.run(main())
    assert harder.ladder == "few/boxes"
    assert [rung.label for rung in harder.rungs] == ["as trained", "few boxes 6"]
    assert all(rung.score.num_trials == 4 for rung in harder.rungs)
