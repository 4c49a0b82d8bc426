"""The ledger's way into the journal's records, and back out of them after a restart."""

from collections import Counter
from dataclasses import dataclass

from mage_async.admission.groups_in_flight import OVER_AGE, GroupsInFlight
from mage_async.admission.slots import Slot
from mage_async.protocol.journal_records import Commit, Granted, Head
from mage_async.protocol.messages import GroupGrant
from mage_async.trajectory import Group


@dataclass(slots=True)
class JournaledGroups(GroupsInFlight):
    """Groups in flight as records tell of them; `recovery.py` reads the records in order."""

    def head(self, config: str, deadline_s: float) -> Head:
        """All but the trials, for the journal. No batch is in training."""
        assert not self._in_training, "a batch is in training"
        return Head(
            config=config,
            version=self.version,
            first_grant=self._first_grant,
            next_grant=self.next_grant,
            groups=tuple(
                Granted(
                    peer=slot.peer,
                    version=slot.version,
                    grant=slot.message(deadline_s, self.lag),
                )
                for slot in self._slots.values()
            ),
            trained=self._events["trained"],
            acknowledged=self._events["acknowledged"],
            granted_again=self._events["granted_again"],
            dropped=dict(self._dropped),
        )

    def granted(self, grant: GroupGrant) -> Granted:
        """What the journal says of a grant just made."""
        slot = self._slots[grant.grant]
        return Granted(peer=slot.peer, version=slot.version, grant=grant)

    def begin(self, head: Head) -> None:
        """Take over what a head of the journal says; this ledger is new."""
        self.version, self.next_grant = head.version, head.next_grant
        self._first_grant = head.first_grant
        self._dropped.update(head.dropped)
        self._events.update(
            trained=head.trained,
            acknowledged=head.acknowledged,
            granted_again=head.granted_again,
        )
        for granted in head.groups:
            self._add(Slot.redone(granted))

    def keep_only(self, head: Head) -> None:
        """A later head of the journal: what it does not name was dropped before it was written."""
        for grant in self._slots.keys() - {granted.grant.grant for granted in head.groups}:
            self._remove(grant)
        self._dropped = Counter(head.dropped)

    def redo_grant(self, granted: Granted) -> None:
        """Redo what the journal says of a grant, the first or a later one."""
        slot = self._slots.get(granted.grant.grant)
        if slot is None:
            self._add(Slot.redone(granted))
            self.next_grant = max(self.next_grant, granted.grant.grant + 1)
        else:
            self._give(slot, granted.peer)
            slot.epoch = granted.grant.epoch
            self._events["granted_again"] += 1

    def redo_drop(self, grant: int, reason: str) -> None:
        """Redo a drop."""
        if grant in self._slots and reason == OVER_AGE:
            self._dropped[OVER_AGE] += 1
            self._remove(grant)
        elif grant in self._slots:
            self._end(self._slots[grant], reason)

    def redo_commit(self, commit: Commit) -> list[Group] | None:
        """Redo a step; returns its groups, or None where a trial of them is not there."""
        slots = [self._remove(grant) for grant in commit.grants]
        self._events["trained"] += len(slots)
        self._drops_in_a_row, self._last_drop = 0, ""
        self._dropped_lately.clear()  # the step's line has said them
        self.version = commit.version
        known = [slot for slot in slots if slot is not None and slot.is_complete()]
        return [slot.group() for slot in known] if len(known) == len(slots) else None

    def resume(self, now: float) -> None:
        """All records are redone: lives of groups are counted from now on."""
        for slot in self._slots.values():
            slot.granted, slot.num_beside = now, max(1, self.num_in_play())
