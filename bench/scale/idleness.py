"""Add up the time in which the learner does not train and actors do not play, by reason.

The learner waits because fewer groups are complete than a batch has, or because the admission rule
holds complete groups back for others: those granted earlier, or those that must be trained next. A
*place* is room for one group in an actor. It is idle because the rule grants no more groups,
because its group needs newer weights than the actor has, or while messages are on their way.
"""

from collections import Counter
from dataclasses import dataclass, field

from mage_async.admission.ledger import Ledger


@dataclass(slots=True)
class Idleness:
    """Hold simulated idle seconds by reason: of the learner, and of the actors' places."""

    learner: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)

    def learner_waited(self, seconds: float, ledger: Ledger) -> None:
        """Add seconds in which the learner had no batch."""
        is_short = ledger.num_complete() < ledger.groups_per_step
        self.learner["too few complete" if is_short else "held back"] += seconds

    def actors_had(
        self, seconds: float, ledger: Ledger, *, places: int, playing: int, loading: int
    ) -> None:
        """Add seconds in which `playing` of all places played and `loading` waited for weights."""
        idle = places - playing - loading
        self.places["playing"] += playing * seconds
        self.places["newer weights"] += loading * seconds
        self.places["messages" if ledger.may_grant() else "no slot"] += idle * seconds

    def shares(self, seconds: float) -> dict[str, float]:
        """Return shares of all time: the learner's by reason, and the places' by reason."""
        had = max(1e-9, sum(self.places.values()))
        learner = {f"learner: {name}": each / seconds for name, each in self.learner.items()}
        return learner | {f"places: {name}": each / had for name, each in self.places.items()}
