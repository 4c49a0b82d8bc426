"""Groups and trials as lists: the page of a step, and the page that searches all trials."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from mage_async.pages.charts import Histogram, bin_edges, figure, histogram, words
from mage_async.pages.curves import metric_unit
from mage_async.pages.templating import Frame, fill
from mage_async.results.metrics import explanation_of
from mage_async.tasks.task_stream import num_seats

MAX_LISTED = 200
FIRST_METRICS = (
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
"""Metrics that the page of a step shows as tiles; the others are folded."""


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group as the index of a run knows it; a field that no record has told yet is `None`."""

    number: int
    version: int | None
    """The policy version when the group was granted."""
    member: str | None
    seat: int | None
    seed: str | None
    peer: str | None
    epoch: int | None
    """How often the group was granted before."""
    num_trials: int | None
    step: int | None
    """The step that trained the group; `None`: none yet."""
    dropped: str | None
    """Why the group was dropped; `None`: it was not."""

    @property
    def is_self_play(self) -> bool:
        """Whether the policy plays both seats, so that a play has two trials."""
        return self.member is not None and num_seats(self.member) > 1


@dataclass(frozen=True, slots=True)
class ListedTrial:
    """A trial as the index of a run knows it."""

    group: int
    number: int
    rewards: Sequence[float]
    """Undiscounted reward of each episode."""
    num_turns: int
    num_tokens: int
    num_invalid: int
    oldest: int | None
    """The oldest version that drew one of its tokens."""
    newest: int | None
    duration_s: float
    step: int | None
    member: str | None


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """Which trials to list. The fields are the query of the address, so a list can be shared."""

    first: int = 0
    """The first and the last step of the trials."""
    last: int = 0
    episode: int = 0
    """Episode whose reward counts, from 1; 0: the last one."""
    bin: int | None = None
    """Bin of the histogram of rewards; `None`: all."""
    member: str = ""
    only_invalid: bool = False
    """Only trials with an action that was refused."""
    text: str = ""
    """Only trials that have this text in one of their contexts."""
    skip: int | None = None
    """Number of trials that an earlier part of the search has read."""

    def reward(self, trial: ListedTrial) -> float:
        """Return the reward by which a trial is listed."""
        place = self.episode - 1 if 0 < self.episode <= len(trial.rewards) else -1
        return trial.rewards[place] if trial.rewards else 0.0

    def address(self, base: str, **changes: Any) -> str:
        """Return the address of the list at a page, with changes to the filter."""
        changed = replace(self, **changes)
        values = {name: getattr(changed, name) for name in TrialFilter.__slots__}
        query = {name: value for name, value in values.items() if value not in (0, "", None, False)}
        query |= {"bin": changed.bin} if changed.bin is not None else {}
        query |= {"only_invalid": "1"} if changed.only_invalid else {}
        return f"{base}?{urlencode(query)}" if query else base


@dataclass(frozen=True, slots=True)
class Selection:
    """The trials that a filter keeps, and the histogram that can narrow it further."""

    trials: Sequence[ListedTrial]
    histogram: Histogram | None
    """Histogram of the rewards of the trials in all bins."""


def select(trials: Sequence[ListedTrial], wanted: TrialFilter, page: str) -> Selection:
    """Apply a filter, except its text, which is not in the index.

    Args:
        page: address of the page, for the links of the histogram.
    """
    kept = [
        trial
        for trial in trials
        if (trial.num_invalid or not wanted.only_invalid) and wanted.member in ("", trial.member)
    ]
    rewards = [wanted.reward(trial) for trial in kept]
    edges = bin_edges(rewards)
    in_bin = [
        trial
        for trial, reward in zip(kept, rewards, strict=True)
        if wanted.bin is None or edges.bin_of(reward) == wanted.bin
    ]
    noun = f"reward of {f'episode {wanted.episode}' if wanted.episode else 'the last episode'}"
    bars = histogram(
        rewards, wanted.bin, lambda number: wanted.address(page, bin=number, skip=None), noun
    )
    return Selection(in_bin, bars)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group and its listed trials."""

    group: ListedGroup
    trials: Sequence[ListedTrial]
    mean: float
    spread: float
    """Standard deviation of the listed rewards; 0: the group teaches nothing."""
    staleness: int | None
    """The largest staleness of its tokens, if a step has trained it."""


def group_rows(
    groups: Sequence[ListedGroup], trials: Sequence[ListedTrial], wanted: TrialFilter
) -> list[GroupRow]:
    """Join groups with their trials; groups without trials are left out."""
    by_group: dict[int, list[ListedTrial]] = {}
    for trial in trials:
        by_group.setdefault(trial.group, []).append(trial)
    rows = []
    for group in groups:
        if own := by_group.get(group.number):
            rewards = [wanted.reward(trial) for trial in own]
            mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
            oldest = min((trial.oldest for trial in own if trial.oldest is not None), default=None)
            is_known = group.step is not None and oldest is not None
            staleness = group.step - 1 - oldest if is_known else None
            rows.append(GroupRow(group, own, mean, spread, staleness))
    return rows


def step_page(
    frame: Frame,
    metrics: Mapping[str, Any],
    groups: Sequence[ListedGroup],
    trials: Sequence[ListedTrial],
    wanted: TrialFilter,
) -> Markup:
    """Return the page of a step: its metrics, the rewards of its trials, its groups."""
    page = f"{frame.home}step/{wanted.first}"
    selection = select(trials, wanted, page)
    return fill(
        "step.html",
        frame=frame,
        facts=[_metric_tile(name, metrics) for name in FIRST_METRICS if name in metrics],
        others=[
            (name, figure(value))
            for name, value in metrics.items()
            if isinstance(value, int | float) and name not in FIRST_METRICS
        ],
        returns=metrics.get("return_by_episode", []),
        rows=group_rows(groups, selection.trials, wanted),
        histogram=selection.histogram,
        episodes=_episode_links(trials, wanted, page),
        wanted=wanted,
        all_address=wanted.address(page, bin=None),
    )


def _metric_tile(name: str, metrics: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the label, the value with its unit, and the meaning of a metric."""
    value = f"{figure(metrics[name])}{metric_unit(name)}"
    return words(name).removesuffix(" s"), value, explanation_of(name)[1]


def _episode_links(
    trials: Sequence[ListedTrial], wanted: TrialFilter, page: str
) -> list[tuple[str, str, bool]]:
    """Return label and address of the list by each episode's reward; and whether it is shown."""
    count = max((len(trial.rewards) for trial in trials), default=0)
    now = wanted.episode or count
    return [
        (f"episode {k}", wanted.address(page, episode=k, bin=None, skip=None), k == now)
        for k in range(1, count + 1)
    ]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A trial whose text holds the text searched for, with the text before and after it."""

    trial: ListedTrial
    before: str
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of one part of a search."""

    hits: Sequence[SearchHit]
    num_read: int
    """Trials whose text this part has read."""
    skip: int | None
    """Where the next part begins; `None`: all trials were read."""
    missing: str = ""
    """Why some trials could not be read."""


def trials_page(
    frame: Frame,
    trials: Sequence[ListedTrial],
    selection: Selection,
    wanted: TrialFilter,
    search: SearchResult | None,
    *,
    is_cut: bool,
) -> Markup:
    """Return the page of the trials of some steps, narrowed by reward, member and text.

    Args:
        trials: all trials of these steps.
        selection: those that the filter keeps.
        search: result of the search for the filter's text; `None`: there is none.
        is_cut: whether older trials of these steps were left out.
    """
    page = f"{frame.home}trials"
    return fill(
        "trials.html",
        frame=frame,
        wanted=wanted,
        members=sorted({trial.member for trial in trials if trial.member}),
        histogram=selection.histogram,
        episodes=_episode_links(trials, wanted, page),
        trials=[] if search else selection.trials[:MAX_LISTED],
        num_trials=len(selection.trials),
        most=MAX_LISTED,
        is_cut=is_cut,
        num_considered=len(trials),
        search=search,
        more=wanted.address(page, skip=search.skip) if search and search.skip else "",
        all_address=wanted.address(page, bin=None, skip=None),
    )
