"""What became of groups and trials, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of groups, or of trials. Always, `granted = trained + dropped + in_flight`."""

    granted: int
    trained: int
    dropped: int
    in_flight: int

    def times(self, number: int) -> "Counts":
        """Counts of trials, for groups of `number` trials each."""
        return Counts(
            granted=self.granted * number,
            trained=self.trained * number,
            dropped=self.dropped * number,
            in_flight=self.in_flight * number,
        )


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """A snapshot. A group granted again counts once; all trials of a dropped group are dropped."""

    groups: Counts
    trials: Counts
    acknowledged: int
    """Trials received for the first time, those of groups dropped later among them."""
    duplicate: int
    unknown: int
    granted_again: int
    """Grants after the first, of any group."""
    dropped_by_reason: Mapping[str, int]
    """Groups."""
    drops_in_a_row: int
    """Groups dropped since the last step was published."""
    last_drop: str
    """Why the last of those was, as the journal says after a restart too; "" where there is none.
    """
