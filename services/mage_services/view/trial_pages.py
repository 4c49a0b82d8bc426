"""Make the pages of groups and trials, from a step down to the tokens of a turn, and of the text
search.
"""

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup

from mage_async.errors import MageError, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.pages.charts import Histogram, bin_edges, histogram, short_number, words
from mage_async.pages.curves import with_unit
from mage_async.pages.templating import fill
from mage_async.pages.turns import ShownTurn, TurnCredit, shown_tokens, shown_trial
from mage_async.results.metrics import explanation_of
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import Decode
from mage_services.view.index import ListedGroup, ListedTrial, RunReader, file_state
from mage_services.view.page_request import PageRequest


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """Select the trials to list. The fields are the query of the page's address, so that every list
    has a link.
    """

    first: int = 0
    """First step whose trials are listed."""
    last: int = 0
    """Last step whose trials are listed."""
    episode: int = 0
    """Number of the episode whose reward counts, from 1; 0 for the last one."""
    bin: int | None = None
    """Number of the bin of the histogram of rewards; None for all bins."""
    member: str = ""
    """Name of the hidden opponent or task variant; "" for all."""
    only_invalid: bool = False
    """Only trials with an action that was refused."""
    text: str = ""
    """Text that a listed trial must contain; "" for all trials."""
    skip: int = 0
    """Number of trials that earlier parts of a text search have read."""

    @staticmethod
    def of(request: PageRequest, first: int, last: int) -> "TrialFilter":
        """Return the filter in a query; by default all trials of the steps `first` to `last`."""
        return TrialFilter(
            first=request.number("first", first),
            last=request.number("last", last),
            episode=request.number("episode", 0),
            bin=request.number("bin", 0) if request.query.get("bin") else None,
            member=request.query.get("member", ""),
            only_invalid=bool(request.query.get("only_invalid")),
            text=request.query.get("text", "").strip(),
            skip=request.number("skip", 0),
        )

    def reward(self, trial: ListedTrial) -> float:
        """Return the trial's reward in the chosen episode, or in its last one if the trial has no
        such episode; 0 for a trial without rewards.
        """
        index = self.episode - 1 if 0 < self.episode <= len(trial.rewards) else -1
        return trial.rewards[index] if trial.rewards else 0.0

    def address(self, page: str, **changes: Any) -> str:
        """Return the address of the list at a page, with changes to the filter."""
        changed = replace(self, **changes)
        values = {each.name: (getattr(changed, each.name), each.default) for each in fields(self)}
        query = {name: value for name, (value, default) in values.items() if value != default}
        query |= {"only_invalid": "1"} if changed.only_invalid else {}
        return f"{page}?{urlencode(query)}" if query else page


def select(
    trials: Sequence[ListedTrial], trial_filter: TrialFilter, page: str
) -> tuple[list[ListedTrial], Histogram | None]:
    """Apply a filter to trials, except its text, because the index has no texts.

    Args:
        page: Address of the page, for the links of the histogram.

    Returns:
        The trials that the filter keeps, and the histogram of their rewards over all bins. Each bar
        links to the list of the trials in its bin.
    """
    kept = [
        trial
        for trial in trials
        if (trial.num_invalid or not trial_filter.only_invalid)
        and trial_filter.member in ("", trial.member)
    ]
    rewards = [trial_filter.reward(trial) for trial in kept]
    edges = bin_edges(rewards)
    episode = f"episode {trial_filter.episode}" if trial_filter.episode else "the last episode"
    bars = histogram(
        rewards,
        trial_filter.bin,
        lambda number: trial_filter.address(page, bin=number, skip=0),
        f"reward of {episode}",
    )
    if trial_filter.bin is not None:
        pairs = zip(kept, rewards, strict=True)
        kept = [trial for trial, reward in pairs if edges.bin_of(reward) == trial_filter.bin]
    return kept, bars


def _episode_links(
    trials: Sequence[ListedTrial], trial_filter: TrialFilter, page: str
) -> list[tuple[str, str, bool]]:
    """Return a link for each episode to the list by its reward: label, address, and whether the
    present list is by this episode.
    """
    count = max((len(trial.rewards) for trial in trials), default=0)
    now = trial_filter.episode or count
    return [
        (f"episode {k}", trial_filter.address(page, episode=k, bin=None, skip=0), k == now)
        for k in range(1, count + 1)
    ]


# The page of a step.

FIRST_METRICS = (
    *("trials_per_s", "generated_tokens_per_s", "staleness_mean", "staleness_max"),
    *("entropy", "loss", "grad_norm", "clipped_share"),
    *("invalid_actions_per_trial", "logprob_gap_mean", "train_s", "waiting_s"),
)
"""Metrics that the page of a step shows as tiles; the other metrics are folded."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Hold a group, and those of its trials that are listed."""

    group: ListedGroup
    trials: Sequence[ListedTrial]
    mean: float
    spread: float
    """Standard deviation of the listed rewards, which are rewards of one episode."""
    is_uniform: bool
    """Whether all trials of the group, listed or not, earned the same in every episode, so that the
    group has no advantages to learn from.
    """
    staleness: int | None
    """Largest staleness of the group's tokens, in steps; None if no step has trained it."""


def group_rows(
    groups: Sequence[ListedGroup],
    trials: Sequence[ListedTrial],
    kept: Sequence[ListedTrial],
    trial_filter: TrialFilter,
) -> list[GroupRow]:
    """Join groups with their listed trials; groups without a listed trial are left out.

    Args:
        trials: All trials of the groups.
        kept: The trials that are listed, chosen by the filter `trial_filter`.
    """
    all_of, listed_of = _by_group(trials), _by_group(kept)
    rows = []
    for group in groups:
        if listed := listed_of[group.number]:
            own = all_of[group.number]
            rewards = [trial_filter.reward(trial) for trial in listed]
            mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
            oldest = min((trial.oldest for trial in own if trial.oldest is not None), default=None)
            step = group.step
            # Step n trains version n - 1.
            staleness = None if step is None or oldest is None else step - 1 - oldest
            # Credit may be for all episodes, whichever one is listed.
            is_uniform = len({tuple(trial.rewards) for trial in own}) == 1 < len(own)
            rows.append(GroupRow(group, listed, mean, spread, is_uniform, staleness))
    return rows


def _by_group(trials: Iterable[ListedTrial]) -> dict[int, list[ListedTrial]]:
    """Return trials by the number of their group."""
    found = defaultdict[int, list[ListedTrial]](list)
    for trial in trials:
        found[trial.group].append(trial)
    return found


def step(request: PageRequest) -> Markup:
    """Return the page of a step: its metrics, the rewards of its trials, its groups."""
    number = max(1, request.numbers["step"])
    with RunReader(request.run) as reader:
        last = reader.last_step()
        if number > max(1, last):
            raise RunError(f"there is no step {number} yet; the newest is {last}")
        frame = request.frame(
            reader,
            f"step {number}",
            before=f"step/{number - 1}" if number > 1 else "",
            after=f"step/{number + 1}" if number < last else "",
        )
        metrics, groups = reader.step(number), reader.groups_of(number)
        listed = reader.trials_of([group.number for group in groups])
    # This page shows one step, even if the query names others.
    trial_filter = replace(TrialFilter.of(request, 0, 0), first=number, last=number)
    page = f"{frame.home}step/{number}"
    kept, bars = select(listed, trial_filter, page)
    return fill(
        "step.html",
        frame=frame,
        facts=[
            (
                words(name).removesuffix(" s"),  # seconds: the unit stands after the value
                with_unit(name, metrics[name]),
                explanation_of(name)[1],
            )
            for name in FIRST_METRICS
            if name in metrics
        ],
        others=[
            (name, short_number(value))
            for name, value in metrics.items()
            if isinstance(value, int | float) and name not in FIRST_METRICS
        ],
        returns=metrics.get("return_by_episode", []),
        rows=group_rows(groups, listed, kept, trial_filter),
        histogram=bars,
        episodes=_episode_links(listed, trial_filter, page),
        trial_filter=trial_filter,
        all_address=trial_filter.address(page, bin=None),
    )


# The page that lists the trials of some steps, and searches their text.

MAX_CONSIDERED = 5_000
"""Largest number of trials that a filter is applied to, the newest ones."""
MAX_LISTED = 200
"""Largest number of trials that are listed."""
PART_S = 0.15
"""Seconds of one part of a search; its page links to the next part."""
MAX_HITS = 50
"""Largest number of hits of one part of a search."""
SURROUNDINGS = 60
"""Number of characters shown on either side of a hit."""


class SearchResult(NamedTuple):
    """Hold the result of one part of a search."""

    hits: list[dict[str, Any]]
    """Trials whose text has a hit: the `trial`, the text `before` the hit, the `match`, and the
    text `after` it.
    """
    num_read: int
    """Number of trials that this part has looked at, those that it could not read included."""
    skip: int
    """Index of the trial at which the next part begins; 0 if all trials were read."""
    missing: str
    """Why some trials could not be read; "" if all could."""


def trials(request: PageRequest) -> Markup:
    """Return the page of the trials of some steps, filtered by reward, member and text."""
    with RunReader(request.run) as reader:
        trial_filter = TrialFilter.of(request, 1, reader.last_step())
        # One more than are considered shows whether there are more.
        listed = reader.trials_between(trial_filter.first, trial_filter.last, MAX_CONSIDERED + 1)
        is_cut, listed = len(listed) > MAX_CONSIDERED, listed[:MAX_CONSIDERED]
        frame = request.frame(reader, "trials", "trials")
        page = f"{frame.home}trials"
        kept, bars = select(listed, trial_filter, page)
        found = None
        if trial_filter.text:
            decode, fault = decoder_of(request.run)
            if fault:
                raise RunError(f"text cannot be searched. {fault}")
            found = search(reader, kept, decode, trial_filter.text, trial_filter.skip)
    more = ""
    if found and found.skip:
        more = trial_filter.address(page, skip=found.skip)
    elif is_cut:
        # The step of the oldest trial may have more of them, so the next search begins with it.
        last = min(listed[-1].step or 0, trial_filter.last - 1)
        if last >= trial_filter.first:
            more = trial_filter.address(page, last=last, skip=0)
    return fill(
        "trials.html",
        frame=frame,
        trial_filter=trial_filter,
        members=sorted({trial.member for trial in listed if trial.member}),
        histogram=bars,
        episodes=_episode_links(listed, trial_filter, page),
        trials=kept[:MAX_LISTED],
        num_trials=len(kept),
        most=MAX_LISTED,
        is_cut=is_cut,
        num_considered=len(listed),
        search=found,
        more=more,
        all_address=trial_filter.address(page, bin=None, skip=0),
    )


def search(
    reader: RunReader, trials: Sequence[ListedTrial], decode: Decode, text: str, skip: int
) -> SearchResult:
    """Search the texts of `trials[skip:]` for a text, in any case, for at most `PART_S` seconds."""
    hits, missing, until = list[dict[str, Any]](), "", time.monotonic() + PART_S
    # Not `lower()`, which makes some letters longer ("İ") and so shifts what is after them.
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    for number, trial in enumerate(trials[skip:], skip):
        if len(hits) == MAX_HITS or time.monotonic() > until:
            return SearchResult(hits, number - skip, number, missing)
        try:
            segments = reader.load(trial.group, trial.number).segments
        except RunError as error:
            missing = str(error)
            continue
        for whole in (decode(segment.tokens.tolist()) for segment in segments):
            if found := pattern.search(whole):
                start, stop = found.span()
                hits.append(
                    {
                        "trial": trial,
                        "before": whole[max(0, start - SURROUNDINGS) : start],
                        "match": found[0],
                        "after": whole[stop : stop + SURROUNDINGS],
                    }
                )
                break
    return SearchResult(hits, len(trials[skip:]), 0, missing)


# The page of a group with its trials, and the page of a turn with its tokens.

MAX_SIDE_BY_SIDE = 64
"""Largest number of trials on the page of a group."""
MAX_TOKENS = 1000
"""Largest number of tokens on one page of a turn."""
LONG_TEXT = 700
"""Number of characters above which a text is folded."""


def group(request: PageRequest) -> Markup:
    """Return the page of a group, with its trials side by side."""
    number = request.numbers["group"]
    decode, fault = decoder_of(request.run)
    with RunReader(request.run) as reader:
        found = reader.group(number)
        credit, unknown = _credit(request, found.step)
        shown, missing = [], [fault]
        all_listed = reader.trials_of([number])
        for listed in all_listed[:MAX_SIDE_BY_SIDE]:
            try:
                trial = reader.load(number, listed.number)
                known = credit.get(f"{number}/{listed.number}", ())
                shown.append(shown_trial(trial, decode, found.step, known))
            except RunError as error:
                missing.append(str(error))
        neighbours = reader.groups_of(found.step) if found.step is not None else [found]
        numbers = [each.number for each in neighbours]
        position = numbers.index(number)
        frame = request.frame(
            reader,
            f"group {number}",
            above=_step_link(found.step),
            before=f"group/{numbers[position - 1]}" if position > 0 else "",
            after=f"group/{numbers[position + 1]}" if position + 1 < len(numbers) else "",
        )
    return fill(
        "group.html",
        frame=frame,
        group=found,
        trials=shown,
        num_trials=len(all_listed),
        most=MAX_SIDE_BY_SIDE,
        missing=[sentence for sentence in dict.fromkeys([*missing, unknown]) if sentence],
        marked=request.number("trial", -1),
        long_text=LONG_TEXT,
    )


def turn(request: PageRequest) -> Markup:
    """Return the page of one turn with its tokens."""
    number, index, turn_index = (request.numbers[name] for name in ("group", "trial", "turn"))
    decode, fault = decoder_of(request.run)
    with RunReader(request.run) as reader:
        step = reader.group(number).step
        trial = reader.load(number, index)
    if turn_index >= len(trial.turns):
        raise RunError(f"trial {index} of group {number} has {len(trial.turns)} turns")
    credit, unknown = _credit(request, step)
    shown = shown_trial(trial, decode, step, credit.get(f"{number}/{index}", ()))
    turns = [turn for episode in shown.episodes for turn in episode.turns]
    own = turns[turn_index]
    assert isinstance(own, ShownTurn)
    segment = trial.segments[trial.turns[turn_index].segment]
    tokens = list(shown_tokens(trial.turns[turn_index], segment, decode, step))
    address = f"group/{number}/trial/{index}/turn/"
    frame = request.frame(
        None,
        f"trial {index}, turn {turn_index + 1}",
        above=[*_step_link(step), (f"group {number}", f"group/{number}?trial={index}")],
        before=f"{address}{turn_index - 1}" if turn_index else "",
        after=f"{address}{turn_index + 1}" if turn_index + 1 < len(turns) else "",
    )
    first = request.number("first", 0)
    stop = first + MAX_TOKENS
    return fill(
        "turn.html",
        frame=frame,
        trial=shown,
        turn=own,
        tokens=tokens[first:stop],
        first=first,
        num_tokens=len(tokens),
        more=f"{frame.home}{address}{turn_index}?first={stop}" if stop < len(tokens) else "",
        missing=[sentence for sentence in (fault, unknown) if sentence],
        info=_info_rows(own.info),
        long_text=LONG_TEXT,
    )


def _step_link(step: int | None) -> list[tuple[str, str]]:
    """Return the label and address of a step's page, for the links above a page; an empty list
    without a step.
    """
    return [(f"step {step}", f"step/{step}")] if step is not None else []


def _credit(request: PageRequest, step: int | None) -> tuple[dict[str, list[TurnCredit]], str]:
    """Return the returns and advantages of a step's turns by trial ("GROUP/TRIAL"), and the reason
    if they are not known.
    """
    if step is None:
        return {}, ""
    found, fault = request.credits.get(request.run, step)
    return {name: [TurnCredit(*pair) for pair in pairs] for name, pairs in found.items()}, fault


def _info_rows(info: str) -> list[tuple[str, str]]:
    """Return the environment's information by name; a text that is no JSON object is one row."""
    try:
        parsed = json.loads(info or "{}")
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return [("info", info)]
    return [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in parsed.items()
    ]


def decoder_of(run: RunDirectory) -> tuple[Decode, str]:
    """Return the decoder of a run's tokens and ""; or, if there is none, one that writes their ids,
    and the reason.
    """
    return _decode(run.policy, file_state(run.policy / "tokenizer.json"))


@lru_cache(maxsize=8)
def _decode(policy: Path, _state: tuple[int, int]) -> tuple[Decode, str]:
    """Load a decoder; `_state` is only a key of the cache, which changes with the tokenizer's
    file.
    """
    try:
        return load_chat(policy).decode, ""
    except MageError as error:
        fault = f"Tokens are shown by their numbers: {error}"
        return lambda tokens: " ".join(f"⟨{token}⟩" for token in tokens), fault
