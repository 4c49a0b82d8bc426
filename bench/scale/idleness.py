"""Where time goes that neither trains nor plays: the learner's and the actors', by reason.

The learner waits for groups that are being played, because fewer are complete than a batch has, or
because the rule holds complete ones back for others: those granted before them, or those that are
due. A place of an actor is idle because all slots are taken, because its group asks for newer
weights than the actor has, or while messages are on their way.
"""

from collections import Counter
from dataclasses import dataclass, field

from mage_async.admission.ledger import Ledger


@dataclass(slots=True)
class Idleness:
    """Simulated seconds by reason: of the learner, and of places."""

    learner: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)

    def learner_waited(self, seconds: float, ledger: Ledger) -> None:
        """The learner had no batch for so long."""
        is_short = ledger.num_complete() < ledger.groups_per_step
        self.learner["too few complete" if is_short else "held back"] += seconds

    def actors_had(
        self, seconds: float, ledger: Ledger, *, places: int, playing: int, loading: int
    ) -> None:
        """Of so many places so many played, or waited for weights, for so long."""
        idle = places - playing - loading
        self.places["playing"] += playing * seconds
        self.places["newer weights"] += loading * seconds
        self.places["messages" if ledger.may_grant() else "no slot"] += idle * seconds

    def shares(self, seconds: float) -> dict[str, float]:
        """The learner's waiting, of all its time, and what places did, of all theirs."""
        had = max(1e-9, sum(self.places.values()))
        learner = {f"learner: {name}": each / seconds for name, each in self.learner.items()}
        return learner | {f"places: {name}": each / had for name, each in self.places.items()}
