"""Metrics of a step that say nothing of learning, and warn: the doctor reads them.

What counts by member or by actor is a table of names, and is left out of a step where it is empty.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from mage_async.policy_version import VersionRun, oldest
from mage_async.trajectory import Group, Kind, Segment, Turn

WAITING = ("no grant", "no fresh weights")
"""States of an actor that has nothing to play."""
Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by state of each process."""


def truncated_share(groups: Sequence[Group], most_tokens: int | None) -> float:
    """Share of actions that used up their tokens and are invalid; 0 where `most_tokens` is None,
    because the transcript itself closes what an action stands in.
    """
    if most_tokens is None:
        return 0.0
    acts = [turn for turn in _turns(groups) if turn.kind is Kind.ACT]
    cut = sum(turn.stop - turn.start >= most_tokens and not turn.is_valid for turn in acts)
    return cut / max(1, len(acts))


def over_bound_by_actor(
    groups: Sequence[Group], actors: Mapping[int, str], *, version: int, bound: int
) -> dict[str, float]:
    """Sampled tokens staler than `bound`, as a share of all, by the actor that finished the group.

    Args:
        actors: by grant; a group whose actor is not known is left out.
        version: the one that is trained.
    """
    found: Counter[str] = Counter()
    for group in groups:
        if group.grant in actors:
            found[actors[group.grant]] += sum(
                _tokens_before(segment, version - bound) for segment in _segments(group)
            )
    total = sum(trial.num_sampled() for group in groups for trial in group.trials)
    return {actor: count / max(1, total) for actor, count in sorted((+found).items())}


def idle_share(before: Seconds, now: Seconds) -> float | None:
    """Share of the actors' time between two accounts that they waited for a grant or for weights;
    None where no actor has accounted for any since.
    """
    spent: Counter[str] = Counter()
    for name, states in now.items():
        earlier = before.get(name, {})
        passed = {state: seconds - earlier.get(state, 0.0) for state, seconds in states.items()}
        if min(passed.values(), default=0.0) >= 0.0:  # below it, the actor was started again
            spent.update(passed)
    total = sum(spent.values())
    return sum(spent[state] for state in WAITING) / total if total > 0 else None


def _turns(groups: Sequence[Group]) -> list[Turn]:
    return [turn for group in groups for trial in group.trials for turn in trial.turns]


def _segments(group: Group) -> list[Segment]:
    return [segment for trial in group.trials for segment in trial.segments]


def _tokens_before(segment: Segment, version: int) -> int:
    """Sampled tokens drawn by versions below this one."""
    runs: Sequence[VersionRun] = segment.versions
    if not runs or oldest(runs) >= version:
        return 0
    stops = [*(run.start for run in runs[1:]), len(segment.tokens)]
    return sum(
        int(segment.is_sampled[run.start : stop].sum())
        for run, stop in zip(runs, stops, strict=True)
        if run.policy < version
    )
