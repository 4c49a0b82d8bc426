"""The verdict on a run under attack names what fell short, and says LOST only of lost trials."""

from bench.chaos.verdict import FAULTS, shortfalls, verdict

SOUND = dict.fromkeys(FAULTS, 0) | {"heldout_return": 0.7}


def said(**figures: float) -> str:
    kills = int(figures.pop("kills", 20))
    found = shortfalls(SOUND | figures, kills=kills, kills_asked=20, least_return=0.65)
    return verdict(found, num_lost=int(figures.get("lost", 0)))


def test_a_run_of_which_nothing_fell_short_has_lost_nothing() -> None:
    assert said() == "nothing was lost"


def test_a_run_that_was_over_before_its_last_kill_is_not_called_lost() -> None:
    assert said(kills=19) == (
        "NOT PASSED, though nothing was lost: "
        "kills before the run was over: 19 of 20, too few --steps"
    )


def test_a_verdict_names_every_condition_that_fell_short() -> None:
    line = said(lost=3, trained_twice=1, replay_differs=1, heldout_return=0.5)
    assert line == (
        "LOST: trials acknowledged and lost: 3; groups trained twice: 1; "
        "replays that differ from the run: 1; held-out return: 0.500, wanted 0.65"
    )
