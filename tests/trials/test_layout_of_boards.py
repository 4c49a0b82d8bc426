"""Boards are told row by row to a model that reads, and as words to one that learns the words."""

import pytest

from mage_async.environments.catalogue import load
from mage_async.trajectory import Task
from mage_async.trials.prompts import prompts_for


@pytest.mark.parametrize(("name", "rows"), [("sokoban", 6), ("minesweeper", 6), ("tictactoe", 3)])
def test_a_model_that_reads_is_told_a_board_by_rows(name: str, rows: int) -> None:
    environment = load(name)
    play = environment.begin(Task(name, environment.members("train")[0], 3), 0)
    said = play.observation
    laid_out = prompts_for(environment, 3, rules=True).layout(said)
    assert len(laid_out.splitlines()) == rows
    assert len({len(line.split()) for line in laid_out.splitlines()}) == 1
    assert laid_out.split() == said.split()
    assert prompts_for(environment, 3, rules=False).layout(said) == said
    over = "won" if name == "sokoban" else "lose"
    last = environment.laid_out(f"{said} {over}").splitlines()[-1]
    assert last.endswith(over)
    assert environment.laid_out("invalid") == "invalid"
    assert environment.laid_out(f"invalid {said}") == f"invalid\n{laid_out}"


def test_news_are_no_board() -> None:
    news = " ".join(f"{cell} clear" for cell in range(20))
    assert load("minesweeper", view="news").laid_out(news) == news
