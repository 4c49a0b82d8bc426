"""The live panel, fed with the status lines that processes send."""

import io

import msgspec
import pytest
from rich.console import Console

from mage_async.config import config_file
from mage_services.terminal.panel import panel, panel_width, sparkline
from mage_services.terminal.plain_lines import make_view
from tests.helpers.status_events import (
    FULL_RUN,
    POLICY,
    Clock,
    in_view,
    started,
    state_after,
    step,
    summary,
    warm_start,
)

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def drawn(state, now, run, width=80):
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(panel(state, run, now, width))
    return console.export_text()


@pytest.mark.parametrize("terminal", [60, 80, 132])
def test_the_panel_fits_its_terminal_with_room_for_an_echo(config, run, terminal):
    lines = drawn(*state_after(config, FULL_RUN), run, panel_width(terminal)).splitlines()
    assert all(len(line.rstrip()) <= terminal - 2 for line in lines)
    assert len(lines) <= 23  # of 24 rows, one is the prompt's


def test_the_panel_has_a_line_for_the_environments_of_a_mix(config, run):
    process, event = step(10)
    for name in ("boxes", *(f"environment_{number}" for number in range(9))):
        event["metrics"][f"return_by_episode_in_{name}"] = [0.5, 0.75, 1.0]
    lines = drawn(*state_after(config, [POLICY, (process, event)]), run).splitlines()
    (line,) = [each for each in lines if "by environment" in each]
    assert "boxes +1.00  environment_0 +1.00" in line
    assert len(line.rstrip()) <= 80


def test_the_panel_says_all_that_is_known(config, run):
    text = drawn(*state_after(config, FULL_RUN), run)
    for said in (
        "step 30/60",
        "left + evaluation",
        "episode 3  +0.50",
        "held-out v10",
        "+0.42",
        "288 trials/s",
        "3,456 sampled",
        "0.60 mean  1 max of 1 allowed",
        "86.0% hit",
        "0.700 nats entropy",
        "99.2% valid actions",
        "0.10 invalid",
        "432 granted = 144 trained + 0 dropped + 288 in flight",
        "80% training",
        "20% batch not full",
        "measured version 10",
        "! actor-2 was killed by SIGKILL",
    ):
        assert said in text


def test_the_panel_shows_the_episodes_that_only_evaluations_play(run):
    settings = ["trial.episodes=1", "evaluation.episodes=3"]
    config = config_file.load(config_file.find(None), settings)
    point = {"event": "curve", "version": 10, "sets": {"heldout": [0.1, 0.2, 0.42]}}
    events = [POLICY, step(10, returns=(0.25,)), ("evaluator", point)]
    lines = drawn(*state_after(config, events), run).splitlines()
    assert any("episode 1" in line and "+0.25" in line and "+0.10" in line for line in lines)
    assert any("episode 3" in line and "+0.42" in line for line in lines)


def test_the_bound_of_staleness_includes_the_lag_of_the_weights(config, run):
    admission = msgspec.structs.replace(config.admission, lag=3)
    late = msgspec.structs.replace(config, admission=admission)
    assert "0.60 mean  1 max of 4 allowed" in drawn(*state_after(late, FULL_RUN), run)


def test_the_bound_of_staleness_is_that_of_the_rule(config, run):
    admission = msgspec.structs.replace(config.admission, rule="sync", max_staleness=2)
    in_turn = msgspec.structs.replace(config, admission=admission)
    assert "max of 0 allowed" in drawn(*state_after(in_turn, FULL_RUN), run)


@pytest.mark.parametrize("rule", ["count", "window", "unbounded"])
def test_a_rule_without_a_bound_of_staleness_is_shown_with_none(config, run, rule):
    admission = msgspec.structs.replace(config.admission, rule=rule)
    free = msgspec.structs.replace(config, admission=admission)
    said = drawn(*state_after(free, FULL_RUN), run)
    assert "1 max, no bound  prefix cache" in said
    assert "allowed" not in said


def test_the_panel_counts_special_tokens_in_text(config, run):
    steps = [step(1), step(2)]
    for number, (_, event) in enumerate(steps, 1):
        event["metrics"]["injections_by_environment"] = number
    text = drawn(*state_after(config, [POLICY, *steps]), run)
    assert "3 observations of rps held special tokens" in text
    assert "special tokens" not in drawn(*state_after(config, FULL_RUN), run)


def test_the_warm_start_shows_its_gate_once_it_is_known(config, run):
    before = drawn(*state_after(config, [started("learner"), warm_start(50)]), run)
    after = drawn(*state_after(config, [started("learner"), warm_start(50, gate=0.71)]), run)
    assert "warm start 50/150" in before
    assert "nan" not in before
    assert "gate 0.71" in after


def test_many_actors_share_a_line(config, run):
    names = [f"actor-{number}" for number in range(40)]
    half = len(names) // 2
    blocked = {name: {"engine": 1.0} for name in names[:half]}
    blocked |= {name: {"no grant": 1.0} for name in names[half:]}
    events = [*map(started, ("learner", *names, "evaluator")), POLICY, step(1, blocked)]
    text = drawn(*state_after(config, events), run)
    assert "40 actors" in text
    assert "50% engine" in text
    assert len(text.splitlines()) <= 23


def test_words_of_others_are_not_taken_for_markup(config, run):
    events = [started("learner"), ("learner", {"event": "note", "text": "[red]odd[/] [/nonsense]"})]
    assert "! learner: [red]odd[/] [/nonsense]" in drawn(*state_after(config, events), run)


def test_the_live_panel_is_replaced_by_the_table(config, run):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    view = make_view(config, run, is_terminal=True, console=console, clock=clock)
    for process, event in FULL_RUN:
        clock.now += 0.5
        view.event(process, event)
    assert HIDE_CURSOR in out.getvalue()
    before = len(out.getvalue())
    view.line("ended by SIGINT")
    erased = out.getvalue()[before:].split("ended by SIGINT")[0]
    assert erased.count("\x1b[2K") > 10  # the panel makes room and comes back below
    view.close(summary())
    view.close(summary())
    text = out.getvalue()
    assert text.count("ended by SIGINT") == 1
    assert text.count("report:") == 1
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


def test_what_the_doctor_finds_stays_above_the_live_panel(config, run):
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    view = make_view(config, run, is_terminal=True, console=console, clock=Clock())
    said = {"event": "finding", "text": "truncation since step 3: [bold]20% of actions"}
    for process, event in (*FULL_RUN, ("doctor", said), *FULL_RUN):
        view.event(process, event)
    view.close(summary())
    assert out.getvalue().count("doctor: truncation since step 3: [bold]20% of actions") == 1


def test_the_panel_is_drawn_at_most_a_few_times_a_second(config, run):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    view = make_view(config, run, is_terminal=True, console=console, clock=clock)
    for process, event in FULL_RUN * 20:
        clock.now += 0.001
        view.event(process, event)
    view.close(None)
    assert 3 <= out.getvalue().count("mage") <= 8  # 0.9 s of events; starting and stopping draw too


def test_a_view_that_saw_nothing_leaves_nothing_on_the_terminal(config, run):
    out = io.StringIO()
    view = make_view(config, run, is_terminal=True, console=Console(file=out, force_terminal=True))
    view.close(None)
    assert HIDE_CURSOR not in out.getvalue()


def test_sparklines_keep_their_scale_and_width():
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0, 10) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 0.0, 1.0, 10) == "▁▁▁▁▁█████"
    assert sparkline([], 0.0, 1.0, 10) == ""


def test_the_panel_says_what_the_first_step_waits_for(config, run):
    dropped = {"outgrew the context": 2}
    text = drawn(*state_after(config, [POLICY, in_view(5, dropped=dropped)]), run)
    words = " ".join(text.replace("│", " ").split())
    assert "step 1/60 waits for trials, for 8 s: 5 of 128 trials are in" in words
    assert "2 groups dropped (2 outgrew the context)" in words
    assert "complete in about 3:02 min" in words
    later = drawn(*state_after(config, [POLICY, in_view(5), step(1)]), run)
    assert "waits for trials" not in later
