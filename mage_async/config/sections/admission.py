"""Which groups are played, against which members, and how stale they may become."""

from typing import Annotated, Literal

from msgspec import Meta

from mage_async.config.sections.section import Count, Natural, Positive, Section, Share

Matchmaker = Literal["decks", "fixed", "resampled", "prioritised", "progress"]
Keep = Literal["newest", "best", "spread"]


class Admission(Section):
    """How many groups are in flight, and how stale they may become."""

    groups_per_step: Count = 16
    """Groups that a step trains."""
    trials_per_group: Count = 8
    """Trials of one task that are compared with each other."""
    rule: Literal[
        "sync", "one_step", "count", "window", "strict", "drop", "slots", "overtake", "unbounded"
    ] = "slots"
    """When a group is granted and taken in; `mage_async/admission/rules.py` says what each rule
    guarantees."""
    max_staleness: Natural = 2
    """Bound in steps; with the rules `slots` and `overtake` a hard one for every group."""
    max_groups_in_play: Count = 1024
    """Groups granted and not complete; actors' contexts bound them too."""
    over_age_target: Share = 1.0
    """Play only so many groups at once that the predicted share of tokens over `max_staleness` is
    at most this (`mage_async/admission/concurrency.py`); 1 is as many as there may be."""
    lag: Annotated[int, Meta(ge=0, le=8)] = 0
    """Actors play with the weights of so many steps ago, which adds to staleness without changing
    speed; for experiments."""
    grant_deadline_s: Positive = 600.0
    """Seconds after which an unfinished group is granted again."""
    max_drops_in_a_row: Count = 50
    """Groups dropped without one trained that end the run, with the reason."""


class Population(Section):
    """The members that the agent meets in training; see `mage_async/tasks/`."""

    matchmaker: Matchmaker = "decks"
    """The environment's members in shuffled decks; the same one always in the same place of a step,
    as in MAGE; any; by how much the agent could still gain against them; or by how much its return
    against them changes."""
    rivals: Share = 0.0
    """Share of groups that meet a version of the policy instead, in the opponent's seat; only the
    agent's side is trained on."""
    every: Natural = 0
    """Steps after which a version becomes a rival; 0: the newest is the only one (self-play)."""
    kept: Count = 8
    """Most rivals at once."""
    keep: Keep = "spread"
    """Which rivals stay of too many: the newest, the best rated, or some from all times."""
    rivals_remember: bool = False
    """A rival remembers the trial's earlier episodes and writes remarks, as the agent does; else
    each episode is its first one."""
    both_seats: Share = 0.0
    """Share of groups in which the policy plays both seats, each with a memory of its own, and is
    trained on both: a play is then two of the group's trials."""
