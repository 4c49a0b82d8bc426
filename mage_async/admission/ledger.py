"""Keep the ledger: which groups are in flight, which actor plays each, and which ones a step
trains.

`Ledger` decides at once and never waits: if it cannot decide, its owner calls it again after the
next message or tick of the clock. It reads no clock; every time is an argument, in seconds of any
clock that never goes back. Its decisions are recorded in the journal, and `replay.py` replays the
records into a new ledger after a restart.

A *peer* here is an actor, by one connection: a restarted actor is a new peer. A group *holds a
slot* while it is in flight; most policies limit the number of slots.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from types import MappingProxyType

import msgspec

from mage_async.admission.policies import SLOTS, AdmissionPolicy, AdmissionState
from mage_async.protocol.journal_records import Commit, Dropped, Granted, SegmentHeader
from mage_async.protocol.messages import EpisodeResult, GroupGrant, TrialResult
from mage_async.tasks.task_stream import num_seats, own_task
from mage_async.trajectory import Group, Guidance, Task, Trial

# The states of a group, and the calls that move it from one state to another:
#
#     state         begins with             ends with
#     playing       grant, grant_again      its last trial; expire; peer_gone; a drop
#     lapsed        expire, peer_gone       grant_again; its last trial, arriving late; a drop
#     complete      its last trial          take_batch; a drop
#     in training   take_batch              trained
#     ended         trained, a drop         -
#
# Playing and lapsed groups are incomplete: some of their trials have not arrived. A group is
# pending until it is in training, and in flight in every state but `ended`. The calls that drop:
#
#     drop            an incomplete group
#     expire          a playing group that misses its last deadline (`max_expiries`)
#     drop_if_no_variance
#                     a complete group whose trials all earned the same (dynamic sampling)
#     trained         under the policy `drop`: pending groups that are too old by then
#     drop_all        all pending groups
#
# The policy `slots` (`policies.py`) grants a group only while fewer than
# (max_staleness + 1) * groups_per_step groups are in flight, and trains groups in order of grant: a
# batch is the oldest groups_per_step groups, once all of them are complete. Hence
#
#     no group is trained more than max_staleness steps after the version it was granted at.
#
# Proof. Write S for max_staleness and B for groups_per_step, and let a group be granted at version
# v: v steps are published. Groups are trained in order of grant, so every group trained between
# step v and this group was granted before this group; and it is in flight when this group is
# granted, because its step is not published yet. At most (S + 1) B - 1 other groups are in flight
# then, so the groups before this one fill at most S batches, and a dropped group only moves later
# groups forward. So this group is at the latest in the batch of step v + S + 1, which is trained
# from version v + S.
#
# The bound holds for every token if actors play a grant with weights at least as new as the grant's
# `version`. `max_concurrent_groups` may admit fewer groups than the policy does, never more.

OVER_AGE = "over age"
"""Reason for which the policy `drop` drops groups that have become too stale. They are no fault, so
they do not count in `drops_in_a_row`."""
NO_VARIANCE = "all trials earned the same"
"""Reason for which dynamic sampling (`admission.replaced_groups`) drops groups. Such drops are no
fault, and the groups are chosen by their rewards: they count neither in `drops_in_a_row` nor among
the drops of `take_drops`, from which `dropped_bias.py` measures whether drops bias which tasks are
trained.
"""
MAX_REASONS = 64
"""Number of distinct reasons that are counted; drops for further reasons are counted under
`OTHER_REASONS`. Actors write reasons as text, which may differ at every drop."""
OTHER_REASONS = "other reasons"


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """Describe a group that was dropped. From such records `mage_async/results/dropped_bias.py`
    measures whether drops bias which tasks are trained.
    """

    member: str
    num_turns: int
    """Number of turns of its trials until the drop, as far as the learner knows."""
    reason: str


# Outcomes of `Ledger.receive`.


@dataclass(frozen=True, slots=True)
class Accepted:
    """Report the first result for a trial: the owner journals it, then acknowledges it."""

    is_complete: bool
    """Whether all trials of the group have arrived now."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Report that the trial is known, or its group has ended: the owner acknowledges it, so that
    the peer forgets it.
    """


@dataclass(frozen=True, slots=True)
class Unknown:
    """Report that no such trial was granted: an error of the peer, which `reason` describes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Count groups, or trials; always `granted = trained + dropped + in_flight`."""

    granted: int
    trained: int
    dropped: int
    in_flight: int

    def times(self, number: int) -> "Counts":
        """Return the counts of trials, for groups of `number` trials each."""
        return Counts(*(number * count for count in astuple(self)))


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Hold a snapshot of all counts. A group granted again counts once; all trials of a dropped
    group count as dropped.
    """

    groups: Counts
    trials: Counts
    acknowledged: int
    """Number of trials received for the first time, including those of groups that were dropped
    later.
    """
    duplicate: int
    """Number of results that were `Duplicate`."""
    unknown: int
    """Number of results that were `Unknown`."""
    granted_again: int
    """Number of grants after the first one, over all groups."""
    dropped_by_reason: Mapping[str, int]
    """Number of groups by reason."""
    drops_in_a_row: int
    """Number of groups dropped since the last one was complete, or since the learner started."""
    last_drop: str
    """Reason of the last of `drops_in_a_row`; empty if there is none."""


@dataclass(slots=True)
class PendingGroup:
    """Describe a group that was granted and is neither in training nor dropped: its grant, its
    actor, its results so far.
    """

    granted: GroupGrant
    """The latest grant of the group; `message` brings it up to date."""
    version: int
    """Policy version at the first grant."""
    peer: str | None
    """The actor that plays the group; None if it is lapsed or complete."""
    deadline: float = math.inf
    """Time at which the group is taken from its actor, if it is incomplete then."""
    granted_at: float = 0.0
    """Time of the last grant."""
    num_incomplete_at_grant: int = 1
    """Number of incomplete groups at the last grant, this one included."""
    num_expired: int = 0
    """Number of deadlines missed so far."""
    trials: list[Trial | None] = field(init=False)
    """The trials by their index; None where a trial has not arrived."""
    episodes: dict[int, EpisodeResult] = field(default_factory=dict)
    """Finished episodes of trials that have not arrived, by the trial's index. If the group is
    granted again, the next actor continues after them.
    """
    most_turns: int = 0
    """Largest number of turns that its trials, arrived or not, were ever reported to have had."""

    def __post_init__(self) -> None:
        self.trials = [None] * self.granted.num_trials

    @property
    def grant(self) -> int:
        """Number of the group, in order of first grants; it stays when the group is granted
        again.
        """
        return self.granted.grant

    @property
    def epoch(self) -> int:
        """Number of earlier grants of this group: 0 at its first grant."""
        return self.granted.epoch

    @property
    def task(self) -> Task:
        """The task that all its trials share."""
        granted = self.granted
        return Task(granted.environment, granted.member, granted.seed, granted.seat)

    @property
    def is_complete(self) -> bool:
        """Whether all trials have arrived."""
        return None not in self.trials

    def arrived(self) -> tuple[int, ...]:
        """Return the indices of the trials that have arrived."""
        return tuple(i for i, trial in enumerate(self.trials) if trial is not None)

    def num_turns(self) -> int:
        """Return the number of turns of the trials that have arrived."""
        return sum(len(trial.turns) for trial in self.trials if trial is not None)

    def num_turns_under_way(self) -> int:
        """Return how many turns the trials that have not arrived have had so far, as far as
        heartbeats and finished episodes reported them.
        """
        kept = sum(len(result.finished.trial.turns) for result in self.episodes.values())
        return max(kept, self.most_turns - self.num_turns())

    def group(self) -> Group:
        """Return the complete group, for training."""
        trials = tuple(t for t in self.trials if t is not None)
        return Group(self.grant, self.version, trials, self.granted.guidance)

    def message(self, deadline_s: float, lag: int) -> GroupGrant:
        """Return the grant to send; actors play with the weights of `lag` steps ago."""
        return msgspec.structs.replace(
            self.granted,
            version=max(0, self.version - lag),
            deadline_s=deadline_s,
            held=self.arrived(),
            rival=None,  # the coordinator adds it, with the path that its weights have now
        )

    def mismatch(self, trial: Trial) -> str:
        """Return why a trial does not belong to this group; empty if it does."""
        # In self-play of both seats every second trial has the task seen from the other seat.
        expected = own_task(self.task, trial.index), self.granted.num_episodes
        if (trial.task, trial.num_episodes) != expected:
            return f"group {self.grant} is another task than the trial's"
        granted = self.granted.guidance
        guidance = None if granted is None else granted.for_trial(trial.index)
        if trial.memory != (None if guidance is None else guidance.version):
            return f"group {self.grant} was granted with other guidance than the trial's"
        return ""


@dataclass(slots=True)
class Assignments:
    """Record which peer plays each incomplete group, and find the peer with the largest free quota:
    the number of groups that it can still be granted.

    The learner calls these methods after every message, so none of them scans all peers or groups:
    with thousands of actors such scans would be most of the learner's work.
    """

    _peers: dict[int, str | None] = field(default_factory=dict)
    """Peer of each incomplete group, by grant; None if the group is lapsed."""
    _grants: dict[str | None, set[int]] = field(default_factory=dict)
    """Grants of the incomplete groups of each peer, the inverse of `_peers`; no set is empty."""
    _quotas: dict[str, int] = field(default_factory=dict)
    """Largest number of groups that a peer may play at a time; a peer without an entry may play
    none.
    """
    _by_free: dict[int, dict[str, None]] = field(default_factory=dict)
    """Peers with a quota, by their free quota. No entry is empty. A dict serves as an ordered set:
    of peers with equal free quotas, the one that has waited longest comes first.
    """

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers)

    def total_quota(self) -> int:
        """Return the number of groups that all peers together may play at a time."""
        return sum(self._quotas.values())

    def assign(self, grant: int, peer: str | None) -> None:
        """Let a peer play an incomplete group; None makes the group lapsed."""
        self.remove(grant)
        self._remove_from_index(peer)
        self._peers[grant] = peer
        self._grants.setdefault(peer, set()).add(grant)
        self._add_to_index(peer)

    def remove(self, grant: int) -> None:
        """Remove a group that is complete or has ended; does nothing if it was removed before."""
        if grant not in self._peers:
            return
        peer = self._peers.pop(grant)
        self._remove_from_index(peer)
        self._grants[peer].remove(grant)
        if not self._grants[peer]:
            del self._grants[peer]
        self._add_to_index(peer)

    def grants_of(self, peer: str | None) -> list[int]:
        """Return the groups that a peer plays, or the lapsed ones for None, oldest first."""
        return sorted(self._grants.get(peer, ()))

    def peers(self) -> set[str]:
        """Return the peers that play a group."""
        return {peer for peer in self._grants if peer is not None}

    def set_quota(self, peer: str, quota: int) -> None:
        """Set how many groups a peer may play at a time; 0: none."""
        self._remove_from_index(peer)
        self._quotas.pop(peer, None)
        if quota:
            self._quotas[peer] = quota
        self._add_to_index(peer)

    def peer_with_largest_free_quota(self) -> str | None:
        """Return the peer that can be granted most further groups; None if no peer can."""
        most = max(self._by_free, default=0)
        return next(iter(self._by_free[most])) if most > 0 else None

    # `_by_free` is an index of peers by their free quota. Every method that changes a peer's free
    # quota removes the peer from the index first, and adds it again afterwards.

    def _free_quota(self, peer: str) -> int:
        """Return the number of groups that a peer can still be granted."""
        return self._quotas[peer] - len(self._grants.get(peer, ()))

    def _remove_from_index(self, peer: str | None) -> None:
        """Remove a peer from `_by_free`, before its free quota changes."""
        if peer is None or peer not in self._quotas:
            return
        free = self._free_quota(peer)
        del self._by_free[free][peer]
        if not self._by_free[free]:
            del self._by_free[free]

    def _add_to_index(self, peer: str | None) -> None:
        """Add a peer to `_by_free`, after its free quota has changed."""
        if peer is not None and peer in self._quotas:
            self._by_free.setdefault(self._free_quota(peer), {})[peer] = None


@dataclass(slots=True)
class Ledger:
    """Hold all groups in flight, and decide which may be granted and which the next step trains.

    A call that only a bug of the owner can cause fails an assertion.
    """

    groups_per_step: int
    max_staleness: int
    trials_per_group: int
    version: int = 0
    """Number of steps published so far."""
    next_grant: int = 0
    """Number of the next group. After a restart it exceeds every number used before."""
    lag: int = 0
    """Actors play with the weights of `lag` steps ago; every bound on staleness grows by it."""
    max_expiries: int = 5
    """Number of missed deadlines at which a group is dropped: a group that is never complete would
    hold up every group granted after it.
    """
    policy: AdmissionPolicy = SLOTS
    max_concurrent_groups: int | None = None
    """Largest number of incomplete groups at a time, lapsed ones included; None for no limit but
    the policy's.
    """
    _pending: dict[int, PendingGroup] = field(default_factory=dict, init=False)
    """Groups that are granted and not in training, by grant, oldest first."""
    _assignments: Assignments = field(default_factory=Assignments, init=False)
    """The peers of those pending groups that are incomplete."""
    _in_training: list[list[int]] = field(default_factory=list, init=False)
    """The grants of each batch that was taken and is not published, oldest first."""
    _first_grant: int = field(default=0, init=False)
    """Number of the first group of this journal; results of groups before it are unknown."""
    _num_trained: int = field(default=0, init=False)
    _num_acknowledged: int = field(default=0, init=False)
    _num_duplicate: int = field(default=0, init=False)
    _num_unknown: int = field(default=0, init=False)
    _num_granted_again: int = field(default=0, init=False)
    _dropped: Counter[str] = field(default_factory=Counter, init=False)
    """Number of dropped groups by reason."""
    _drops: list[DroppedGroup] = field(default_factory=list, init=False)
    """Groups dropped since `take_drops`, oldest first."""
    _num_replaced: int = field(default=0, init=False)
    """Number of groups dropped for `NO_VARIANCE` since the last step."""
    _drops_in_a_row: int = field(default=0, init=False)
    _last_drop: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._first_grant = self.next_grant

    # Grants.

    def may_grant(self) -> bool:
        """Return whether a new group may be granted; lapsed groups come first, and hold their slots
        already.
        """
        most = self.max_concurrent_groups
        if most is not None and self.num_incomplete() >= most:
            return False
        return self.policy.may_grant(self._state())

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
        """Grant a new group to a peer. Call only after `may_grant`."""
        assert self.may_grant(), "no slot is free"
        granted = GroupGrant(
            grant=self.next_grant,
            epoch=0,
            environment=task.environment,
            member=task.member,
            seat=task.seat,
            seed=task.seed,
            num_trials=self.trials_per_group,
            num_episodes=num_episodes,
            version=self.version,
            deadline_s=deadline_s,
            max_turns=max_turns,
            guidance=guidance,
        )
        num_incomplete = self.num_incomplete() + 1
        group = PendingGroup(granted, self.version, peer, now + deadline_s, now, num_incomplete)
        self._add(group)
        self.next_grant += 1
        return group.message(deadline_s, self.lag)

    def grant_again(self, grant: int, *, peer: str, now: float, deadline_s: float) -> GroupGrant:
        """Grant a lapsed group to another peer: same task and seed, next epoch."""
        group = self._pending[grant]
        assert group.peer is None, f"group {grant} is being played"
        assert not group.is_complete, f"group {grant} is complete"
        self._assign(group, peer)
        group.deadline = now + deadline_s
        group.granted = msgspec.structs.replace(group.granted, epoch=group.epoch + 1)
        group.granted_at, group.num_incomplete_at_grant = now, self.num_incomplete()
        self._num_granted_again += 1
        return group.message(deadline_s, self.lag)

    def renew_grants(self, peer: str, *, now: float, deadline_s: float) -> list[GroupGrant]:
        """Return the grants of all groups that a peer plays, with new deadlines.

        A peer gets them when it connects: after a restart of the learner, either side may know of a
        grant that the other does not.
        """
        groups = [self._pending[grant] for grant in self._assignments.grants_of(peer)]
        for group in groups:
            group.deadline = now + deadline_s
        return [group.message(deadline_s, self.lag) for group in groups]

    def set_quota(self, peer: str, quota: int) -> None:
        """Set how many groups a peer may play at a time; 0: none."""
        self._assignments.set_quota(peer, quota)

    def peer_with_largest_free_quota(self) -> str | None:
        """Return the peer that can be granted most further groups; None if no peer can."""
        return self._assignments.peer_with_largest_free_quota()

    # Results and drops.

    def receive(self, result: TrialResult) -> Accepted | Duplicate | Unknown:
        """Take in a trial, or the two trials of one game in which the policy plays both seats.

        A trial counts once, by (grant, index), whichever epoch of the grant it comes from. The
        caller acknowledges it after the journal holds it.
        """
        group = self._pending.get(result.grant)
        reason = self._why_unknown(result, group)
        if reason:
            self._num_unknown += 1
            return Unknown(reason)
        if group is None or group.trials[result.trial.index] is not None:
            self._num_duplicate += 1
            return Duplicate()
        for trial in result.trials():
            group.trials[trial.index] = trial
            group.episodes.pop(trial.index, None)
            self._num_acknowledged += 1
        if is_complete := group.is_complete:
            group.peer = None
            self._assignments.remove(group.grant)
            self._reset_drops_in_a_row()
        return Accepted(is_complete)

    def keep(self, result: EpisodeResult) -> None:
        """Keep the finished episodes of a trial for the actor that is granted its group next.

        Nothing changes if the trial is not expected, or if as many of its episodes are kept
        already.
        """
        # An epoch above the group's was never granted.
        group, trial = self._pending.get(result.grant), result.finished.trial
        if group is None or result.epoch > group.epoch or trial.index >= len(group.trials):
            return
        if group.trials[trial.index] is not None or group.mismatch(trial):
            return
        kept = group.episodes.get(trial.index)
        if kept is None or kept.finished.num_episodes < result.finished.num_episodes:
            group.episodes[trial.index] = result

    def episodes_of(self, grant: int) -> list[EpisodeResult]:
        """Return the finished episodes that are kept of a group's trials, in order of index."""
        group = self._pending.get(grant)
        return [] if group is None else [group.episodes[index] for index in sorted(group.episodes)]

    def note_turns(self, grant: int, epoch: int, num_turns: int) -> None:
        """Note how many turns the unfinished trials of a group have had so far.

        A drop for a missed deadline reports the largest number noted. Without these notes, a long
        group that misses its deadline would count as dropped at turn 0.
        """
        group = self._pending.get(grant)
        if group is not None and group.epoch == epoch:
            group.most_turns = max(group.most_turns, group.num_turns() + num_turns)

    def drop(self, grant: int, epoch: int, reason: str, num_turns: int = 0) -> bool:
        """Drop an incomplete group; its trials count as dropped, acknowledged or not.

        Args:
            num_turns: Number of turns of those of its trials that have not arrived.

        Returns:
            False, with nothing changed, if the group is complete, has ended, or was granted again
            since `epoch`.
        """
        group = self._pending.get(grant)
        if group is None or group.epoch != epoch or group.is_complete:
            return False
        self._drop(grant, reason, num_turns)
        return True

    def drop_if_no_variance(
        self, grant: int, max_drops: int, has_advantage: Callable[[Group], bool]
    ) -> bool:
        """Drop a complete group whose trials all earned the same in every episode (dynamic
        sampling), unless training on it would change the policy all the same.

        Args:
            max_drops: After this many such drops since the last step, no group is dropped.
            has_advantage: Returns whether a turn of a group has an advantage other than 0. Called
                for a group that would be dropped otherwise.

        Returns:
            Whether the group was dropped.
        """
        if self._num_replaced >= max_drops:
            return False
        group = self._pending[grant].group()
        earned = {tuple(trial.episode_rewards()) for trial in group.trials}
        if len(earned) > 1 or has_advantage(group):
            return False
        self._drop(grant, NO_VARIANCE)
        return True

    def drop_all(self, reason: str) -> tuple[int, int]:
        """Drop every pending group, as when a run is resumed under another configuration; return
        how many groups that were, and how many of their trials had arrived.

        These groups do not count in `drops_in_a_row`, nor among those of `take_drops`.
        """
        groups = list(self._pending.values())
        for group in groups:
            self._drop(group.grant, reason)
        self._reset_drops_in_a_row()
        self._drops.clear()
        return len(groups), sum(len(group.arrived()) for group in groups)

    # Deadlines and peers that end.

    def late_peers(self, now: float) -> set[str]:
        """Return the peers that `expire` would take a group from."""
        return {group.peer for group in self._late_groups(now) if group.peer is not None}

    def expire(self, now: float) -> list[Dropped]:
        """Take groups from peers that missed their deadline; the groups are lapsed then.

        A group that misses its deadline for the `max_expiries`-th time is dropped instead. Returns
        the records of the drops, oldest group first.
        """
        records = []
        for group in self._late_groups(now):
            self._assign(group, None)
            group.num_expired += 1
            if group.num_expired >= self.max_expiries:
                reason = f"missed its deadline {self.max_expiries} times"
                records.append(self._drop_and_record(group.grant, reason))
        return records

    def postpone_deadlines(self, seconds: float, latest: float) -> None:
        """Make every deadline later by `seconds`, but not later than `latest`.

        Used after the learner itself was blocked for `seconds` and read no messages of its peers.
        A deadline that is later than `latest` already is not changed.
        """
        for group in self._pending.values():
            group.deadline = min(group.deadline + seconds, max(group.deadline, latest))

    def peer_gone(self, peer: str) -> list[int]:
        """Take all groups from a peer that ended; return them, which are lapsed now."""
        grants = self._assignments.grants_of(peer)
        for grant in grants:
            self._assign(self._pending[grant], None)
        return grants

    # Training.

    def take_batch(self) -> list[Group] | None:
        """Return the groups of the next step in order of grant, if the policy finds a batch.

        They stay in flight until `trained`. Another batch may be taken before that.
        """
        is_short = self.num_complete() < self.groups_per_step
        grants = [] if is_short else self.policy.next_batch(self._state())
        if not grants:
            return None
        self._in_training.append(grants)
        return [self._pending.pop(grant).group() for grant in grants]

    def trained(self, version: int) -> list[Dropped]:
        """End the oldest batch in training: its step is published as `version`.

        Drops the groups that are too old by the policy, and returns the records of the drops,
        oldest group first.
        """
        assert self._in_training, "no batch is in training"
        assert version == self.version + 1, f"after version {self.version} came {version}"
        self._num_trained += len(self._in_training.pop(0))
        self._num_replaced = 0
        self.version = version
        too_old = self.policy.over_age(self._state())
        return [self._drop_and_record(grant, OVER_AGE) for grant in too_old]

    # Queries: none of them changes the ledger, except `take_drops`.

    def num_in_flight(self) -> int:
        """Return the number of groups in flight."""
        return len(self._pending) + sum(map(len, self._in_training))

    def num_incomplete(self) -> int:
        """Return the number of pending groups that lack a trial."""
        return len(self._assignments)

    def num_complete(self) -> int:
        """Return the number of pending groups that are complete."""
        return len(self._pending) - len(self._assignments)

    def trials_of_next_batch(self) -> tuple[int, int]:
        """Return how many trials of the next batch have arrived, and how many trials a batch has.

        A policy that trains groups in order of grant waits for the oldest ones, others for those
        that lack the fewest trials.
        """
        arrived = [len(group.arrived()) for group in self._pending.values()]
        if not self.policy.in_order:
            arrived.sort(reverse=True)
        return sum(arrived[: self.groups_per_step]), self.groups_per_step * self.trials_per_group

    def under_way(self) -> tuple[int, int]:
        """Return the number of trials of pending groups that have not arrived, and the number of
        turns that they have had so far."""
        groups = [self._pending[grant] for grant in self._assignments]
        return (
            sum(group.trials.count(None) for group in groups),
            sum(group.num_turns_under_way() for group in groups),
        )

    def total_quota(self) -> int:
        """Return the number of groups that all peers together may play at a time."""
        return self._assignments.total_quota()

    def grants_in_flight(self) -> set[int]:
        """Return the grants of all groups in flight."""
        return set(self._pending).union(*self._in_training)

    def lapsed(self) -> list[int]:
        """Return the incomplete groups that no peer plays, oldest first; they are granted again."""
        return self._assignments.grants_of(None)

    def incomplete_members(self) -> set[str]:
        """Return the hidden members (opponents or task variants) of the incomplete groups."""
        return {self._pending[grant].granted.member for grant in self._assignments}

    def playing_peers(self) -> set[str]:
        """Return the peers that play a group."""
        return self._assignments.peers()

    def played_by(self, peer: str) -> tuple[tuple[int, int], ...]:
        """Return the grant and epoch of each group that a peer plays."""
        grants = self._assignments.grants_of(peer)
        return tuple((grant, self._pending[grant].epoch) for grant in grants)

    def playing_time(self, grant: int, now: float) -> tuple[float, float]:
        """Return for how long a group that has just been completed was played, and how many groups
        were incomplete in that time.

        Returns:
            Seconds since the group was granted, and the mean number of incomplete groups in that
            time, the group itself included.
        """
        group = self._pending[grant]
        # The mean of the numbers at the grant and just before the last trial arrived: since then
        # the group itself is no longer incomplete, hence + 1.
        num_incomplete = (group.num_incomplete_at_grant + self.num_incomplete() + 1) / 2
        return now - group.granted_at, num_incomplete

    def counts(self) -> LedgerCounts:
        """Return a snapshot of all counts."""
        groups = Counts(
            granted=self.next_grant - self._first_grant,
            trained=self._num_trained,
            dropped=self._dropped.total(),
            in_flight=self.num_in_flight(),
        )
        return LedgerCounts(
            groups=groups,
            trials=groups.times(self.trials_per_group),
            acknowledged=self._num_acknowledged,
            duplicate=self._num_duplicate,
            unknown=self._num_unknown,
            granted_again=self._num_granted_again,
            dropped_by_reason=MappingProxyType(dict(self._dropped)),
            drops_in_a_row=self._drops_in_a_row,
            last_drop=self._last_drop,
        )

    def take_drops(self) -> list[DroppedGroup]:
        """Return the groups dropped since the last call, oldest first."""
        drops, self._drops = self._drops, []
        return drops

    # Journal records of this ledger's decisions.

    def segment_header(self, config: str, deadline_s: float) -> SegmentHeader:
        """Return the state of the ledger, without trials, to begin a segment of the journal with.

        Call only while no batch is in training.
        """
        assert not self._in_training, "a batch is in training"
        return SegmentHeader(
            config=config,
            version=self.version,
            first_grant=self._first_grant,
            next_grant=self.next_grant,
            groups=tuple(
                Granted(
                    peer=group.peer,
                    version=group.version,
                    grant=group.message(deadline_s, self.lag),
                )
                for group in self._pending.values()
            ),
            trained=self._num_trained,
            acknowledged=self._num_acknowledged,
            granted_again=self._num_granted_again,
            dropped=dict(self._dropped),
        )

    def grant_record(self, grant: GroupGrant) -> Granted:
        """Return the record of a grant that was just made."""
        group = self._pending[grant.grant]
        return Granted(peer=group.peer, version=group.version, grant=grant)

    # Replay of journal records into a new ledger.

    def begin(self, header: SegmentHeader) -> None:
        """Take over the state in the header of the first segment that is replayed."""
        self.version, self.next_grant = header.version, header.next_grant
        self._first_grant = header.first_grant
        self._dropped.update(header.dropped)
        self._num_trained = header.trained
        self._num_acknowledged = header.acknowledged
        self._num_granted_again = header.granted_again
        for granted in header.groups:
            self._add(PendingGroup(granted.grant, granted.version, granted.peer))

    def follow(self, header: SegmentHeader) -> None:
        """Bring the groups in flight into line with the header of a later segment."""
        # Groups that it does not name were dropped without a record of their own, as by `drop_all`
        # at a restart.
        for grant in self._pending.keys() - {granted.grant.grant for granted in header.groups}:
            self._remove(grant)
        # A crash may have torn the end off the previous segment, so that only the header names some
        # grants.
        for granted in header.groups:
            known = self._pending.get(granted.grant.grant)
            if known is None or known.epoch < granted.grant.epoch:
                self.replay_grant(granted)
        self.next_grant = max(self.next_grant, header.next_grant)
        self._dropped = Counter(header.dropped)

    def replay_grant(self, granted: Granted) -> None:
        """Replay a grant, the first one of a group or a later one."""
        group = self._pending.get(granted.grant.grant)
        if group is None:
            self._add(PendingGroup(granted.grant, granted.version, granted.peer))
            self.next_grant = max(self.next_grant, granted.grant.grant + 1)
        else:
            self._assign(group, granted.peer)
            group.granted = granted.grant
            self._num_granted_again += 1

    def replay_drop(self, grant: int, reason: str, num_turns: int) -> None:
        """Replay the record of a drop; nothing changes if the group is not pending."""
        if grant in self._pending:
            self._drop(grant, reason, num_turns)

    def replay_commit(self, commit: Commit) -> list[Group] | None:
        """Replay a step; return its groups, or None if one of their trials is missing, as where
        earlier segments of the journal were deleted.
        """
        removed = [self._remove(grant) for grant in commit.grants]
        self._num_trained += len(removed)
        self._num_replaced = 0
        self.version = commit.version
        whole = [group for group in removed if group is not None and group.is_complete]
        return [group.group() for group in whole] if len(whole) == len(removed) else None

    def restart_timers(self, now: float) -> None:
        """After a replay, measure the playing time of all groups from `now` on, and restart the
        count of drops in a row.
        """
        # The cause of the earlier drops may have been mended before the restart.
        self._reset_drops_in_a_row()
        for group in self._pending.values():
            group.granted_at = now
            group.num_incomplete_at_grant = max(1, self.num_incomplete())

    # Shared by the calls above.

    def _state(self) -> AdmissionState:
        """Return the state from which the policy decides."""
        return AdmissionState(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            version=self.version,
            pending=self._pending.values(),
            num_training=len(self._in_training),
        )

    def _add(self, group: PendingGroup) -> None:
        """Add a group of which no trial has arrived."""
        self._pending[group.grant] = group
        self._assignments.assign(group.grant, group.peer)

    def _assign(self, group: PendingGroup, peer: str | None) -> None:
        """Let a peer play a group; None makes the group lapsed."""
        group.peer = peer
        self._assignments.assign(group.grant, peer)

    def _remove(self, grant: int) -> PendingGroup | None:
        """Remove a pending group, and return it; None if it is not pending."""
        self._assignments.remove(grant)
        return self._pending.pop(grant, None)

    def _drop(self, grant: int, reason: str, num_turns: int = 0) -> None:
        """Drop a pending group.

        Args:
            num_turns: Number of turns of those of its trials that have not arrived.
        """
        group = self._remove(grant)
        assert group is not None, "only pending groups are dropped"
        is_fault = reason not in (OVER_AGE, NO_VARIANCE)
        # `OVER_AGE` and `NO_VARIANCE` are always counted by name; other reasons, which actors may
        # write, are counted together once there are too many of them.
        is_new = is_fault and reason not in self._dropped
        is_too_many = is_new and len(self._dropped) >= MAX_REASONS
        self._dropped[OTHER_REASONS if is_too_many else reason] += 1
        if is_fault:
            self._drops_in_a_row += 1
            self._last_drop = reason
        if reason == NO_VARIANCE:
            self._num_replaced += 1
        else:
            turns = group.num_turns() + num_turns
            self._drops.append(DroppedGroup(group.granted.member, turns, reason))

    def _drop_and_record(self, grant: int, reason: str) -> Dropped:
        """Drop a pending group because the ledger itself decides so; return the record of the drop.

        A drop that the owner decides (`drop`, `drop_if_no_variance`) is recorded by the owner.
        """
        num_turns = self._pending[grant].num_turns_under_way()
        self._drop(grant, reason, num_turns)
        return Dropped(grant=grant, reason=reason, num_turns=num_turns)

    def _reset_drops_in_a_row(self) -> None:
        """Count the next drop as the first in a row."""
        self._drops_in_a_row, self._last_drop = 0, ""

    def _late_groups(self, now: float) -> list[PendingGroup]:
        """Return the groups that a peer plays beyond their deadline, oldest first."""
        groups = (self._pending[grant] for grant in self._assignments)
        late = [group for group in groups if group.peer is not None and group.deadline <= now]
        return sorted(late, key=lambda group: group.grant)

    def _why_unknown(self, result: TrialResult, group: PendingGroup | None) -> str:
        """Return why a result cannot be of a trial that was granted; empty if it can."""
        if not self._first_grant <= result.grant < self.next_grant:
            return f"group {result.grant} was never granted by this learner"
        count = self.trials_per_group if group is None else len(group.trials)
        seats = num_seats(result.trial.task.member)
        # If the policy plays both seats, a play yields two trials, the first with an even index.
        if len(result.trials()) != seats or result.trial.index % seats:
            got = f"{len(result.trials())} from number {result.trial.index}"
            return f"group {result.grant} is played {seats} trials at a time, got {got}"
        if not 0 <= result.trial.index <= count - seats:
            return f"a group has {count} trials, got number {result.trial.index}"
        if group is None:
            return ""
        if result.epoch > group.epoch:
            return f"group {group.grant} is at epoch {group.epoch}, got {result.epoch}"
        return next(filter(None, map(group.mismatch, result.trials())), "")
