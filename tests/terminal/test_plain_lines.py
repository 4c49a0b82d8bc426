"""The lines that are printed where no terminal is."""

import io

from rich.console import Console

from mage_services.terminal.view import make_view
from tests.helpers.status_events import FULL_RUN, POLICY, Clock, curve, step


def plain_lines(config, run, events, *, every_s=0.1):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=80)
    view = make_view(config, run, is_terminal=False, console=console, clock=clock)
    for process, event in events:
        clock.now += every_s
        view.event(process, event)
    return view, out


def test_plain_lines_say_phases_tenth_steps_curve_points_and_notes(config, run):
    _, out = plain_lines(config, run, FULL_RUN)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith(f"environment=rps seed=0 run_dir={run.root}")
    assert [line.split()[-1] for line in lines if "phase=warm" in line] == ["phase=warm_start"]
    assert sum("phase=training policy=warm-started_here warm_start_s=14.7" in x for x in lines) == 1
    steps = [line.split("step=")[1].split()[0] for line in lines if " step=" in line]
    assert steps == ["10/150", "150/150", "10/60", "20/60", "30/60"]
    assert sum("curve version=10" in line for line in lines) == 1
    assert sum("note: actor-2 was killed by SIGKILL" in line for line in lines) == 1


def test_a_plain_line_is_never_broken_by_a_narrow_console(config, run):
    _, out = plain_lines(config, run, [POLICY, step(10)])
    (line,) = [line for line in out.getvalue().splitlines() if "step=10/60" in line]
    assert "return=+0.000,+0.400,+0.500" in line
    assert line.endswith("invalid=0.10")


def test_a_plain_line_counts_special_tokens_in_text(config, run):
    process, event = step(10)
    event["metrics"]["injections_by_environment"] = 7
    _, out = plain_lines(config, run, [POLICY, (process, event)])
    assert "invalid=0.10 injections_by_environment=7" in out.getvalue()


def test_a_plain_line_has_the_returns_of_each_environment_of_a_mix(config, run):
    process, event = step(10)
    event["metrics"]["return_by_episode_in_boxes"] = [0.5, 0.75, 1.0]
    _, measured = curve(10, 0.1, 0.2, 0.3)
    measured["environments"] = {"boxes": [0.25, 0.5, 0.5], "rps": [0.0, 0.0, -1.0]}
    _, out = plain_lines(config, run, [POLICY, (process, event), ("evaluator", measured)])
    assert "return=+0.000,+0.400,+0.500 boxes=+0.500,+0.750,+1.000 trials_per_s" in out.getvalue()
    assert "boxes=+0.250,+0.500,+0.500 rps=+0.000,+0.000,-1.000" in out.getvalue()


def test_slow_steps_are_each_a_line(config, run):
    _, out = plain_lines(config, run, [POLICY, *(step(n) for n in range(1, 4))], every_s=6.0)
    assert out.getvalue().count(" step=") == 3
