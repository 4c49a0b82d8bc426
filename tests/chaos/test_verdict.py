"""The verdict on a run under attack names what fell short, and says LOST only of lost trials."""

from pathlib import Path

from bench.chaos.account import account
from bench.chaos.verdict import FAULTS, shortfalls, verdict
from tests.helpers.recorded_runs import unpack

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


def test_a_run_that_nobody_attacked_is_accounted_for_and_its_journals_segments_are_counted(
    tmp_path: Path,
) -> None:
    run = unpack("finished", tmp_path)
    figures = account(run, acknowledged={(0, 0)}, published={0, 1})
    assert {name: figures[name] for name in FAULTS if figures.get(name)} == {}
    assert figures["taken"] >= 4 * figures["groups_trained"] == 4 * 3 * 4
    assert figures["journal_segments"] == len([*run.journal.glob("*.log")]) == 1
