"""What is known of a run from the status lines that processes send."""

import pytest

from mage_services.terminal.run_state import RunState
from tests.helpers.status_events import POLICY, seen, started, state_after, step, warm_start


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


def test_a_final_evaluation_says_how_many_of_its_trials_are_played_and_how_long_it_takes(config):
    state = RunState(config, 0.0)
    assert state.waiting(20.0) == "starting, for 20 s: no process is started yet"
    state.take("evaluator", {"event": "evaluating", "version": 60}, 100.0)
    assert state.seconds_left(130.0) is None
    state.take("evaluator", {"event": "final_trials", "played": 0, "of": 120}, 130.0)
    assert state.seconds_left(130.0) is None
    state.take("evaluator", {"event": "final_trials", "played": 30, "of": 120}, 130.0)
    assert state.waiting(130.0) == (
        "evaluating, for 30 s: evaluator has played 30 of 120 trials of the final sets and their "
        "controls"
    )
    assert state.seconds_left(130.0) == pytest.approx(90.0)


def test_the_time_left_of_a_final_evaluation_is_not_measured_from_late_points_of_the_curve(config):
    state = RunState(config, 0.0)
    state.take("learner", {"event": "done", "reason": "complete"}, 100.0)
    state.take("evaluator", {"event": "evaluating", "version": 60}, 160.0)
    state.take("evaluator", {"event": "final_trials", "played": 10, "of": 100}, 166.0)
    assert state.seconds_left(166.0) == pytest.approx(54.0)
    state.take("evaluator", {"event": "evaluating", "version": 60}, 170.0)  # after a restart
    assert state.seconds_left(180.0) is None


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
