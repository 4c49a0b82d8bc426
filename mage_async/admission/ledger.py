"""The ledger: how many groups are in flight, and which of them a step trains on.

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
end in the same ways (`overtake` keeps the bound without the order, with a proof there), and
`concurrency` may admit fewer to be played at once than the rule does.

Every transition that the bound rests on is in this file. `groups_in_flight.py` has the state and
what others ask of it, `journaled.py` its way into the journal and back.

A result counts once by (grant, trial index), whichever epoch of the grant it comes from. Time is an
argument, in seconds of any clock that does not go back.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mage_async.admission.groups_in_flight import OVER_AGE
from mage_async.admission.in_play import GroupsInPlay
from mage_async.admission.journaled import JournaledGroups
from mage_async.admission.rules import SLOTS, Flow, Place, Rule
from mage_async.admission.slots import Slot
from mage_async.protocol.messages import GroupGrant, TrialResult
from mage_async.tasks.seats import num_seats
from mage_async.trajectory import Group, Guidance, Task, Trial


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first result for this trial: journal it, then acknowledge it."""

    is_complete: bool
    """Whether its group has all of its trials now."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Known already, or its group has ended: acknowledge it, so that the peer forgets it."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No trial that was granted: a fault of the peer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Places:
    """The places of slots in order of grant, made one by one: most questions look at few."""

    slots: Mapping[int, Slot]
    in_play: GroupsInPlay

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Place]:
        for grant, slot in self.slots.items():
            yield Place(grant, slot.version, grant not in self.in_play)


@dataclass(slots=True)
class SlotLedger(JournaledGroups):
    """Decides what may be granted and what is trained.

    It never waits: where nothing can be decided, its owner calls again after the next message or
    tick of its clock. Misuse that only a bug of the owner can cause is an assertion.
    """

    max_expiries: int = 5
    """A group that missed its deadline so often is dropped: it would hold up every later one."""
    rule: Rule = SLOTS
    concurrency: int | None = None
    """At most so many groups in play, lapsed ones among them; None: as many as the rule admits."""

    def may_grant(self) -> bool:
        """Whether a slot is free for a new group; those of `lapsed` go first, and hold theirs."""
        if self.concurrency is not None and self.num_in_play() >= self.concurrency:
            return False
        return self.rule.may_grant(self._flow())

    def grant(
        self,
        task: Task,
        *,
        num_episodes: int,
        peer: str,
        now: float,
        deadline_s: float,
        max_turns: int = 0,
        guidance: Guidance | None = None,
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
            guidance=guidance,
        )
        self._add(slot)
        self.next_grant += 1
        return slot.message(deadline_s, self.lag)

    def grant_again(self, grant: int, *, peer: str, now: float, deadline_s: float) -> GroupGrant:
        """Give a group of `lapsed` to another peer: same task and seed, next epoch."""
        slot = self._slots[grant]
        assert slot.peer is None, f"group {grant} is being played"
        assert not slot.is_complete(), f"group {grant} is complete"
        self._give(slot, peer)
        slot.deadline, slot.epoch = now + deadline_s, slot.epoch + 1
        slot.granted, slot.num_beside = now, self.num_in_play()
        self._events["granted_again"] += 1
        return slot.message(deadline_s, self.lag)

    def receive(self, result: TrialResult) -> Accepted | Duplicate | Unknown:
        """Take a trial in, or both seats of one; acknowledge it when the journal holds it."""
        slot = self._slots.get(result.grant)
        reason = self._why_unknown(result, slot)
        if reason:
            self._events["unknown"] += 1
            return Unknown(reason)
        if slot is None or slot.trials[result.trial.index] is not None:
            self._events["duplicate"] += 1
            return Duplicate()
        for trial in result.trials():
            slot.trials[trial.index] = trial
            self._events["acknowledged"] += 1
        if is_complete := slot.is_complete():
            slot.peer = None
            self._in_play.end(slot.grant)
        return Accepted(is_complete)

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
        """Take groups from peers that missed their deadline; they are to be granted again.

        A group at its `max_expiries`-th missed deadline is dropped instead: those are returned.
        """
        late = self._late(now)
        for slot in late:
            self._give(slot, None)
            slot.num_expired += 1
            if slot.num_expired >= self.max_expiries:
                self._end(slot, self.expiry_reason())
        return [slot.grant for slot in late if slot.grant not in self._slots]

    def expiry_reason(self) -> str:
        """Why `expire` drops a group."""
        return f"missed its deadline {self.max_expiries} times"

    def peer_gone(self, peer: str) -> list[int]:
        """Take its groups from a peer that ended; returns those to be granted again."""
        left = self._in_play.of(peer)
        for grant in left:
            self._give(self._slots[grant], None)
        return left

    def take_batch(self) -> list[Group] | None:
        """The groups of the next step in order of grant, once the rule finds them all complete.

        They hold their slots until `trained`; meanwhile a further batch may be taken.
        """
        is_short = self.num_complete() < self.groups_per_step
        grants = [] if is_short else self.rule.take(self._flow())
        if not grants:
            return None
        self._in_training.append(grants)
        return [self._slots.pop(grant).group() for grant in grants]

    def trained(self, version: int) -> list[int]:
        """The step on the oldest taken batch is done and published as `version`: free its slots,
        and drop what the rule finds over age, which is returned, oldest first.
        """
        assert self._in_training, "no batch is in training"
        assert version == self.version + 1, f"after version {self.version} came {version}"
        self._events["trained"] += len(self._in_training.pop(0))
        self._drops_in_a_row, self._last_drop = 0, ""
        self.version = version
        dropped = self.rule.over_age(self._flow())
        for grant in dropped:
            self._dropped[OVER_AGE] += 1
            self._remove(grant)
        return dropped

    def postpone(self, seconds: float, latest: float) -> None:
        """Move deadlines back, none past `latest`: no peer was heard in the meantime."""
        for slot in self._slots.values():
            slot.deadline = min(slot.deadline + seconds, max(slot.deadline, latest))

    def grants_of(self, peer: str, *, now: float, deadline_s: float) -> list[GroupGrant]:
        """What a peer plays, as it was told or should have been; deadlines begin anew.

        After a restart of the learner either side may know of a grant that the other does not.
        """
        mine = [self._slots[grant] for grant in self._in_play.of(peer)]
        for slot in mine:
            slot.deadline = now + deadline_s
        return [slot.message(deadline_s, self.lag) for slot in mine]

    def drop_all(self, reason: str) -> None:
        """Give up every group that is not in training; no member is to blame."""
        for slot in list(self._slots.values()):
            self._end(slot, reason)
        self._drops_in_a_row, self._last_drop = 0, ""
        self._dropped_lately.clear()

    def _flow(self) -> Flow:
        return Flow(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            version=self.version,
            places=Places(self._slots, self._in_play),
            num_training=len(self._in_training),
        )

    def _why_unknown(self, result: TrialResult, slot: Slot | None) -> str:
        if not self._first_grant <= result.grant < self.next_grant:
            return f"group {result.grant} was never granted by this learner"
        count = self.trials_per_group if slot is None else len(slot.trials)
        seats = num_seats(result.trial.task.member)
        if len(result.trials()) != seats or result.trial.index % seats:
            got = f"{len(result.trials())} from number {result.trial.index}"
            return f"group {result.grant} is played {seats} trials at a time, got {got}"
        if not 0 <= result.trial.index <= count - seats:
            return f"a group has {count} trials, got number {result.trial.index}"
        if slot is None:
            return ""
        if result.epoch > slot.epoch:
            return f"group {slot.grant} is at epoch {slot.epoch}, got {result.epoch}"
        return next(filter(None, (_why_foreign(trial, slot) for trial in result.trials())), "")


def _why_foreign(trial: Trial, slot: Slot) -> str:
    """Why a trial is none of a group's; empty where it is."""
    if (trial.task, trial.num_episodes) != (slot.task_of(trial.index), slot.num_episodes):
        return f"group {slot.grant} is another task than the trial's"
    if trial.memory != slot.memory_of(trial.index):
        return f"group {slot.grant} was granted with another memory than the trial's"
    return ""
