"""The verdict on a run under attack, which names every condition that fell short."""

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
"""What a figure counts; each of these figures has to be 0 where the run has it."""


def shortfalls(
    figures: Mapping[str, float], *, kills: int, kills_asked: int, least_return: float | None
) -> list[str]:
    """A phrase for each condition that is not met; none where all is as it has to be.

    Args:
        figures: those of `account`, and `heldout_return`.
        least_return: what the held-out return has to reach; None where nothing is asked of it.
    """
    found = [f"{counted}: {figures[name]}" for name, counted in FAULTS.items() if figures.get(name)]
    if least_return is not None and figures["heldout_return"] < least_return:
        found.append(f"held-out return: {figures['heldout_return']:.3f}, wanted {least_return:g}")
    if kills < kills_asked:
        found.append(f"kills before the run was over: {kills} of {kills_asked}, too few --steps")
    return found


def verdict(found: list[str], *, num_lost: int) -> str:
    """One line; "LOST" stands only where acknowledged trials are lost."""
    if not found:
        return "nothing was lost"
    begin = "LOST" if num_lost else "NOT PASSED, though nothing was lost"
    return f"{begin}: {'; '.join(found)}"
