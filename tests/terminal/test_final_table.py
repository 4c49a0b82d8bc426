"""The table with which a run ends."""

import io

import pytest
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
        "± 95 % over trials of these tasks",
        "wall 96.3 s (140 s of CPU time)",
    ):
        assert said in text
    *lines, report = text.splitlines()
    assert report == f"report: {run.report}"
    assert "probes" not in text
    table = [line for line in lines if "│" in line]
    assert table
    assert all(len(line) <= 80 for line in table)


def test_returns_in_a_small_unit_are_shown_with_as_many_digits(run):
    heldout = summary()["evaluation"]["heldout"]
    for key in ("return_by_episode", "ci95_by_episode"):
        heldout[key] = [value / 100 for value in heldout[key]]
    assert "+0.00746 ±0.00033" in table_text(summary(evaluation={"heldout": heldout}), run)


def test_returns_in_a_large_unit_have_commas_and_fewer_digits(run):
    heldout = summary()["evaluation"]["heldout"]
    for key in ("return_by_episode", "ci95_by_episode"):
        heldout[key] = [value * 1e5 for value in heldout[key]]
    assert "+74,600.0 ±3,300.0" in table_text(summary(evaluation={"heldout": heldout}), run)


def test_the_speed_of_a_large_model_is_not_rounded_to_nothing(run):
    rates = {"trials_per_s": 0.123, "generated_tokens_per_s": 45.6}
    assert "0.123 trials/s, 45.6 sampled tokens/s" in table_text(summary(throughput=rates), run)


def test_the_interval_of_a_single_trial_is_not_known(run):
    heldout = summary()["evaluation"]["heldout"] | {"num_trials": 1}
    text = table_text(summary(evaluation={"heldout": heldout}), run)
    assert "+0.746 ±? " in text
    assert "±0" not in text.partition("random")[0]


def test_a_label_with_brackets_is_printed_as_it_is_written(run):
    named = {"oracle [best]": [0.9] * 3, "x [/b]": [0.8] * 3, ":dice: [red]": [0.7] * 3}
    text = table_text(summary(references={"heldout": named}), run)
    assert [name for name in named if name not in text] == []


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


def test_the_final_table_counts_reasons_that_differ_in_their_task_alone_as_one_kind(run):
    raised = {f"own, task {n}: step('a') raised OSError: \x1b[2Jgone": 1 for n in range(9)}
    reasons = {"it took too long": 2, **raised, "other reasons": 30}
    text = table_text(summary(dropped_by_reason=reasons), run)
    line = "9 of 41 dropped groups: the environment raised, such as: own, task 0: step('a') raised"
    assert line in text
    assert "the reasons of 30 were not counted one by one" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_costs_are_whole_lines_except_in_a_terminal(run, is_terminal):
    reason = "own, task 3: step('a') raised OSError: " + "no space left on the device, " * 4 + "end"
    console = Console(
        width=80, file=io.StringIO(), force_terminal=is_terminal, color_system=None, record=True
    )
    print_final(console, summary(dropped_by_reason={reason: 2}), run.report)
    lines = console.export_text().splitlines()
    assert (f"2 of 2 dropped groups: {reason}" in lines) == (not is_terminal)
    # The path of the report, the last line, is whole in a terminal too.
    assert is_terminal == all(len(line) <= 80 for line in lines[:-1])


def test_the_trials_that_no_step_needed_are_not_called_lost(run):
    counts = "trials: 432 granted = 144 trained + 0 dropped + 288"
    assert f"{counts} begun for later steps" in table_text(summary(), run)
    stopped = table_text(summary(complete=False), run)
    assert f"{counts} in flight, kept for --resume" in stopped


def test_a_policy_below_its_beginning_is_called_so_below_the_table(run):
    first = {"return_by_episode": [0.9] * 3, "ci95_by_episode": [0.01] * 3}
    known = summary(before_training=first, best_step=3, evaluated_step=60)
    line = "less than before training, +0.900; the best checkpoint is that of step 3"
    assert line in table_text(known, run)
    assert "less than" not in table_text(summary(), run)


def test_the_title_names_the_step_of_the_weights_that_were_evaluated(run):
    later = table_text(summary(complete=False, steps=72, evaluated_step=60), run)
    assert "rps  seed 0  72 steps  (not finished)  evaluated at step 60" in later
    assert "evaluated at" not in table_text(summary(evaluated_step=60), run)


def test_an_unfinished_run_ends_without_a_table_but_with_its_report(run):
    known = {"seed": 0, "steps": 1, "complete": False, "wall_s": 3.0}
    text = table_text(known | {"environment": {"name": "rps"}}, run)
    assert "rps  seed 0  1 step  (not finished)" in text
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
    assert "…" not in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_figure_of_the_table_is_cut_whatever_the_width(run, is_terminal):
    row = summary()["evaluation"]["heldout"] | {
        "return_by_episode": [0.1, 0.2, 0.3, 0.4],
        "ci95_by_episode": [0.011] * 4,
        "probes_by_episode": [0.0] * 4,
    }
    scores = {name: row for name in ("heldout", "heldout_blind", "heldout_swapped", "train")}
    console = Console(
        width=60, file=io.StringIO(), force_terminal=is_terminal, color_system=None, record=True
    )
    print_final(console, summary(evaluation=scores, references={"heldout": {}}), run.report)
    text = console.export_text()
    table = [line for line in text.splitlines() if "│" in line]
    columns = 2 if is_terminal else 4
    assert text.count("±0.011") == 4 * columns
    assert ("episode 2" in text, "episode 4" in text) == (not is_terminal, True)
    assert "…" not in text
    assert is_terminal == all(len(line) <= 60 for line in table)
    assert console.width == 60
