"""How many groups are in flight, who plays them, and which of them a step trains on.

Every group needs a slot, from its grant until a step on it is published or it is dropped. There are
`(max_staleness + 1) * groups_per_step` slots, and groups are trained in order of grant: a batch is
the oldest `groups_per_step` groups, once all of them are complete. Hence

    no group trains more than `max_staleness` steps after the version it was granted at.

Proof. Write S for max_staleness, B for groups_per_step. Let a group be granted at version v: v
steps are published, so the batches of steps v + 1 and later hold their slots still, or have not
been taken. Every group trained between step v and this group was granted before it (order of grant)
and holds its slot now (its step is not published). At most (S + 1) * B - 1 others hold slots, and
they fill at most S batches; a dropped group only moves the later ones forward. So this group is in
the batch of step v + S + 1 at the latest, which trains version v + S. The bound is hard for every
token, if actors play a grant with weights at least as new as its `version`.

    a group is     from                  until
    playing        grant, grant_again    its last trial, its deadline, the end of its peer
    lapsed         expire, peer_gone     grant_again, or late results that complete it
    complete       its last trial        take_batch
    in training    take_batch            trained
    (ended)        trained, drop

That is the rule `slots`; `mage_async/admission/rules.py` has others, whose groups are in flight and
end in the same ways, and `concurrency` may admit fewer to be played at once than the rule does.

This file is longer than most: the bound, its proof and every transition it rests on stand together;
what one group in flight holds is in `slots.py`.

A result counts once by (grant, trial index), whichever epoch of the grant it comes from. Time is an
argument, in seconds of any clock that does not go back.
"""

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType

from mage_async.admission.counts import Counts, LedgerCounts
from mage_async.admission.rules import SLOTS, Flow, Place, Rule
from mage_async.admission.slots import Slot
from mage_async.protocol.journal_records import Commit, Granted, Head
from mage_async.protocol.messages import GroupGrant, TrialResult
from mage_async.trajectory import Group, Task

OVER_AGE = "over age"
"""Why the rule `drop` drops groups: no fault of anybody's, so it counts in no row of drops."""
MAX_REASONS = 64
"""Drops for further reasons are counted together, under "other reasons"."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first result for this trial: journal it, then acknowledge it."""

    is_complete: bool
    """It was its group's last."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Known already, or its group has ended: acknowledge it, so that the peer forgets it."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No trial that was granted: a fault of the peer."""

    reason: str


@dataclass(slots=True)
class SlotLedger:
    """Decides what may be granted and what is trained.

    It never waits: where nothing can be decided, its owner calls again after the next message or at
    `next_deadline`. Misuse that only a bug of the owner can cause is an assertion.
    """

    groups_per_step: int
    max_staleness: int
    trials_per_group: int
    max_expiries: int = 5
    """A group that missed its deadline so often is dropped: it would hold up every later one."""
    version: int = 0
    """Steps published so far."""
    next_grant: int = 0
    """Number of the next group. After a restart: above every number used before."""
    rule: Rule = SLOTS
    lag: int = 0
    """Actors get weights of so many steps ago, and every bound on staleness grows by it."""
    concurrency: int | None = None
    """At most so many groups in play, lapsed ones among them; None: as many as the rule admits."""
    _slots: dict[int, Slot] = field(default_factory=dict, init=False)
    """Groups not in training, by grant, oldest first."""
    _in_training: list[list[int]] = field(default_factory=list, init=False)
    """The grants of each batch taken and not published, oldest first."""
    _first_grant: int = field(default=0, init=False)
    _dropped: Counter[str] = field(default_factory=Counter, init=False)
    _events: Counter[str] = field(default_factory=Counter, init=False)
    _drops_in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._first_grant = self.next_grant

    def num_slots(self) -> int:
        """How many groups may be in flight."""
        return (self.max_staleness + 1) * self.groups_per_step

    def num_in_flight(self) -> int:
        """Groups that hold a slot."""
        return len(self._slots) + sum(map(len, self._in_training))

    def may_grant(self) -> bool:
        """Whether a slot is free for a new group; those of `lapsed` go first, and hold theirs."""
        if self.concurrency is not None and self.num_in_play() >= self.concurrency:
            return False
        return self.rule.may_grant(self._flow())

    def grants_in_flight(self) -> set[int]:
        """Of groups that are not in training."""
        return set(self._slots)

    def grants_with_slots(self) -> set[int]:
        """Of all groups in flight, those in training among them."""
        return set(self._slots).union(*self._in_training)

    def members_in_play(self) -> set[str]:
        """Of groups granted and not complete: whom somebody plays against, or will again."""
        return {slot.task.member for slot in self._slots.values() if not slot.is_complete()}

    def life(self, grant: int, now: float) -> tuple[float, float]:
        """Of a group that was completed just now: the time since its grant, and the mean number of
        groups in play meanwhile, itself among them.
        """
        slot = self._slots[grant]
        return now - slot.granted, (slot.num_beside + self.num_in_play() + 1) / 2

    def num_in_play(self) -> int:
        """Groups granted and not complete."""
        return sum(not slot.is_complete() for slot in self._slots.values())

    def num_playing(self, peer: str) -> int:
        """Groups this peer plays; compare with its credits before granting it another."""
        return sum(slot.peer == peer for slot in self._slots.values())

    def lapsed(self) -> list[int]:
        """Grants that nobody plays and that are not complete, oldest first: grant these again."""
        return [s.grant for s in self._slots.values() if s.peer is None and not s.is_complete()]

    def grant(
        self,
        task: Task,
        *,
        num_episodes: int,
        peer: str,
        now: float,
        deadline_s: float,
        max_turns: int = 0,
    ) -> GroupGrant:
        """Give a free slot to a new group. Only after `may_grant`."""
        assert self.may_grant(), "no slot is free"
        slot = Slot(
            grant=self.next_grant,
            task=task,
            num_episodes=num_episodes,
            version=self.version,
            epoch=0,
            peer=peer,
            deadline=now + deadline_s,
            trials=[None] * self.trials_per_group,
            granted=now,
            num_beside=self.num_in_play() + 1,
            max_turns=max_turns,
        )
        self._slots[slot.grant] = slot
        self.next_grant += 1
        return slot.message(deadline_s, self.lag)

    def grant_again(self, grant: int, *, peer: str, now: float, deadline_s: float) -> GroupGrant:
        """Give a group of `lapsed` to another peer: same task and seed, next epoch."""
        slot = self._slots[grant]
        assert slot.peer is None, f"group {grant} is being played"
        assert not slot.is_complete(), f"group {grant} is complete"
        slot.peer, slot.deadline, slot.epoch = peer, now + deadline_s, slot.epoch + 1
        slot.granted, slot.num_beside = now, self.num_in_play()
        self._events["granted_again"] += 1
        return slot.message(deadline_s, self.lag)

    def receive(self, result: TrialResult) -> Accepted | Duplicate | Unknown:
        """Take a trial in; acknowledge it when the journal holds it durably."""
        slot = self._slots.get(result.grant)
        reason = self._why_unknown(result, slot)
        if reason:
            self._events["unknown"] += 1
            return Unknown(reason)
        if slot is None or slot.trials[result.trial.index] is not None:
            self._events["duplicate"] += 1
            return Duplicate()
        slot.trials[result.trial.index] = result.trial
        self._events["acknowledged"] += 1
        if slot.is_complete():
            slot.peer = None
        return Accepted(slot.is_complete())

    def drop(self, grant: int, epoch: int, reason: str) -> bool:
        """Give a group up and free its slot; its trials count as dropped, acknowledged or not.

        False, and nothing changes, where the group is complete, has ended, or was granted again
        since.
        """
        slot = self._slots.get(grant)
        if slot is None or slot.epoch != epoch or slot.is_complete():
            return False
        self._end(slot, reason)
        return True

    def expire(self, now: float) -> list[int]:
        """Take groups from peers that missed their deadline; returns those to be granted again.

        A group at its `max_expiries`-th missed deadline is dropped instead.
        """
        late = [s for s in self._slots.values() if s.peer is not None and s.deadline <= now]
        for slot in late:
            slot.peer = None
            slot.num_expired += 1
            if slot.num_expired >= self.max_expiries:
                self._end(slot, self.expiry_reason())
        return [slot.grant for slot in late if slot.grant in self._slots]

    def expiry_reason(self) -> str:
        """Why `expire` drops a group."""
        return f"missed its deadline {self.max_expiries} times"

    def peer_gone(self, peer: str) -> list[int]:
        """Take its groups from a peer that ended; returns those to be granted again."""
        left = [slot for slot in self._slots.values() if slot.peer == peer]
        for slot in left:
            slot.peer = None
        return [slot.grant for slot in left]

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next; None while nothing is played."""
        return min((s.deadline for s in self._slots.values() if s.peer is not None), default=None)

    def take_batch(self) -> list[Group] | None:
        """The groups of the next step in order of grant, once the rule finds them all complete.

        They hold their slots until `trained`; meanwhile a further batch may be taken.
        """
        grants = self.rule.take(self._flow())
        if not grants:
            return None
        self._in_training.append(grants)
        return [self._slots.pop(grant).group() for grant in grants]

    def trained(self, version: int) -> None:
        """The step on the oldest taken batch is done and published as `version`: free its slots,
        and drop what the rule finds over age.
        """
        assert self._in_training, "no batch is in training"
        assert version == self.version + 1, f"after version {self.version} came {version}"
        self._events["trained"] += len(self._in_training.pop(0))
        self._drops_in_a_row = 0
        self.version = version
        for grant in self.rule.over_age(self._flow()):
            self._dropped[OVER_AGE] += 1
            del self._slots[grant]

    def owners(self) -> set[str]:
        """Peers that play a group."""
        return {slot.peer for slot in self._slots.values() if slot.peer is not None}

    def playing(self, peer: str) -> tuple[tuple[int, int], ...]:
        """Grant and epoch of what a peer plays."""
        return tuple((slot.grant, slot.epoch) for slot in self._slots.values() if slot.peer == peer)

    def late(self, now: float) -> set[str]:
        """Peers that `expire` will take a group from."""
        return {s.peer for s in self._slots.values() if s.peer is not None and s.deadline <= now}

    def postpone(self, seconds: float, latest: float) -> None:
        """Deadlines come so much later, though none after `latest`: nobody could be heard."""
        for slot in self._slots.values():
            slot.deadline = min(slot.deadline + seconds, max(slot.deadline, latest))

    def grants_of(self, peer: str, *, now: float, deadline_s: float) -> list[GroupGrant]:
        """What a peer plays, as it was told or should have been; deadlines begin anew.

        After a restart of the learner either side may know of a grant that the other does not.
        """
        mine = [slot for slot in self._slots.values() if slot.peer == peer]
        for slot in mine:
            slot.deadline = now + deadline_s
        return [slot.message(deadline_s, self.lag) for slot in mine]

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
            self._slots[granted.grant.grant] = Slot.redone(granted)

    def keep_only(self, head: Head) -> None:
        """A later head of the journal: what it does not name was dropped before it was written."""
        for grant in self._slots.keys() - {granted.grant.grant for granted in head.groups}:
            del self._slots[grant]
        self._dropped = Counter(head.dropped)

    def redo_grant(self, granted: Granted) -> None:
        """Redo what the journal says of a grant, the first or a later one."""
        slot = self._slots.get(granted.grant.grant)
        if slot is None:
            self._slots[granted.grant.grant] = Slot.redone(granted)
            self.next_grant = max(self.next_grant, granted.grant.grant + 1)
        else:
            slot.peer, slot.epoch = granted.peer, granted.grant.epoch
            self._events["granted_again"] += 1

    def redo_drop(self, grant: int, reason: str) -> None:
        """Redo a drop."""
        if grant in self._slots and reason == OVER_AGE:
            self._dropped[OVER_AGE] += 1
            del self._slots[grant]
        elif grant in self._slots:
            self._end(self._slots[grant], reason)

    def redo_commit(self, commit: Commit) -> list[Group] | None:
        """Redo a step; returns its groups, or None where a trial of them is not there."""
        slots = [self._slots.pop(grant, None) for grant in commit.grants]
        self._events["trained"] += len(slots)
        self._drops_in_a_row = 0
        self.version = commit.version
        known = [slot for slot in slots if slot is not None and slot.is_complete()]
        return [slot.group() for slot in known] if len(known) == len(slots) else None

    def resume(self, now: float) -> None:
        """All records are redone: lives of groups are counted from now on."""
        for slot in self._slots.values():
            slot.granted, slot.num_beside = now, max(1, self.num_in_play())

    def granted(self, grant: GroupGrant) -> Granted:
        """What the journal says of a grant just made."""
        slot = self._slots[grant.grant]
        return Granted(peer=slot.peer, version=slot.version, grant=grant)

    def drop_all(self, reason: str) -> None:
        """Give up every group that is not in training."""
        for slot in list(self._slots.values()):
            self._end(slot, reason)
        self._drops_in_a_row = 0

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
        )

    def _flow(self) -> Flow:
        places = [Place(s.grant, s.version, s.is_complete()) for s in self._slots.values()]
        return Flow(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            version=self.version,
            places=places,
            num_training=len(self._in_training),
        )

    def _why_unknown(self, result: TrialResult, slot: Slot | None) -> str:
        if not self._first_grant <= result.grant < self.next_grant:
            return f"group {result.grant} was never granted by this learner"
        count = self.trials_per_group if slot is None else len(slot.trials)
        if not 0 <= result.trial.index < count:
            return f"a group has {count} trials, got number {result.trial.index}"
        if slot is None:
            return ""
        if result.epoch > slot.epoch:
            return f"group {slot.grant} is at epoch {slot.epoch}, got {result.epoch}"
        if (result.trial.task, result.trial.num_episodes) != (slot.task, slot.num_episodes):
            return f"group {slot.grant} is another task than the trial's"
        return ""

    def _end(self, slot: Slot, reason: str) -> None:
        known = reason in self._dropped or len(self._dropped) < MAX_REASONS
        self._dropped[reason if known else "other reasons"] += 1
        self._drops_in_a_row += 1
        del self._slots[slot.grant]
