"""Rules of admission: what may be granted, what the next step trains, what is too old to keep.

A rule is three pure functions of `Flow`, a snapshot of the groups that hold a slot, and a sentence
about what it guarantees. `mage_async.admission.ledger.SlotLedger` applies one, in a run and
simulated. Write S for max_staleness and B for groups_per_step.

    rule        grants while                          trains                     guarantees
    sync        fewer than B hold a slot              in order of grant          every token fresh
    one_step    fewer than B are not in training      in order of grant          group at most 1
    count       fewer than (S + 1) B hold a slot      the oldest complete ones   nothing per group
    window      as count                              the same, but only from    nothing per group
                                                      the oldest places
    strict      as count                              window of one place        group at most S
    drop        always                                the oldest complete ones,  group at most S
                                                      and drops what is over age
    slots       fewer than (S + 1) B hold a slot      in order of grant          group at most S
    overtake    as slots                              the oldest complete ones   group at most S
                                                      while no group overtaken
                                                      comes too late
    unbounded   always                                the oldest complete ones   nothing

`strict` and `slots` make the same decisions; they are reached from two sides, a window that shrinks
to the oldest place and slots that are held until trained, and the proof is with the slots. The
staleness of a group is that of its oldest token, so what is hard per group is hard per token.

`overtake` keeps the bound of `slots` without the order of grant, in which one long group holds up
all that were granted after it; it is earliest deadline first. Write n for the version that the
next batch trains. A group granted at version v is due at version v + S: in that batch at the
latest. Claim: for every d >= n, at most (d - n + 1) B groups not in training are due at d or
before. Proof. A group granted at the newest version v is due last of all, at v + S, and of
(S + 1) B slots those not in training are (v + S - n + 1) B. A batch makes n larger by one, so it
may leave (d - n) B groups behind that are due at d or before. `take_overtaking` counts those that
it leaves before its last group; from that group's d on, all B of the batch are due at d or before,
so B fewer are left. For d = n it leaves none: no group is trained after it is due.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """A group that is not in training."""

    grant: int
    version: int
    """Policy version at which the group was granted."""
    is_complete: bool


class Places(Protocol):
    """Places in order of grant, like a list of them."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Place]: ...


@dataclass(frozen=True, slots=True)
class Flow:
    """What a rule decides by."""

    groups_per_step: int
    max_staleness: int
    version: int
    """Steps published so far."""
    places: Places
    num_training: int
    """Batches taken and not published."""

    def num_in_flight(self) -> int:
        """Groups that hold a slot."""
        return len(self.places) + self.num_training * self.groups_per_step

    def next_version(self) -> int:
        """The version that a batch taken now will train."""
        return self.version + self.num_training

    def complete(self) -> list[Place]:
        """Groups that could be trained, oldest first."""
        return [place for place in self.places if place.is_complete]


@dataclass(frozen=True, slots=True)
class Rule:
    """See the module."""

    name: str
    guarantee: str
    """What holds of every group or token it trains."""
    may_grant: Callable[[Flow], bool]
    take: Callable[[Flow], list[int]]
    """Grants of the next batch, exactly `groups_per_step`, or none yet."""
    over_age: Callable[[Flow], list[int]]
    """Grants to be dropped after a step was published."""


def none_over_age(flow: Flow) -> list[int]:
    """Nothing is thrown away."""
    return []


def fill_slots(flow: Flow) -> bool:
    """At most (S + 1) B groups hold a slot. AReaL and SkyRL count the same: trained groups number
    `version * B`, so `(S + 1 + version) B - accepted - running` is the number of free slots.
    """
    return flow.num_in_flight() < (flow.max_staleness + 1) * flow.groups_per_step


def fill_one_batch(flow: Flow) -> bool:
    """At most B groups hold a slot: while they train, no group is played."""
    return flow.num_in_flight() < flow.groups_per_step


def fill_next_batch(flow: Flow) -> bool:
    """The next batch is played while one trains."""
    is_short = len(flow.places) < flow.groups_per_step
    return is_short and flow.num_in_flight() < 2 * flow.groups_per_step


def fill(flow: Flow) -> bool:
    """Always."""
    return True


def take_in_order(flow: Flow) -> list[int]:
    """The B oldest groups, once they are all complete."""
    return take_from_window(flow, 1)


def take_overtaking(flow: Flow) -> list[int]:
    """The B oldest complete groups, once every group that they overtake can still be in time."""
    chosen: list[int] = []
    left = 0
    for place in flow.places:
        if len(chosen) == flow.groups_per_step:
            break
        if place.is_complete:
            chosen.append(place.grant)
            continue
        left += 1
        batches_left = place.version + flow.max_staleness - flow.next_version()
        if left > batches_left * flow.groups_per_step:
            return []
    return chosen if len(chosen) == flow.groups_per_step else []


def take_complete(flow: Flow) -> list[int]:
    """The B oldest complete groups, whichever groups they overtake."""
    return take_from_window(flow, len(flow.places))


def take_from_quarter(flow: Flow) -> list[int]:
    """The oldest complete groups within a quarter of the slots, anchored at the oldest group."""
    slots = (flow.max_staleness + 1) * flow.groups_per_step
    return take_from_window(flow, max(1, slots // 4))


def take_from_window(flow: Flow, size: int) -> list[int]:
    """B groups, each the oldest complete one among the `size` oldest that are left."""
    chosen: list[int] = []
    left = 0
    for place in flow.places:
        if left >= size or len(chosen) == flow.groups_per_step:
            break
        if place.is_complete:
            chosen.append(place.grant)
        else:
            left += 1
    return chosen if len(chosen) == flow.groups_per_step else []


def take_young(flow: Flow) -> list[int]:
    """The B oldest complete groups that are not over age."""
    oldest = flow.next_version() - flow.max_staleness
    young = [place.grant for place in flow.complete() if place.version >= oldest]
    return young[: flow.groups_per_step] if len(young) >= flow.groups_per_step else []


def over_age(flow: Flow) -> list[int]:
    """Groups that would be staler than S in the batch they can still be in."""
    oldest = flow.next_version() - flow.max_staleness
    return [place.grant for place in flow.places if place.version < oldest]


SYNC = Rule("sync", "hard per token: staleness 0", fill_one_batch, take_in_order, none_over_age)
ONE_STEP = Rule(
    "one_step", "hard per group: at most 1", fill_next_batch, take_in_order, none_over_age
)
COUNT = Rule("count", "mean only", fill_slots, take_complete, none_over_age)
WINDOW = Rule("window", "mean only", fill_slots, take_from_quarter, none_over_age)
STRICT = Rule(
    "strict", "hard per group: at most max_staleness", fill_slots, take_in_order, none_over_age
)
DROP = Rule(
    "drop",
    "hard per group: at most max_staleness, by throwing work away, the longest trials first",
    fill,
    take_young,
    over_age,
)
SLOTS = Rule(
    "slots", "hard per group: at most max_staleness", fill_slots, take_in_order, none_over_age
)
OVERTAKE = Rule(
    "overtake",
    "hard per group: at most max_staleness",
    fill_slots,
    take_overtaking,
    none_over_age,
)
UNBOUNDED = Rule("unbounded", "nothing", fill, take_complete, none_over_age)

RULES = {
    rule.name: rule
    for rule in (SYNC, ONE_STEP, COUNT, WINDOW, STRICT, DROP, SLOTS, OVERTAKE, UNBOUNDED)
}
"""The rules, by the name a configuration gives them."""
