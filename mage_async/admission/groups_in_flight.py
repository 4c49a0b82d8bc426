"""The groups in flight: their slots, their actors, and what became of those that ended.

`ledger.py` decides about them and `journaled.py` rebuilds them from a journal; what is here is what
both work on, and the questions that others ask of it.
"""

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType

from mage_async.admission.counts import Counts, LedgerCounts
from mage_async.admission.slots import Slot

OVER_AGE = "over age"
"""Why the rule `drop` drops groups: no fault, so it counts in no row of drops."""
MAX_REASONS = 64
"""Drops for further reasons are counted together, under "other reasons"."""


@dataclass(slots=True)
class GroupsInFlight:
    """Slots, and counts of what became of them."""

    groups_per_step: int
    max_staleness: int
    trials_per_group: int
    version: int = 0
    """Steps published so far."""
    next_grant: int = 0
    """Number of the next group. After a restart: above every number used before."""
    lag: int = 0
    """Actors get weights of so many steps ago, and every bound on staleness grows by it."""
    _slots: dict[int, Slot] = field(default_factory=dict, init=False)
    """Groups not in training, by grant, oldest first."""
    _in_training: list[list[int]] = field(default_factory=list, init=False)
    """The grants of each batch taken and not published, oldest first."""
    _first_grant: int = field(default=0, init=False)
    _dropped: Counter[str] = field(default_factory=Counter, init=False)
    _dropped_lately: Counter[str] = field(default_factory=Counter, init=False)
    """By member, what `take_drops` has not returned yet."""
    _events: Counter[str] = field(default_factory=Counter, init=False)
    _drops_in_a_row: int = field(default=0, init=False)
    _last_drop: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._first_grant = self.next_grant

    def num_in_flight(self) -> int:
        """Groups that hold a slot."""
        return len(self._slots) + sum(map(len, self._in_training))

    def grants_in_flight(self) -> set[int]:
        """Grants of the groups that are not in training."""
        return set(self._slots)

    def grants_with_slots(self) -> set[int]:
        """Grants of all groups in flight, those in training among them."""
        return set(self._slots).union(*self._in_training)

    def members_in_play(self) -> set[str]:
        """Opponents of the groups that are granted and not complete."""
        return {slot.task.member for slot in self._slots.values() if not slot.is_complete()}

    def num_in_play(self) -> int:
        """Groups granted and not complete."""
        return sum(not slot.is_complete() for slot in self._slots.values())

    def num_playing(self, peer: str) -> int:
        """Groups this peer plays; compare with its credits before granting it another."""
        return sum(slot.peer == peer for slot in self._slots.values())

    def lapsed(self) -> list[int]:
        """Grants that no actor plays and that are not complete, oldest first: grant these again."""
        return [s.grant for s in self._slots.values() if s.peer is None and not s.is_complete()]

    def owners(self) -> set[str]:
        """Peers that play a group."""
        return {slot.peer for slot in self._slots.values() if slot.peer is not None}

    def playing(self, peer: str) -> tuple[tuple[int, int], ...]:
        """Grant and epoch of what a peer plays."""
        return tuple((slot.grant, slot.epoch) for slot in self._slots.values() if slot.peer == peer)

    def late(self, now: float) -> set[str]:
        """Peers that `expire` will take a group from."""
        return {s.peer for s in self._slots.values() if s.peer is not None and s.deadline <= now}

    def life(self, grant: int, now: float) -> tuple[float, float]:
        """The time since the grant of a group that was completed just now, and the mean number of
        groups in play meanwhile, itself among them.
        """
        slot = self._slots[grant]
        return now - slot.granted, (slot.num_beside + self.num_in_play() + 1) / 2

    def counts(self) -> LedgerCounts:
        """A snapshot; reading it changes nothing."""
        groups = Counts(
            granted=self.next_grant - self._first_grant,
            trained=self._events["trained"],
            dropped=self._dropped.total(),
            in_flight=self.num_in_flight(),
        )
        return LedgerCounts(
            groups=groups,
            trials=groups.times(self.trials_per_group),
            acknowledged=self._events["acknowledged"],
            duplicate=self._events["duplicate"],
            unknown=self._events["unknown"],
            granted_again=self._events["granted_again"],
            dropped_by_reason=MappingProxyType(dict(self._dropped)),
            drops_in_a_row=self._drops_in_a_row,
            last_drop=self._last_drop,
        )

    def take_drops(self) -> dict[str, int]:
        """Groups given up since the last call, by what was hidden in them."""
        drops, self._dropped_lately = self._dropped_lately, Counter()
        return dict(sorted(drops.items()))

    def _end(self, slot: Slot, reason: str) -> None:
        """Free the slot of a group that is given up, and count the drop."""
        known = reason in self._dropped or len(self._dropped) < MAX_REASONS
        self._dropped[reason if known else "other reasons"] += 1
        self._dropped_lately[slot.task.member] += 1
        self._drops_in_a_row += 1
        self._last_drop = reason
        del self._slots[slot.grant]
