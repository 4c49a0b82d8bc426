"""Groups and trials as lists, narrowed by what a person chose: a step's page, and the search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from mage_async.pages.frame import Frame
from mage_async.pages.histogram import Histogram, edges_of, histogram
from mage_async.pages.listed import ListedGroup, ListedTrial
from mage_async.pages.templating import fill
from mage_async.report.charts.number_format import figure, words
from mage_async.results.metrics import METRICS

MOST_LISTED = 200
TOLD = (
    "trials_per_s",
    "generated_tokens_per_s",
    "staleness_mean",
    "staleness_max",
    "entropy",
    "loss",
    "grad_norm",
    "clipped_share",
    "invalid_actions_per_trial",
    "logprob_gap_mean",
    "train_s",
    "waiting_s",
)
"""Metrics of a step that its page shows first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which trials are listed. Everything is part of the address, so a list can be passed on."""

    first: int = 0
    """Steps from `first` to `last`."""
    last: int = 0
    episode: int = 0
    """Whose reward counts, from 1; 0: the last one."""
    bin: int | None = None
    member: str = ""
    only_invalid: bool = False
    """Only trials with an action that was refused."""
    text: str = ""
    """Only trials that say so, in any context."""
    behind: int | None = None
    """The search goes on behind so many trials."""

    def reward(self, trial: ListedTrial) -> float:
        """The reward by which a trial is listed."""
        place = self.episode - 1 if 0 < self.episode <= len(trial.rewards) else -1
        return trial.rewards[place] if trial.rewards else 0.0

    def address(self, base: str, **changes: Any) -> str:
        """The same list at a page, with some things chosen otherwise."""
        chosen = replace(self, **changes)
        values = {name: getattr(chosen, name) for name in Choice.__slots__}
        kept = {name: value for name, value in values.items() if value not in (0, "", None, False)}
        kept |= {"bin": chosen.bin} if chosen.bin is not None else {}
        kept |= {"only_invalid": "1"} if chosen.only_invalid else {}
        return f"{base}?{urlencode(kept)}" if kept else base


@dataclass(frozen=True, slots=True)
class Selection:
    """The trials of a choice, and the bins they fall into."""

    trials: Sequence[ListedTrial]
    """In the chosen bin."""
    histogram: Histogram | None


def select(trials: Sequence[ListedTrial], choice: Choice, page: str) -> Selection:
    """Narrow trials to a choice; text is looked for elsewhere."""
    wanted = [trial for trial in trials if _is_wanted(trial, choice)]
    rewards = [choice.reward(trial) for trial in wanted]
    edges = edges_of(rewards)
    shown = [
        trial
        for trial, reward in zip(wanted, rewards, strict=True)
        if choice.bin is None or edges.place(reward) == choice.bin
    ]
    said = f"reward of {f'episode {choice.episode}' if choice.episode else 'the last episode'}"
    bars = histogram(
        rewards, choice.bin, lambda number: choice.address(page, bin=number, behind=None), said
    )
    return Selection(shown, bars)


def _is_wanted(trial: ListedTrial, choice: Choice) -> bool:
    if choice.only_invalid and not trial.num_invalid:
        return False
    return not choice.member or trial.member == choice.member


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group and those of its trials that are listed."""

    group: ListedGroup
    trials: Sequence[ListedTrial]
    mean: float
    spread: float
    """Standard deviation of the listed rewards; 0: the group teaches nothing."""
    staleness: int | None
    """The largest of its tokens, where a step has trained it."""


def group_rows(
    groups: Sequence[ListedGroup], trials: Sequence[ListedTrial], choice: Choice
) -> list[GroupRow]:
    """Groups with their trials, without those that have none left."""
    by_group: dict[int, list[ListedTrial]] = {}
    for trial in trials:
        by_group.setdefault(trial.group, []).append(trial)
    return [
        _row(group, by_group.get(group.number, []), choice)
        for group in groups
        if group.number in by_group
    ]


def _row(group: ListedGroup, trials: Sequence[ListedTrial], choice: Choice) -> GroupRow:
    rewards = [choice.reward(trial) for trial in trials]
    mean = sum(rewards) / len(rewards)
    spread = (sum((value - mean) ** 2 for value in rewards) / len(rewards)) ** 0.5
    oldest = min((trial.oldest for trial in trials if trial.oldest is not None), default=None)
    is_known = group.step is not None and oldest is not None
    return GroupRow(group, trials, mean, spread, group.step - 1 - oldest if is_known else None)


def step_page(
    frame: Frame,
    metrics: Mapping[str, Any],
    groups: Sequence[ListedGroup],
    trials: Sequence[ListedTrial],
    choice: Choice,
) -> Markup:
    """A step: its metrics, the rewards of its trials, its groups."""
    page = f"{frame.home}step/{choice.first}"
    chosen = select(trials, choice, page)
    return fill(
        "step.html",
        frame=frame,
        facts=[_fact(name, metrics) for name in TOLD if name in metrics],
        others=[
            (name, figure(value))
            for name, value in metrics.items()
            if isinstance(value, int | float) and name not in TOLD
        ],
        returns=metrics.get("return_by_episode", []),
        rows=group_rows(groups, chosen.trials, choice),
        histogram=chosen.histogram,
        episodes=_episodes(trials, choice, page),
        choice=choice,
        all_address=choice.address(page, bin=None),
    )


def _fact(name: str, metrics: Mapping[str, Any]) -> tuple[str, str, str]:
    unit, meaning = METRICS[name]
    beside = "" if unit in ("1", "share", "1/s") else f" {unit}"
    return words(name).removesuffix(" s"), f"{figure(metrics[name])}{beside}", meaning


def _episodes(
    trials: Sequence[ListedTrial], choice: Choice, page: str
) -> list[tuple[str, str, bool]]:
    """By which episode's reward the trials are listed: label, address, whether it is now."""
    count = max((len(trial.rewards) for trial in trials), default=0)
    now = choice.episode or count
    return [
        (f"episode {k}", choice.address(page, episode=k, bin=None, behind=None), k == now)
        for k in range(1, count + 1)
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """A trial whose text holds what was looked for."""

    trial: ListedTrial
    before: str
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has come to."""

    found: Sequence[Found]
    num_read: int
    """Trials whose text was read in this piece of the search."""
    behind: int | None
    """Where it goes on; None: all was read."""
    missing: str = ""
    """Why some trials could not be read."""


def trials_page(
    frame: Frame,
    trials: Sequence[ListedTrial],
    chosen: Selection,
    choice: Choice,
    search: Search | None,
    *,
    is_cut: bool,
) -> Markup:
    """All trials of some steps, narrowed by bin, member and text."""
    page = f"{frame.home}trials"
    members = sorted({trial.member for trial in trials if trial.member})
    return fill(
        "trials.html",
        frame=frame,
        choice=choice,
        members=members,
        histogram=chosen.histogram,
        episodes=_episodes(trials, choice, page),
        trials=[] if search else chosen.trials[:MOST_LISTED],
        num_trials=len(chosen.trials),
        most=MOST_LISTED,
        is_cut=is_cut,
        num_considered=len(trials),
        search=search,
        on=choice.address(page, behind=search.behind) if search and search.behind else "",
        all_address=choice.address(page, bin=None, behind=None),
        reward=choice.reward,
    )
