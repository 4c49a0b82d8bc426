"""What the terminal shows, fed with the status lines that processes send."""

import io

import pytest
from rich.console import Console

from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_services.terminal.final_table import print_final
from mage_services.terminal.panel import panel, panel_width, short, sparkline
from mage_services.terminal.run_state import RunState
from mage_services.terminal.view import make_view

NAN = float("nan")
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def config():
    return config_file.load(config_file.find(None), ["learner.steps=60"])


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


def started(name):
    return "supervisor", {"event": "started", "text": name}


def warm_start(step, gate=NAN):
    return "learner", {"event": "warm_start", "step": step, "steps": 150, "loss": 1.5, "gate": gate}


POLICY = ("learner", {"event": "policy", "origin": "warm-started here", "warm_start_s": 14.7})


def step(number, blocked_s=None, faults=(), returns=(0.0, 0.4, 0.5)):
    metrics = {
        "step": number,
        "time_s": 0.5 * number,
        "return_by_episode": list(returns),
        "trials_per_s": 288.0,
        "generated_tokens_per_s": 3456.0,
        "trained_tokens_per_s": 29376.0,
        "staleness_mean": 0.6,
        "staleness_max": 1.0,
        "prefix_hit_rate": 0.86,
        "entropy": 0.7,
        "invalid_actions_per_trial": 0.1,
    }
    return "learner", {"event": "step", "metrics": metrics, **seen(blocked_s or {}, faults)}


def seen(blocked_s, faults=()):
    trials = {"granted": 432, "trained": 144, "dropped": 0, "in_flight": 288}
    return {"trials": trials, "blocked_s": blocked_s, "faults": list(faults)}


def curve(version, *heldout):
    sets = {"train": [0.0, 0.1, 0.2], "heldout": list(heldout)}
    return "evaluator", {"event": "curve", "version": version, "sets": sets}


def summary(**changes):
    score = {
        "return_by_episode": [-0.013, 0.653, 0.746],
        "ci95_by_episode": [0.031, 0.032, 0.033],
        "num_trials": 1024,
        "probes_by_episode": [0.0, 0.0, 0.0],
    }
    names = ("train", "heldout", "heldout_blind", "heldout_swapped")
    return {
        "seed": 0,
        "steps": 60,
        "complete": True,
        "wall_s": 96.3,
        "processor_s": 140.2,
        "warm_start_s": 14.7,
        "environment": {"name": "rps", "units": 4},
        "evaluation": dict.fromkeys(names, score),
        "references": {"heldout": {"random": [0.0] * 3, "best_response": [0.95] * 3}},
        "throughput": {"trials_per_s": 288.0, "generated_tokens_per_s": 3456.0},
        "staleness": {"mean": 0.59, "max": 1.0},
        "prefix_cache": {"hit_rate": 0.86, "reuse_rate": 1.0},
        "trials": {"granted": 432, "trained": 144, "dropped": 0, "in_flight": 288},
    } | changes


def state_after(config, events, *, every_s=0.5):
    state, now = RunState(config, 100.0), 100.0
    for process, event in events:
        now += every_s
        state.take(process, event, now)
    return state, now


def drawn(state, now, run, width=80):
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(panel(state, run, now, width))
    return console.export_text()


def plain_lines(config, run, events, *, every_s=0.1):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=80)
    view = make_view(config, run, is_terminal=False, console=console, clock=clock)
    for process, event in events:
        clock.now += every_s
        view.event(process, event)
    return view, out


FULL_RUN = [
    *map(started, ("learner", "actor-0", "actor-1", "actor-2", "actor-3", "evaluator")),
    warm_start(10),
    warm_start(150, gate=0.7),
    POLICY,
    ("actor-0", {"event": "ready", "describe": "96k parameters"}),
    *(step(n, {"learner": {"training": 0.4 * n, "batch not full": 0.1 * n}}) for n in range(1, 31)),
    curve(10, -0.01, 0.31, 0.42),
    ("actor-1", {"event": "beat"}),
    ("supervisor", {"event": "restarting", "text": "actor-2 was killed by SIGKILL; see its log"}),
]


@pytest.mark.parametrize("terminal", [60, 80, 132])
def test_the_panel_fits_its_terminal_with_room_for_an_echo(config, run, terminal):
    lines = drawn(*state_after(config, FULL_RUN), run, panel_width(terminal)).splitlines()
    assert all(len(line.rstrip()) <= terminal - 2 for line in lines)
    assert len(lines) <= 23  # of 24 rows, one is the prompt's


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
        "0.10 invalid",
        "432 granted = 144 trained + 0 dropped + 288 in flight",
        "80% training",
        "20% batch not full",
        "measured version 10",
        "! actor-2 was killed by SIGKILL",
    ):
        assert said in text


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


def test_phases_follow_from_what_processes_say(config):
    script = [
        (started("learner"), "starting"),
        (started("evaluator"), "starting"),
        (warm_start(10), "warm start"),
        (POLICY, "training"),
        (step(60), "training"),
        (("learner", {"event": "done", "reason": "complete"}), "evaluating"),
        (("evaluator", {"event": "evaluating", "version": 60}), "evaluating"),
        (("evaluator", {"event": "done", "reason": "evaluated"}), "done"),
    ]
    state = RunState(config, 0.0)
    for (process, event), phase in script:
        state.take(process, event, 1.0)
        assert state.phase == phase


def test_a_learner_that_starts_again_trains_its_steps_again(config):
    events = [started("learner"), POLICY, *(step(n) for n in range(1, 31))]
    again = [started("learner"), POLICY, step(21, returns=(0.0, 0.0, 0.9))]
    state, _ = state_after(config, [*events, *again])
    assert state.step == 21
    assert len(state.steps) == 21
    assert state.returns(2)[-1] == 0.9


def test_time_left_goes_by_the_pace_of_recent_steps(config):
    state, now = state_after(config, [started("learner"), POLICY, *(step(n) for n in range(1, 31))])
    assert state.seconds_left(now) == pytest.approx(15.0)  # 30 more steps of half a second


def test_shares_are_of_the_last_seconds(config):
    early = ("learner", {"event": "view", **seen({"learner": {"training": 100.0, "idle": 0.0}})})
    late = ("learner", {"event": "view", **seen({"learner": {"training": 101.0, "idle": 3.0}})})
    state, _ = state_after(config, [early, late])
    assert state.shares() == {"learner": {"idle": 0.75, "training": 0.25}}
    state, _ = state_after(config, [early, late, late], every_s=9.0)
    assert state.shares()["learner"]["training"] == pytest.approx(101 / 104)  # nothing was booked


def test_a_process_that_began_anew_is_not_compared_with_its_former_life(config):
    before = ("learner", {"event": "view", **seen({"actor-0": {"engine": 50.0}})})
    after = ("learner", {"event": "view", **seen({"actor-0": {"engine": 1.0, "no grant": 1.0}})})
    state, _ = state_after(config, [before, after])
    assert state.shares() == {"actor-0": {"engine": 0.5, "no grant": 0.5}}


def test_a_fault_that_is_repeated_is_noted_once(config):
    fault = "actor-1: silent for 5 s"
    state, _ = state_after(config, [step(n, faults=[fault]) for n in (1, 2, 3)])
    assert state.notes == [fault]


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


def test_slow_steps_are_each_a_line(config, run):
    _, out = plain_lines(config, run, [POLICY, *(step(n) for n in range(1, 4))], every_s=6.0)
    assert out.getvalue().count(" step=") == 3


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
        "wall 96.3 s (140 s of processors)",
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


def test_sparklines_keep_their_scale_and_width():
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0, 10) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 0.0, 1.0, 10) == "▁▁▁▁▁█████"
    assert sparkline([], 0.0, 1.0, 10) == ""


def test_numbers_are_short():
    assert [short(n) for n in (288.0, 3456.0, 29376.0, 1.5e6)] == ["288", "3,456", "29.4k", "1.5M"]
