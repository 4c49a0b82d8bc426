"""The lines that are printed where no terminal is."""

import io
import itertools

from rich.console import Console

from mage_async.errors import MAKE_ROOM
from mage_services.terminal.plain_lines import make_view
from tests.helpers.status_events import (
    FULL_RUN,
    POLICY,
    Clock,
    curve,
    in_view,
    started,
    step,
    warm_start,
)


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
    assert sum("phase=training prepared_s=14.7 policy: warm-started here" in x for x in lines) == 1
    assert sum(" gate: a ratio of losses" in line for line in lines) == 1
    assert sum("metrics.jsonl has every step" in line for line in lines) == 1
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


def test_a_plain_line_of_many_episodes_has_the_first_the_last_and_the_mean(config, run):
    process, event = step(10)
    event["metrics"]["return_by_episode"] = [index / 10 for index in range(30)]
    _, out = plain_lines(config, run, [POLICY, (process, event)])
    assert " return=+0.000..+2.900,mean=+1.450 trials_per_s" in out.getvalue()


def test_a_plain_line_has_digits_of_returns_in_a_small_unit(config, run):
    process, event = step(10)
    event["metrics"]["return_by_episode"] = [0.0, 0.0004, 0.00075]
    _, out = plain_lines(config, run, [POLICY, (process, event)])
    assert " return=+0.000000,+0.000400,+0.000750 trials_per_s" in out.getvalue()


def test_slow_steps_are_each_a_line(config, run):
    _, out = plain_lines(config, run, [POLICY, *(step(n) for n in range(1, 4))], every_s=6.0)
    assert out.getvalue().count(" step=") == 3


def test_a_slow_run_prints_at_least_every_half_minute_what_it_waits_for(config, run):
    starting = [started("learner"), *[("supervisor", {"event": "beat"})] * 60]
    warming = [warm_start(0), *[("supervisor", {"event": "beat"})] * 60]
    playing = [POLICY, *(in_view(number) for number in range(120))]
    _, out = plain_lines(config, run, [*starting, *warming, *playing, step(1)], every_s=1.5)
    lines = out.getvalue().splitlines()
    times = [float(line.split("[")[1].split("s]")[0]) for line in lines]
    assert max(later - sooner for sooner, later in itertools.pairwise(times)) <= 30
    waiting = [line.split("waiting: ")[1] for line in lines if "waiting: " in line]
    assert len(waiting) == 4 + 4 + 8
    assert waiting[0] == "starting, for 21 s: learner starting"
    assert waiting[4].startswith("warm start 0/150, for 21 s: learner")
    assert waiting[9] == (
        "step 1/60 waits for trials, for 40 s: 27 of 128 trials are in, 8 groups in flight; "
        "270 turns and 2,700 tokens so far, 6.7 turns/s, 67 tokens/s; return -0.500; "
        "75% of actions valid; complete in about 2:30 min"
    )


def test_the_line_about_waiting_names_a_full_disk_until_a_step_is_trained(config, run):
    full = f"learner: cannot write weights: No space left on device. {MAKE_ROOM}"
    note = ("supervisor", {"event": "note", "text": full})
    waits = [in_view(number) for number in range(30)]
    _, out = plain_lines(config, run, [POLICY, note, *waits, step(1), *waits], every_s=1.5)
    before, after = out.getvalue().split(" step=1/60 ")
    waiting = [line for line in before.splitlines() if "waiting: " in line]
    assert waiting
    assert all(line.endswith(full) for line in waiting)
    assert full not in after


def test_steps_that_are_printed_need_no_line_about_the_next_one(config, run):
    events = [POLICY, *(event for n in range(1, 20) for event in (step(n), in_view(n)))]
    _, out = plain_lines(config, run, events, every_s=6.0)
    assert "waiting:" not in out.getvalue()


def test_a_run_that_has_ended_waits_for_nothing(config, run):
    events = [started("learner"), ("learner", {"event": "done"})]
    _, out = plain_lines(config, run, [*events, *[("supervisor", {"event": "beat"})] * 60])
    assert "waiting:" not in out.getvalue()


def test_the_line_of_a_warm_start_says_how_many_seconds_are_left(config, run):
    events = [started("learner"), warm_start(0), warm_start(50)]
    _, out = plain_lines(config, run, events, every_s=6.0)
    *_, line = [line for line in out.getvalue().splitlines() if "warm_start step=50/150" in line]
    assert line.endswith(" left_s=12")  # 6 s for 50 steps, and 100 are left


def test_a_warm_start_beyond_its_schedule_is_not_a_line_a_step(config, run):
    events = [("learner", warm_start(number)[1] | {"steps": 400}) for number in range(150, 200)]
    _, out = plain_lines(config, run, [warm_start(150), *events])
    steps = [
        line.split("step=")[1].split()[0]
        for line in out.getvalue().splitlines()
        if " step=" in line
    ]
    assert steps == ["150/150", "160/400", "170/400", "180/400", "190/400"]
