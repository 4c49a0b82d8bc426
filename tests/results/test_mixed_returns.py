"""Returns by environment, from trials to the terminal's table and the report's."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from mage_async.assembly import trial_config_of
from mage_async.config import config_file
from mage_async.environments import catalogue
from mage_async.environments.environment import Split
from mage_async.environments.game_references import Sampled, half_widths_of, mean_of
from mage_async.pages.tables import environment_tables, sets_tables
from mage_async.results.metrics import batch_metrics, check_names, returns_by_environment
from mage_async.results.score import by_environment, environment_returns, references, score
from mage_async.tasks.task_stream import FINAL_SEED, evaluation_tasks
from mage_async.trajectory import Group, Trial
from mage_async.trials.scripted_play import chat_in_words, scripted_trial
from mage_services.terminal.final_table import print_final

MIX = catalogue.load("mix", parts=[{"name": "boxes"}, {"name": "rps", "share": 0}])


def trials(split: Split) -> list[Trial]:
    config, chat = config_file.load(config_file.find(None)), chat_in_words()
    rules = trial_config_of(config, MIX, chat, 3)
    tasks = evaluation_tasks(MIX, split, 8, FINAL_SEED)
    return [scripted_trial(MIX, task, 0, rules, chat) for task in tasks]


PLAYED = trials("heldout")
ROUNDS = 4


def own(label: str) -> list[list[float]]:
    rows = [each.episode_rewards() for each in PLAYED if each.task.member.startswith(f"{label}/")]
    assert len(rows) == 4
    return rows


def means(rows: list[list[float]], units: int) -> list[float]:
    return [sum(column) / len(column) / units for column in zip(*rows, strict=True)]


def test_a_score_has_each_environments_returns_in_its_own_unit() -> None:
    found = environment_returns(score(PLAYED, MIX))
    assert found["boxes"] == pytest.approx(means(own("boxes"), 1))
    assert found["rps"] == pytest.approx(means(own("rps"), ROUNDS))


def test_an_environment_alone_has_no_returns_by_environment() -> None:
    boxes = catalogue.load("boxes")
    config, chat = config_file.load(config_file.find(None)), chat_in_words()
    (task,) = evaluation_tasks(boxes, "heldout", 1, FINAL_SEED)
    alone = scripted_trial(boxes, task, 0, trial_config_of(config, boxes, chat, 3), chat)
    assert environment_returns(score([alone], boxes)) == {}
    found = batch_metrics([Group(0, 0, (alone,))], boxes, 1.0, 3)
    assert returns_by_environment(found) == {}


def test_a_steps_line_says_the_returns_of_each_environment() -> None:
    found = batch_metrics([Group(0, 0, tuple(PLAYED))], MIX, 1.0, 3)
    check_names(found)
    by_name = returns_by_environment(found)
    assert by_name["rps"] == pytest.approx(means(own("rps"), ROUNDS))
    halves = zip(by_name["boxes"], by_name["rps"], strict=True)
    assert found["return_by_episode"] == pytest.approx([(a + b) / 2 for a, b in halves])


def summary() -> dict[str, Any]:
    return {
        "seed": 0,
        "steps": 1,
        "complete": True,
        "wall_s": 1.0,
        "environment": {"name": "mix"},
        "evaluation": {"heldout": msgspec.to_builtins(score(PLAYED, MIX))},
        **references(MIX, 3),
        **by_environment(MIX, 3),
    }


def test_the_final_table_and_the_report_show_each_environment_beside_its_references() -> None:
    console = Console(width=100, record=True, file=None)
    with console.capture() as captured:
        print_final(console, summary(), Path("report.html"))
    said = captured.get()
    assert "rps (not trained on)" in said
    assert "with memory" in said
    assert "bayes" in said
    boxes, rps = environment_tables(summary())
    assert (boxes["label"], rps["label"]) == ("boxes", "rps (not trained on)")
    rows = [row.label for row in boxes["table"].rows]
    assert rows == ["held-out", "random", "without memory", "with memory"]


def test_sampled_references_stand_with_their_intervals_and_exact_ones_without() -> None:
    hangman = catalogue.load("hangman", words=16)
    known = references(hangman, 3)
    exact, sampled = {"random", "known"}, {"solver_without_memory", "solver"}
    assert set(known["references"]["heldout"]) == exact | sampled
    assert set(known["reference_ci95"]["heldout"]) == sampled
    found = {**summary(), **known}
    console = Console(width=100, record=True, file=None)
    with console.capture() as captured:
        print_final(console, found, Path("report.html"))
    lines = captured.get().splitlines()
    (solver,) = (line for line in lines if "solver without memory" in line)
    (random,) = (line for line in lines if "│ random" in line)
    assert (solver.count("±"), random.count("±")) == (3, 0)
    rows = sets_tables(found["evaluation"], found, 1.0)["sets"].rows
    beside = {row.label: row.cells[0].note for row in rows}
    assert beside["solver without memory"].startswith("± 0.")
    assert beside["random"] == ""


def test_the_half_width_of_a_mean_is_that_of_its_parts() -> None:
    sampled = Sampled((1.0, 0.0), (0.3, 0.4))
    found = mean_of([sampled, (0.0, 1.0), sampled])
    assert found == pytest.approx((2 / 3, 1 / 3))
    assert half_widths_of({"a": found, "b": (1.0,)})["a"] == pytest.approx(
        (0.3 * 2**0.5 / 3, 0.4 * 2**0.5 / 3)
    )
    assert half_widths_of({"b": mean_of([(1.0,), (2.0,)])}) == {}
