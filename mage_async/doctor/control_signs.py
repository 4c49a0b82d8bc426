"""Signatures of an evaluation: a control that takes nothing away, and trials that were cut short.

A gain counts where it is above the 95 % interval of the difference.
"""

import math
from collections.abc import Iterable

from mage_async.doctor.finding import Case, Record, Sighting

CUT_SHORT = 0.02
"""Share of a set's trials that outgrew the engine's context, or had a call that failed."""


def memory_unused(case: Case, evaluation: Record) -> Iterable[Sighting]:
    """The last episode earns the same without the earlier ones in its context."""
    if case.config.trial.memory != "none":
        yield from _takes_nothing(evaluation, "blind", "without the earlier episodes")


def swap_harmless(case: Case, evaluation: Record) -> Iterable[Sighting]:
    """The last episode earns the same where another member is hidden in it."""
    yield from _takes_nothing(evaluation, "swapped", "with another member hidden in it")


def cut_short(case: Case, evaluation: Record) -> Iterable[Sighting]:
    """Evaluated trials end before their last episode."""
    shares = {name: score.get("cut_short", 0.0) for name, score in evaluation["sets"].items()}
    name = max(shares, key=lambda each: shares[each], default="")
    if shares and shares[name] > CUT_SHORT:
        share = f"{shares[name]:.0%} of the trials of {name}"
        text = f"{share} outgrew the engine's context, or had a call that failed"
        yield Sighting(evaluation["version"], text)


def _takes_nothing(evaluation: Record, control: str, how: str) -> Iterable[Sighting]:
    sets = evaluation["sets"]
    full, other = sets.get("heldout"), sets.get(f"heldout_{control}")
    if full is None or other is None or len(full["return_by_episode"]) < 2:
        return
    gain = full["return_by_episode"][-1] - other["return_by_episode"][-1]
    noise = math.hypot(full["ci95_by_episode"][-1], other["ci95_by_episode"][-1])
    if gain <= noise:
        yield Sighting(
            evaluation["version"],
            f"held-out, the last episode earns {full['return_by_episode'][-1]:+.2f}, and {how} "
            f"{other['return_by_episode'][-1]:+.2f} (± {noise:.2f})",
        )
