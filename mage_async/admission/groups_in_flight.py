"""The groups in flight: their slots, their actors, and what became of those that ended.

`ledger.py` decides about them and `journaled.py` rebuilds them from a journal; what is here is what
both work on, and the questions that others ask of it.
"""

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType

from mage_async.admission.counts import Counts, LedgerCounts
from mage_async.admission.in_play import GroupsInPlay
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
    _in_play: GroupsInPlay = field(default_factory=GroupsInPlay, init=False)
    """Of the slots, those that are not complete."""
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
        return {self._slots[grant].task.member for grant in self._in_play}

    def num_in_play(self) -> int:
        """Groups granted and not complete."""
        return len(self._in_play)

    def num_complete(self) -> int:
        """Groups complete and not in training."""
        return len(self._slots) - len(self._in_play)

    def num_playing(self, peer: str) -> int:
        """Groups this peer plays."""
        return self._in_play.num_of(peer)

    def num_places(self) -> int:
        """Groups that all peers together may be granted at a time."""
        return self._in_play.num_places()

    def set_credits(self, peer: str, credits: int) -> None:
        """A peer may be granted so many groups at a time; 0: none."""
        self._in_play.set_credits(peer, credits)

    def freest(self) -> str | None:
        """The peer with credits that can take on the most groups more, if any can."""
        return self._in_play.freest()

    def lapsed(self) -> list[int]:
        """Grants that no actor plays and that are not complete, oldest first: grant these again."""
        return self._in_play.of(None)

    def owners(self) -> set[str]:
        """Peers that play a group."""
        return self._in_play.peers()

    def playing(self, peer: str) -> tuple[tuple[int, int], ...]:
        """Grant and epoch of what a peer plays."""
        return tuple((grant, self._slots[grant].epoch) for grant in self._in_play.of(peer))

    def late(self, now: float) -> set[str]:
        """Peers that `expire` will take a group from."""
        return {slot.peer for slot in self._late(now) if slot.peer is not None}

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

    def _late(self, now: float) -> list[Slot]:
        """Groups that a peer plays beyond their deadline, oldest first."""
        slots = (self._slots[grant] for grant in self._in_play)
        late = [slot for slot in slots if slot.peer is not None and slot.deadline <= now]
        return sorted(late, key=lambda slot: slot.grant)

    def _add(self, slot: Slot) -> None:
        """A group takes a slot; none of its trials is here."""
        self._slots[slot.grant] = slot
        self._in_play.give(slot.grant, slot.peer)

    def _give(self, slot: Slot, peer: str | None) -> None:
        """A group in play passes to another peer, or to none."""
        slot.peer = peer
        self._in_play.give(slot.grant, peer)

    def _remove(self, grant: int) -> Slot | None:
        """Take a group out of its slot, if it has one."""
        self._in_play.end(grant)
        return self._slots.pop(grant, None)

    def _end(self, slot: Slot, reason: str) -> None:
        """Free the slot of a group that is given up, and count the drop."""
        known = reason in self._dropped or len(self._dropped) < MAX_REASONS
        self._dropped[reason if known else "other reasons"] += 1
        self._dropped_lately[slot.task.member] += 1
        self._drops_in_a_row += 1
        self._last_drop = reason
        self._remove(slot.grant)
