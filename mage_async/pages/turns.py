"""The turns of a trial as a person reads them, and the tokens of a turn with all that is known.

Shapes: `T` tokens of a segment.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mage_async.policy_version import Provenance, VersionRun
from mage_async.report.trial_chat import TEMPLATE_MARKS
from mage_async.tasks.seats import num_seats
from mage_async.trajectory import Kind, Segment, Trial, Turn

_OPENING, _CLOSING = re.compile(r"<(action|remark)>$"), re.compile(r"^</(action|remark)>")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of a completion."""

    text: str
    number: int
    """Its id."""
    is_sampled: bool
    """Drawn by the policy; what a template forces is not, and not trained on."""
    logprob: float
    """In nats, under the policy that drew it."""
    version: int | None
    kv: int | None
    """The oldest version among the cached keys it was drawn with."""
    provenance: Provenance | None
    staleness: int | None
    """Version being trained minus `version`, in steps; None before a step trains it."""

    @property
    def probability(self) -> float:
        """Of drawing this token."""
        return math.exp(self.logprob)


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """What a step made of a turn; None where that is not known."""

    return_to_go: float | None = None
    advantage: float | None = None
    """All sampled tokens of the turn have it."""


UNKNOWN = TurnCredit()


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn: what the agent was told since its last one, and what it answered."""

    number: int
    """Position among all turns of the trial."""
    kind: str
    episode: int
    told: str
    answer: str
    action: str
    """What was parsed from the answer."""
    reward: float
    is_valid: bool
    num_tokens: int
    logprob: float
    """Sum over the sampled tokens, in nats."""
    staleness: int | None
    """The largest of its tokens."""
    info: str
    """What the environment said of the step, as JSON."""
    expert: str
    """What an expert would have done; empty where none was asked or knew."""
    credit: TurnCredit


@dataclass(frozen=True, slots=True)
class ShownTrial:
    """A trial by episodes."""

    number: int
    rewards: Sequence[float]
    episodes: Sequence[Sequence[ShownTurn]]
    num_tokens: int
    duration_s: float
    memory: int | None
    """Version of the graph memory that it was told strategies of; None: of none."""
    seat: int | None
    """Its seat, where the policy played both; None: the agent had one, which the group says."""
    rest: str
    """What the agent was told after its last answer."""


def shown_trial(
    trial: Trial, decode: Decode, step: int | None, credit: Sequence[TurnCredit] = ()
) -> ShownTrial:
    """A trial for reading.

    Args:
        step: that trained it; None: none yet.
        credit: of every turn in order; empty where that is not known.
    """
    turns = list(_shown_turns(trial, decode, step, credit or [UNKNOWN] * len(trial.turns)))
    last = trial.turns[-1] if trial.turns else None
    rest = trial.segments[last.segment].tokens[last.stop :] if last else ()
    return ShownTrial(
        number=trial.index,
        rewards=trial.episode_rewards(),
        episodes=[
            [turn for turn in turns if turn.episode == episode]
            for episode in range(trial.num_played())
        ],
        num_tokens=trial.num_tokens(),
        duration_s=trial.duration_s,
        memory=trial.memory,
        seat=trial.task.seat if num_seats(trial.task.member) > 1 else None,
        rest=_words(rest, decode),
    )


def shown_tokens(
    turn: Turn, segment: Segment, decode: Decode, step: int | None
) -> Iterator[ShownToken]:
    """The tokens of a turn's completion, in order."""
    for place in range(turn.start, turn.stop):
        number, is_sampled = int(segment.tokens[place]), bool(segment.is_sampled[place])
        run = _run_at(segment.versions, place) if is_sampled else None
        yield ShownToken(
            text=decode([number]),
            number=number,
            is_sampled=is_sampled,
            logprob=float(segment.logprobs[place]),
            version=run.policy if run else None,
            kv=run.kv if run else None,
            provenance=run.provenance if run else None,
            staleness=step - 1 - run.policy if run and step is not None else None,
        )


def _shown_turns(
    trial: Trial, decode: Decode, step: int | None, credit: Sequence[TurnCredit]
) -> Iterator[ShownTurn]:
    ends = dict.fromkeys(range(len(trial.segments)), 0)
    experts = {step.turn: step.action for step in trial.expert_steps}
    for number, turn in enumerate(trial.turns):
        segment = trial.segments[turn.segment]
        tokens, sampled = segment.tokens, segment.is_sampled[turn.start : turn.stop]
        runs = {_run_at(segment.versions, place) for place in range(turn.start, turn.stop)}
        oldest = min((run.policy for run in runs if run is not None), default=None)
        is_known = step is not None and oldest is not None
        yield ShownTurn(
            number=number,
            kind=turn.kind.name.lower() if turn.kind is not Kind.ACT else "",
            episode=turn.episode,
            told=_words(tokens[ends[turn.segment] : turn.start], decode),
            answer=_words(tokens[turn.start : turn.stop], decode),
            action=turn.action,
            reward=turn.reward,
            is_valid=turn.is_valid,
            num_tokens=int(sampled.sum()),
            logprob=float(segment.logprobs[turn.start : turn.stop][sampled].sum()),
            staleness=step - 1 - oldest if is_known else None,
            info=turn.info,
            expert=experts.get(number, ""),
            credit=credit[number],
        )
        ends[turn.segment] = turn.stop


def _run_at(runs: Sequence[VersionRun], place: int) -> VersionRun | None:
    """The run that a token lies in; None before the first."""
    return next((run for run in reversed(runs) if run.start <= place), None)


def _words(tokens: Sequence[int], decode: Decode) -> str:
    """Text without the marks of a chat template, and without forced tags around the answers."""
    said = TEMPLATE_MARKS.sub(" ", decode([int(token) for token in tokens])).strip()
    return _CLOSING.sub("", _OPENING.sub("", said)).strip()
