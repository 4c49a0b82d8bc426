"""The table with which a run ends."""

import io

from rich.console import Console

from mage_services.terminal.final_table import print_final
from tests.helpers.status_events import summary


def table_text(content, run):
    console = Console(width=80, file=io.StringIO(), record=True)
    print_final(console, content, run.report)
    return console.export_text()


def test_the_final_table_sets_the_controls_and_references_beside_the_return(run):
    text = table_text(summary(), run)
    assert text.count("+0.746 ±0.033") == 4
    for said in (
        "held-out",
        "blind",
        "swapped",
        "train",
        "best response",
        "+0.950",
        "wall 96.3 s (140 s of CPU time)",
    ):
        assert said in text
    *table, report = text.splitlines()
    assert report == f"report: {run.report}"
    assert "probes" not in text
    assert all(len(line) <= 80 for line in table)


def test_the_final_table_shows_probes_where_there_are_any(run):
    probing = summary()["evaluation"]["heldout"] | {"probes_by_episode": [0.9, 0.05, 0.0]}
    text = table_text(summary(evaluation={"heldout": probing}), run)
    assert "probes, held-out" in text
    assert "90%" in text


def test_the_final_table_says_how_often_special_tokens_stood_in_text(run):
    text = table_text(summary(injections={"rps": 12}), run)
    assert "12 observations of rps held special tokens, shown as plain text" in text


def test_the_final_table_says_why_most_dropped_groups_were_dropped(run):
    reasons = {"own, task 3: step('a') raised OSError: gone": 2, "it took too long": 5}
    text = table_text(summary(dropped_by_reason=reasons), run)
    assert "5 of 7 dropped groups: it took too long" in text


def test_an_unfinished_run_ends_without_a_table_but_with_its_report(run):
    known = {"seed": 0, "steps": 0, "complete": False, "wall_s": 3.0}
    text = table_text(known | {"environment": {"name": "rps"}}, run)
    assert "rps  seed 0  0 steps  (not finished)" in text
    assert "wall 3.0 s" in text
    assert "report:" in text


def test_the_table_of_a_terminal_without_unicode_is_ascii(run):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_final(Console(width=80, file=file), summary(), run.report)
    file.flush()
    assert file.buffer.getvalue().count(b"+0.746 +-0.033") == 4


def test_of_many_episodes_the_table_shows_the_first_and_the_last_three(run):
    score = summary()["evaluation"]["heldout"] | {
        "return_by_episode": [k / 10 for k in range(10)],
        "ci95_by_episode": [0.01] * 10,
        "probes_by_episode": [0.5] * 10,
    }
    many = summary(evaluation={"heldout": score}, references={"heldout": {"random": [0.0] * 10}})
    text = table_text(many, run)
    assert [f"episode {k}" in text for k in (1, 2, 8, 9, 10)] == [True, False, True, True, True]
    assert "+0.900" in text
    assert all(len(line) <= 80 for line in text.splitlines()[:-1])
