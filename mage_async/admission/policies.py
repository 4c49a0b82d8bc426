"""Define admission policies: which groups are granted, which the next step trains, which are
dropped.

A policy is three pure functions of an `AdmissionState`. `mage_async.admission.ledger.Ledger`
applies one, both in a run and in simulations. A configuration chooses it by name, with the key
`admission.rule`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mage_async.admission.ledger import PendingGroup

# Write S for max_staleness and B for groups_per_step. A group is in flight from its grant until the
# step that trains it is published, or until the group is dropped.
#
#     name       grants while                    trains                       group staleness
#     slots      fewer than (S + 1) B in flight  the B oldest, once complete  at most S
#     strict     the same policy as slots
#     sync       slots with S = 0                                             0
#     one_step   fewer than B not in training,   the B oldest, once complete  at most 1
#                and fewer than 2 B in flight
#     overtake   as slots                        the B oldest complete ones,  at most S
#                                                if each overtaken group can
#                                                still be trained in time
#     count      as slots                        the B oldest complete ones   no bound
#     window     as slots                        the B oldest complete ones,  no bound
#                                                if they overtake fewer than
#                                                (S + 1) B / 4 older groups
#     drop       always                          the B oldest complete ones;  at most S
#                                                drops groups that are too old
#     unbounded  always                          the B oldest complete ones   no bound
#
# The staleness of a group is that of its oldest token, so a bound per group is a bound per token.
# `ledger.py` proves the bound of `slots`; the bound of `overtake` is proved at `take_overtaking`.


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """Describe the groups in flight, as a policy sees them."""

    groups_per_step: int
    max_staleness: int
    version: int
    """Number of steps published so far."""
    pending: "Collection[PendingGroup]"
    """Groups in flight that are not in training, in order of grant."""
    num_training: int
    """Number of batches that were taken and are not published."""

    def num_in_flight(self) -> int:
        """Return the number of groups in flight, those in training included."""
        return len(self.pending) + self.num_training * self.groups_per_step

    def next_version(self) -> int:
        """Return the policy version from which a batch taken now will be trained."""
        return self.version + self.num_training


def nothing_to_drop(state: AdmissionState) -> list[int]:
    """Return no group: the policy never drops one for its age."""
    return []


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Hold three decisions about the groups in flight, and the bound on staleness that follows."""

    name: str
    guarantee: str
    """Bound on the staleness of every group, or of every token, that is trained; of policies
    without such a bound, a weaker statement.
    """
    may_grant: Callable[[AdmissionState], bool]
    next_batch: Callable[[AdmissionState], list[int]]
    """Returns the grants of the next batch: exactly `groups_per_step` of them, or none yet."""
    over_age: Callable[[AdmissionState], list[int]] = nothing_to_drop
    """Returns the grants to drop after a step was published."""
    in_order: bool = False
    """Whether groups are trained in order of grant."""


# Rules that decide when a group may be granted.


def has_free_slot(state: AdmissionState) -> bool:
    """Return whether fewer than (S + 1) B groups are in flight.

    AReaL and SkyRL count the same: `version * B` groups were trained, so
    `(S + 1 + version) B - accepted - running` groups may still be granted.
    """
    return state.num_in_flight() < (state.max_staleness + 1) * state.groups_per_step


def fewer_than_a_batch_in_flight(state: AdmissionState) -> bool:
    """Return whether fewer than B groups are in flight, so that no batch is in training."""
    return has_free_slot(replace(state, max_staleness=0))


def next_batch_is_short(state: AdmissionState) -> bool:
    """Return whether fewer than B groups are pending: one batch is played, another one trained."""
    is_short = len(state.pending) < state.groups_per_step
    # With two batches in training, a group granted now would be trained two steps later, not one.
    return is_short and state.num_in_flight() < 2 * state.groups_per_step


def always(state: AdmissionState) -> bool:
    """Return True: the number of groups in flight is not limited."""
    return True


# Rules that decide which groups the next step trains.


def take_in_order(state: AdmissionState) -> list[int]:
    """Return the B oldest groups, once all of them are complete."""
    return take_from_window(state, 1)


def take_complete(state: AdmissionState) -> list[int]:
    """Return the B oldest complete groups, however many older groups are not complete."""
    return take_from_window(state, len(state.pending))


def take_from_quarter(state: AdmissionState) -> list[int]:
    """Return the B oldest complete groups, if they overtake fewer older groups than a quarter of
    the (S + 1) B slots, rounded down but at least 1; otherwise none.
    """
    slots = (state.max_staleness + 1) * state.groups_per_step
    return take_from_window(state, max(1, slots // 4))


def take_from_window(state: AdmissionState, size: int) -> list[int]:
    """Return the B oldest complete groups, if they overtake fewer than `size` older groups;
    otherwise none.
    """
    return _oldest_complete(state, lambda _, num_overtaken: num_overtaken < size)


def take_overtaking(state: AdmissionState) -> list[int]:
    """Return the B oldest complete groups, if every group that they overtake can still be in time.

    This keeps the bound of `slots` without its order, in which one long group delays all groups
    that were granted after it. It is earliest-deadline-first scheduling.

    Let n be the version from which the next batch is trained. A group granted at version v is due
    at version v + S: it has to be in the batch trained from that version, or in an earlier one.

    Claim: for every d >= n, at most (d - n + 1) B pending groups are due at d or before.

    Proof. Groups are pending in the order of their grants, so their due versions never fall. A new
    group is granted at the newest version v, so it is due last of all, at v + S. n - v batches are
    in training, so of the (S + 1) B slots (v + S - n + 1) B are left for pending groups. Taking a
    batch increases n by one, so the batch may overtake at most (d - n) B groups that are due at d
    or before. For d before the due version of the batch's last group, `may_wait` has checked it.
    For every later d, all B groups of the batch are due at d or before, so taking them leaves B
    fewer. For d = n the batch overtakes no group: no group is trained after it is due.
    """

    def may_wait(group: "PendingGroup", num_overtaken: int) -> bool:
        # Batches after the next one that may still train this group.
        batches_left = group.version + state.max_staleness - state.next_version()
        return num_overtaken <= batches_left * state.groups_per_step

    return _oldest_complete(state, may_wait)


def _oldest_complete(
    state: AdmissionState, may_wait: "Callable[[PendingGroup, int], bool]"
) -> list[int]:
    """Return the B oldest complete groups; none if the batch would overtake a group that may not
    wait.

    Args:
        may_wait: Called with each overtaken group, and the number of groups overtaken so far,
            itself included.
    """
    batch: list[int] = []
    num_overtaken = 0
    for group in state.pending:
        if len(batch) == state.groups_per_step:
            break
        if group.is_complete:
            batch.append(group.grant)
            continue
        num_overtaken += 1
        if not may_wait(group, num_overtaken):
            break
    return batch if len(batch) == state.groups_per_step else []


def take_young(state: AdmissionState) -> list[int]:
    """Return the B oldest complete groups that are not too old."""
    oldest = state.next_version() - state.max_staleness
    young = [
        group.grant for group in state.pending if group.is_complete and group.version >= oldest
    ]
    return young[: state.groups_per_step] if len(young) >= state.groups_per_step else []


def over_age(state: AdmissionState) -> list[int]:
    """Return the groups whose staleness would exceed S in the next batch that can train them."""
    oldest = state.next_version() - state.max_staleness
    return [group.grant for group in state.pending if group.version < oldest]


# One policy has three names. Users find it as `slots` (a group holds a slot until it is published),
# as `strict` (no group may be overtaken), and, with a bound of 0, as `sync`.
SLOTS = AdmissionPolicy(
    "slots", "hard per group: at most max_staleness", has_free_slot, take_in_order, in_order=True
)
STRICT = replace(SLOTS, name="strict")
SYNC = replace(
    SLOTS,
    name="sync",
    guarantee="hard per token: staleness 0",
    may_grant=fewer_than_a_batch_in_flight,
)

ONE_STEP = AdmissionPolicy(
    "one_step", "hard per group: at most 1", next_batch_is_short, take_in_order, in_order=True
)
OVERTAKE = AdmissionPolicy(
    "overtake", "hard per group: at most max_staleness", has_free_slot, take_overtaking
)
COUNT = AdmissionPolicy(
    "count", "mean only: at most max_staleness in the long run", has_free_slot, take_complete
)
WINDOW = replace(COUNT, name="window", next_batch=take_from_quarter)
DROP = AdmissionPolicy(
    "drop",
    "hard per group: at most max_staleness, by throwing work away, the longest trials first",
    always,
    take_young,
    over_age,
)
UNBOUNDED = AdmissionPolicy("unbounded", "nothing", always, take_complete)

POLICIES = {
    policy.name: policy
    for policy in (SYNC, ONE_STEP, COUNT, WINDOW, STRICT, DROP, SLOTS, OVERTAKE, UNBOUNDED)
}
"""The policies by the name that a configuration gives them (`admission.rule`)."""
