"""Prepare trials for reading: their text as observations and completions, and the tokens of a turn.

Shapes: `T` tokens of a segment.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mage_async.policy_version import Provenance, VersionRun
from mage_async.tasks.task_stream import num_seats
from mage_async.trajectory import Decode, Kind, Segment, Trial, Turn, turn_texts

_TEMPLATE_MARKS = re.compile(
    r"<\|im_start\|>\w+\n?|<\|start_header_id\|>\w+<\|end_header_id\|>|<start_of_turn>\w+\n?"
    r"|<end_of_turn>|<\|[^|<>]*\|>|</?think>|</?s>|<[be]os>|\[/?INST\]"
)
"""Marks of chat templates, which a reader need not see."""
_FORCED_TAGS = re.compile(r"^</(action|remark)>|<(action|remark)>$")
"""Tags that were written for the policy around a completion (`transcript.forced_tags`): they stand
at the ends of the observations."""


def readable(text: str) -> str:
    """Return text without the marks of a chat template and without forced tags at its ends."""
    stripped = _TEMPLATE_MARKS.sub(" ", text).strip()
    return _FORCED_TAGS.sub("", stripped).strip()


@dataclass(frozen=True, slots=True)
class ReadableTurn:
    """Hold a turn as chat: what was observed, what the policy answered, and the reward."""

    episode: int
    kind: str
    """Name of the `Kind` in lower case; "" for an action."""
    observation: str
    completion: str
    reward: float
    is_valid: bool


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """Hold return and advantage that a training step computed for a turn; None if not known."""

    return_to_go: float | None = None
    advantage: float | None = None
    """Advantage of each sampled token of the turn."""


@dataclass(frozen=True, slots=True)
class ShownTurn(ReadableTurn):
    """Hold a turn as chat, with its tokens, staleness, credit and diagnostics."""

    number: int
    """Position among all turns of the trial."""
    action: str
    """The action parsed from the completion."""
    num_tokens: int
    logprob: float
    """Sum of the log-probs of the sampled tokens, in nats."""
    staleness: int | None
    """Largest staleness of its tokens; None before a step trains it."""
    info: str
    """Diagnostics that the environment adds to the step, as JSON."""
    alternative: str
    """Action that an adviser proposed; "" if there was none."""
    credit: TurnCredit


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """Hold the turns of an episode as chat, its reward, and the text after them."""

    reward: float
    turns: Sequence[ReadableTurn]
    ending: str
    """Text after the last completion of the episode."""


@dataclass(frozen=True, slots=True)
class ShownTrial:
    """Hold a trial of a group by episodes."""

    number: int
    rewards: Sequence[float]
    episodes: Sequence[ShownEpisode]
    num_tokens: int
    duration_s: float
    guidance_version: int | None
    """Version of the guidance (advice from earlier tasks) in the first prompt; None if there was no
    guidance."""
    seat: int | None
    """Seat of the trial, if the policy played both seats of its group's task; else None, because
    all trials of the group then have the seat of the group."""


@dataclass(frozen=True, slots=True)
class SampleTrial:
    """Hold a trial of a run's `trials.jsonl` by episodes.

    Rewards of episodes are divided by the number of units of the environment, such as rounds;
    rewards of turns are not.
    """

    version: int
    split: str
    member: str
    rewards: Sequence[float]
    episodes: Sequence[ShownEpisode]


def shown_trial(
    trial: Trial, decode: Decode, step: int | None, credit: Sequence[TurnCredit] = ()
) -> ShownTrial:
    """Return a trial for reading.

    Args:
        step: Step that trained the trial; None if none has yet.
        credit: Return and advantage that the step computed for each turn; empty if they are not
            known.
    """
    texts, ending = turn_texts(trial, decode)
    alternatives = {each.turn: each.action for each in trial.alternatives}
    turns = []
    for number, (turn, text) in enumerate(zip(trial.turns, texts, strict=True)):
        segment = trial.segments[turn.segment]
        sampled = segment.is_sampled[turn.start : turn.stop]
        runs = {_run_at(segment.versions, index) for index in range(turn.start, turn.stop)}
        oldest = min((run.policy for run in runs if run is not None), default=None)
        # Step n trains version n - 1, so a token's staleness is n - 1 minus its version.
        turns.append(
            ShownTurn(
                number=number,
                kind=turn.kind.name.lower() if turn.kind is not Kind.ACT else "",
                episode=turn.episode,
                observation=readable(text.observation),
                completion=readable(text.completion),
                action=turn.action,
                reward=turn.reward,
                is_valid=turn.is_valid,
                num_tokens=int(sampled.sum()),
                logprob=float(segment.logprobs[turn.start : turn.stop][sampled].sum()),
                staleness=None if step is None or oldest is None else step - 1 - oldest,
                info=turn.info,
                alternative=alternatives.get(number, ""),
                credit=credit[number] if credit else TurnCredit(),
            )
        )
    rewards = trial.episode_rewards()
    return ShownTrial(
        number=trial.index,
        rewards=rewards,
        episodes=_by_episode(turns, ending, rewards[: trial.num_played()]),
        num_tokens=trial.num_tokens(),
        duration_s=trial.duration_s,
        guidance_version=trial.memory,
        seat=trial.task.seat if num_seats(trial.task.member) > 1 else None,
    )


def sample_trial(sample: Mapping[str, Any], units: int) -> SampleTrial:
    """Return a line of `trials.jsonl` for reading; see `trial_as_dict`."""
    turns = [
        ReadableTurn(
            turn["episode"],
            "" if turn["kind"] == "act" else turn["kind"],
            readable(turn["observation"]),
            readable(turn["completion"]),
            turn["reward"],
            turn["is_valid"],
        )
        for turn in sample["turns"]
    ]
    rewards = [reward / units for reward in sample["reward_by_episode"]]
    return SampleTrial(
        version=sample["version"],
        split=sample.get("split", "train").replace("heldout", "held-out"),
        member=sample["member"],
        rewards=rewards,
        episodes=_by_episode(turns, sample["ending"], rewards),
    )


def _by_episode(
    turns: Sequence[ReadableTurn], ending: str, rewards: Sequence[float]
) -> list[ShownEpisode]:
    """Group turns by episode.

    The observation before an episode's first completion begins with the outcome of the episode
    before. It is cut where it announces the new episode, and the first part becomes the ending of
    the episode before.
    """
    episodes: list[ShownEpisode] = []
    for number, reward in enumerate(rewards):
        played = [turn for turn in turns if turn.episode == number]
        if played and episodes:
            text = played[0].observation  # outcome, then "episode N" and what begins it
            cut = max(0, text.rfind(f"episode {number + 1}"))
            played[0] = replace(played[0], observation=text[cut:])
            episodes[-1] = replace(episodes[-1], ending=text[:cut].strip())
        episodes.append(ShownEpisode(reward, played, ""))
    if turns:  # episodes that were not played, because an earlier one was won, have no text
        last = turns[-1].episode
        episodes[last] = replace(episodes[last], ending=readable(ending))
    return episodes


@dataclass(frozen=True, slots=True)
class ShownToken:
    """Hold a token of a completion: its text, log-prob and provenance."""

    text: str
    number: int
    """Id of the token."""
    is_sampled: bool
    """Whether the policy sampled the token; the template forces the others, which are not trained
    on."""
    logprob: float
    """Log-prob under the policy that sampled the token, in nats."""
    version: int | None
    """Policy version that sampled the token; None if it was not sampled."""
    kv_version: int | None
    """Oldest policy version among the cached keys and values that the token was sampled with; None
    if it was not sampled."""
    provenance: Provenance | None
    """How `version` is known; None if the token was not sampled."""
    staleness: int | None
    """Version being trained minus `version`, in steps; None before a step trains it."""

    @property
    def probability(self) -> float:
        """Probability of drawing this token."""
        return math.exp(self.logprob)

    @property
    def surprise(self) -> str:
        """How unlikely the token was: from 0, certain, to 1, a thousand to one."""
        # 6.9 nats are a thousand to one.
        return f"{min(1.0, max(0.0, -self.logprob / 6.9)):.2f}"


def shown_tokens(
    turn: Turn, segment: Segment, decode: Decode, step: int | None
) -> Iterator[ShownToken]:
    """Yield the tokens of a turn's completion in order; `step` as in `shown_trial`."""
    for index in range(turn.start, turn.stop):
        number, is_sampled = int(segment.tokens[index]), bool(segment.is_sampled[index])
        run = _run_at(segment.versions, index) if is_sampled else None
        yield ShownToken(
            text=decode([number]),
            number=number,
            is_sampled=is_sampled,
            logprob=float(segment.logprobs[index]),
            version=run.policy if run else None,
            kv_version=run.kv if run else None,
            provenance=run.provenance if run else None,
            staleness=step - 1 - run.policy if run and step is not None else None,
        )


def _run_at(runs: Sequence[VersionRun], index: int) -> VersionRun | None:
    """Return the `VersionRun` (consecutive tokens that one version sampled) of a token; None if the
    token lies before the first run.

    Args:
        runs: All of a segment, in order; each ends where the next one starts.
        index: Index of the token in the segment.
    """
    return next((run for run in reversed(runs) if run.start <= index), None)
