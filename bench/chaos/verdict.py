"""Judge a run whose processes were killed: which conditions did it miss?"""

from collections.abc import Mapping

FAULTS = {
    "lost": "trials acknowledged and lost",
    "trained_twice": "groups trained twice",
    "taken_twice": "trials twice in the journal",
    "over_bound": "groups staler than the bound",
    "books_differ": "trials by which the run's own counts differ from the journal",
    "steps_missing": "steps missing in the metrics or in the journal",
    "trained_without_trials": "trained trials that the journal does not hold",
    "told_of_no_commit": "versions published without a commit",
    "replay_differs": "replays that differ from the run",
    "versions_differ": "versions whose weights differ from the undisturbed run's",
}
"""Figures that must be 0, and what each counts. A run need not have all of them."""


def shortfalls(
    figures: Mapping[str, float], *, kills: int, kills_asked: int, least_return: float | None
) -> list[str]:
    """Return a phrase for each condition that the run missed.

    Args:
        figures: Figures that `bench.chaos.account` counted, and `heldout_return`.
        kills: Number of kills before the run ended.
        kills_asked: Number of kills on the command line.
        least_return: Least held-out return; None for any.
    """
    found = [f"{counted}: {figures[name]}" for name, counted in FAULTS.items() if figures.get(name)]
    if least_return is not None and figures["heldout_return"] < least_return:
        found.append(f"held-out return: {figures['heldout_return']:.3f}, wanted {least_return:g}")
    if kills < kills_asked:
        found.append(f"kills before the run was over: {kills} of {kills_asked}, too few --steps")
    return found


def verdict(found: list[str], *, num_lost: int) -> str:
    """Return the verdict as one line. Only a run that lost acknowledged trials is "LOST".

    Args:
        found: Phrases of `shortfalls`.
    """
    if not found:
        return "nothing was lost"
    begin = "LOST" if num_lost else "NOT PASSED, though nothing was lost"
    return f"{begin}: {'; '.join(found)}"
