"""Report whether a run is alive and what it waits for: progress to the next step, dropped groups,
and whether it can learn.

`ProgressCounts` counts what reaches the learner, `Progress` is a snapshot of it, and `sentence`
puts a snapshot into words, for the terminal and for `mage doctor`. `Signal` examines the first
batches for faults that keep a run from learning anything. Nothing here waits or reads a clock:
every time is an argument, in seconds of any clock that never goes back.
"""

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mage_async.config.schema import Config
from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import Environment
from mage_async.environments.mix import Mix, component_of
from mage_async.results.metrics import earning_episodes
from mage_async.results.run_files import Event, run_history
from mage_async.trajectory import Group, Kind, Trial, num_decimals

WINDOW_S = 30.0
"""Seconds over which the speed of sampling is measured."""
FRESH_S = 30.0
"""If the lock of a run cannot be read, the run counts as alive for so many seconds after the last
write of its files.
"""
KNOWN_SHARE = 0.25
"""Share of a batch that must have arrived before the mean number of turns of a trial is taken for
known. Earlier it is that of the shortest trials."""
PACE_STEPS = 20
"""Number of newest steps from which the remaining time is estimated."""
MAX_NOTES_SHOWN = 10
"""Number of notes that `mage doctor` prints of a run without a step, the latest ones."""
FIRST_STEPS = 10
"""Number of steps that `Signal` examines. In later steps equal returns are the mark of a solved
task.
"""
ENOUGH_TRIALS = 16
"""Number of trials below which `Signal` reports nothing, because so few may be alike by chance."""

RARE = 0.03
"""Rewards are rare if a smaller share of episodes earns any reward. Then a group of eight trials of
three episodes has less than one such episode on average."""
ENOUGH_EPISODES = 300
"""Number of episodes before which rewards are not reported as rare."""
RARE_CURES = (
    "begin with easier tasks (environment.ladder), or reward partial progress; raise "
    "admission.trials_per_group; where advantage.baseline is by group, replace groups that earn "
    "the same (admission.replaced_groups)"
)
"""What to do where rewards are rare."""


# Kinds of reasons for which groups are dropped. The reason of a drop names its task, seed and turn,
# so that nearly every reason is different; kinds of reasons can be counted, and each has a cure.


@dataclass(frozen=True, slots=True)
class DropKind:
    """Describe a kind of reason for which groups are dropped."""

    name: str
    """A few words that complete "dropped: ..."."""
    cure: str
    """What to do, as a sentence; "" if it is not known, or if the reason itself names it."""


_KINDS = [
    (r"trial\.room", "trial.room is too small", ""),
    (
        r"engine\.max_tokens",
        "outgrew the context",
        "Raise engine.max_tokens, or shorten trials: lower trial.episodes, "
        "transcript.max_action_tokens or the environment's observations.",
    ),
    (
        r"was not sampled within",
        "a turn took too long",
        "Raise engine.turn_deadline_s, or lower engine.max_contexts, so that fewer turns "
        "share the engine.",
    ),
    (
        r"missed its deadline",
        "missed its deadline",
        "Raise admission.grant_deadline_s, or shorten groups: lower trial.episodes or "
        "admission.trials_per_group.",
    ),
    (
        r"took longer than environment\.step_deadline_s",
        "a call of the environment hung",
        "Find out why the call does not return, or raise environment.step_deadline_s.",
    ),
    (r"environment\.idle_s", "an object was idle for too long", "Raise environment.idle_s."),
    (
        r"cannot be sent",
        "too large to send",
        "Shorten what the environment answers, or lower trial.episodes.",
    ),
    (
        r"reported a fault of its infrastructure",
        "the environment's infrastructure failed",
        "Look at the server or the container that the environment uses; if it is down for a "
        "longer time, raise environment.retries.",
    ),
    (
        r"SGLang died",
        "the engine died",
        "Read the actors' logs in the folder `logs` of the run: the engine wrote there why it "
        "ended.",
    ),
    (
        r"worker process",
        "a worker process ended",
        "Read the actors' logs in the folder `logs` of the run: the environment's process "
        "wrote there why it ended.",
    ),
    (
        r"\brun\(\) must return",
        "a call returned a wrong value",
        "Let the program return a finite number at the end of each episode.",
    ),
    (
        r"must return|must be an? `",
        "a call returned a wrong value",
        "Return what docs/your_environment.md says that the method returns.",
    ),
    (
        r"the adviser raised \w+",
        "the adviser raised",
        "Mend the adviser of the method: the reason names the task and the turn.",
    ),
    (
        r"without a call of the policy",
        "the program did not call the policy",
        "Give its client the `base_url` and the `api_key` that it gets for each episode.",
    ),
    (
        r"call of the policy was refused",
        "the program raised after a refused call",
        "Change the request as the answer with status 400 says.",
    ),
    (
        r"last answer was cut at",
        "the program raised after a cut answer",
        "Raise transcript.max_action_tokens or the call's own limit, or let the program read "
        "answers that are cut.",
    ),
    (
        r"\brun\(\) raised \w+",
        "the environment raised",
        "Mend the program, or let it return a low reward for what the model itself did wrong.",
    ),
    (
        r"raised \w+",
        "the environment raised",
        "Mend the environment: play the named task by `mage play`, which makes the same calls.",
    ),
    (r"^over age$", "over age", ""),
    (r"^all trials earned the same$", "earned the same", ""),
]
"""For each kind of drop a pattern of its reasons, which are texts of a `TrialFault` or of the
ledger, and the name and cure of its `DropKind`. The first pattern that matches counts.
"""
_VARIABLE_PARTS = re.compile(r"""'[^']*'|"[^"]*"|0x[0-9a-f]+|\d+(?:[.,]\d+)*""")
"""Parts in which reasons of one kind differ: quoted names, addresses and numbers."""
MAX_KINDS_NOTED = 20
"""Largest number of kinds of drops that are noted: reasons are texts of foreign code, and could all
be different.
"""


def drop_kind(reason: str) -> DropKind:
    """Return the kind of a reason. Without a known pattern the reason makes a kind of its own: its
    first 60 characters, with "…" in place of names and numbers.
    """
    for pattern, name, cure in _KINDS:
        if re.search(pattern, reason):
            return DropKind(name, cure)
    return DropKind(f"{printable(_VARIABLE_PARTS.sub('…', reason)):.60}", "")


PLAYED_AGAIN = "the trial is played again"
"""Part of a note on a fault after which the trial is played again."""
_PLACE = re.compile(r"\((\S[^()]*(?:\([^()]*\)[^()]*)*, line \d+), in ")
"""File and line in the reason of a call that raised; a folder may have parentheses in its name."""


def place_in_code(reason: str) -> str:
    """Return file and line of the user's code that a reason names; "" if it names none."""
    found = _PLACE.search(reason)
    return found[1] if found else ""


def printable(text: str) -> str:
    """Return a text with its control characters made visible, as one line for a terminal."""
    # `ascii` puts quotes around the escape, which are cut off.
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def dropped_by_kind(dropped_by_reason: Mapping[str, int]) -> dict[str, int]:
    """Return the number of dropped groups by the name of their kind, the most frequent first."""
    by_kind = Counter[str]()
    for reason, count in dropped_by_reason.items():
        by_kind[drop_kind(reason).name] += count
    return dict(by_kind.most_common())


# Progress to the next step.


@dataclass(frozen=True, slots=True)
class Progress:
    """Hold a snapshot of the progress to the next step. A run writes it to `times.json`, as plain
    data.
    """

    step: int
    """Number of the next step, from 1."""
    steps: int
    """Number of steps of the whole run."""
    doing: str
    """State of the learner, as its time accounting calls it."""
    doing_s: float
    """Seconds since the learner entered that state."""
    num_actors: int
    """Number of actors that are connected and not silent."""
    num_loading: int
    """Number of these actors that still load their engine."""
    groups_in_flight: int
    """Number of groups that were granted to actors and are neither trained nor dropped."""
    trials_arrived: int
    """Number of trials of the next batch that have arrived."""
    trials_needed: int
    """Number of trials of a batch."""
    turns: int
    """Number of turns that the actors have sampled since the learner started."""
    tokens: int
    """Number of tokens of these turns."""
    turns_per_s: float
    """Turns per second in the last `WINDOW_S`, like `tokens_per_s`."""
    tokens_per_s: float
    mean_return: float | None
    """Mean return of an episode per unit (round, hand or dial) over the latest trials; None before
    the first."""
    valid_share: float | None
    """Share of valid actions in the latest trials; None before the first."""
    dropped: dict[str, int]
    """Number of groups dropped since the run began, by the name of their kind."""
    due_s: float | None
    """Seconds until the batch is complete; None if that is not known yet."""
    is_due_bound: bool
    """Whether `due_s` is computed from the longest trial that the environment allows, because too
    few trials have arrived yet. At the present pace it is an upper bound.
    """
    played_again: int = 0
    """Number of trials that the actors have played again after a fault, since the learner started.
    """
    groups_ended: int = 0
    """Number of groups that were trained or dropped since the run began."""
    drop_place: str = ""
    """File and line of the user's code that the reason of most dropped groups names."""


_DOING = {
    "batch not full": "waits for trials",
    "training": "trains on its batch",
    "publishing": "publishes its weights",
    "journal sync": "writes the journal",
    "checkpoint": "writes a checkpoint",
    "log-prob check": "compares its log-probs with those of the engines, once, after the last step",
    "peer gone": "waits for actors that have lost their connection",
}
"""States of the learner in the words of `sentence`; others are printed as they are."""


def sentence(progress: Progress) -> str:
    """Return one line that says what a run waits for, how far it is, and when it goes on."""
    doing = _DOING.get(progress.doing, progress.doing)
    head = f"step {progress.step}/{progress.steps} {doing}, for {time_in_words(progress.doing_s)}"
    if not progress.num_actors:
        return "; ".join([f"{head}: no actor is connected yet", *_dropped(progress)])
    batch = "" if progress.doing == "batch not full" else " of the next batch"
    parts = [
        f"{head}: {progress.trials_arrived} of {progress.trials_needed} trials{batch} are in, "
        f"{progress.groups_in_flight} groups in flight"
    ]
    if progress.num_loading == progress.num_actors:
        parts.append("every actor still loads its engine")
    elif not progress.turns:
        # An SGLang server is ready only about a minute after its actor has begun to play.
        parts.append("no turn was sampled yet: an engine that is starting answers when it is ready")
    else:
        parts.append(
            f"{progress.turns:,} turns and {progress.tokens:,} tokens so far, "
            f"{progress.turns_per_s:.1f} turns/s, {progress.tokens_per_s:.0f} tokens/s"
        )
        if progress.doing == "batch not full" and progress.turns and not progress.turns_per_s:
            parts.append(
                f"nothing was sampled in the last {WINDOW_S:g} s: calls of the environment, or the "
                "engine, do not answer, or other programs take the processor"
            )
    if progress.mean_return is not None:
        digits = num_decimals([progress.mean_return])
        parts.append(f"return {progress.mean_return:+.{digits}f}")
    if progress.valid_share is not None:
        parts.append(f"{progress.valid_share:.0%} of actions valid")
    if progress.played_again:
        parts.append(f"{progress.played_again:,} trials played again after a fault")
    parts += _dropped(progress)
    if progress.due_s is not None:
        due = f"complete in about {time_in_words(progress.due_s)}"
        if progress.is_due_bound:
            # No bound is promised, because the pace changes, above all on a busy machine.
            due += ", if every trial is as long as it may be and the pace stays"
        parts.append(due)
    return "; ".join(parts)


def _dropped(progress: Progress) -> list[str]:
    """Return the clause of the dropped groups, if there are any."""
    kinds = ", ".join(f"{count} {name}" for name, count in progress.dropped.items())
    if not kinds:
        return []
    of = f" of {progress.groups_ended:,}" if progress.groups_ended else ""
    place = f", {progress.drop_place}" if progress.drop_place else ""
    return [f"{sum(progress.dropped.values()):,}{of} groups dropped ({kinds}{place})"]


def seconds_left(metrics: Sequence[Mapping[str, Any]], num_steps: int) -> float | None:
    """Return the seconds until the last step at the pace of the newest ones; None before step 2.

    Args:
        metrics: those of steps, oldest first; some steps may be left out.
        num_steps: number of steps of the run.
    """
    if len(metrics) < 2:
        return None
    first, last = metrics[-PACE_STEPS - 1 :][0], metrics[-1]
    pace = (last["time_s"] - first["time_s"]) / (last["step"] - first["step"])
    return float(pace * (num_steps - last["step"]))


def time_in_words(number: float) -> str:
    """Return a time in words: 41.3 -> "41 s", 312 -> "5:12 min", 7265 -> "2:01 h"."""
    minutes, rest = divmod(round(number), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes_of_hour:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def _has_program(environment: Environment) -> bool:
    """Return whether the environment, or a part of a mix, is played by a program."""
    if isinstance(environment, Mix):
        return any(isinstance(part.environment, AgentTasks) for part in environment.parts)
    return isinstance(environment, AgentTasks)


@dataclass(slots=True)
class ProgressCounts:
    """Count the heartbeats, trials and drops that reach the learner, for snapshots of its progress.

    The learner calls a method for each of these, so every call is cheap.
    """

    _totals: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Numbers of turns, tokens and trials played again in the last heartbeat of each actor, by its
    name.
    """
    _turns: int = 0
    """Number of turns over all actors and their restarts."""
    _tokens: int = 0
    """Number of tokens over all actors and their restarts."""
    _played_again: int = 0
    """Number of trials played again over all actors and their restarts."""
    _latest: deque[tuple[str, float, int, int, int]] = field(default_factory=deque)
    """For each of the latest trials, as many as a batch has: member of its task, mean reward of an
    episode, number of actions, number of invalid actions, number of turns.
    """
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)
    """For each snapshot in the last `WINDOW_S`: its time, and the numbers of turns and tokens until
    then.
    """
    _version: int = -1
    """Version at the last snapshot."""
    _played_again_at_first: int = 0
    """Number of trials that had been played again at the first snapshot of that version."""
    _known_kinds: set[str] = field(default_factory=set)
    """Names of the kinds of drops that were noted."""
    _is_lateness_noted: bool = False
    _is_cut_noted: bool = False

    def add_heartbeat(self, actor: str, counters: Mapping[str, float]) -> None:
        """Add the turns, tokens and repeated trials that an actor's heartbeat reports. The actor
        counts them from its start, and may have been restarted since its last heartbeat.
        """
        turns = int(counters.get("num_completions", 0))
        tokens = int(counters.get("num_generated_tokens", 0))
        played_again = int(counters.get("num_played_again", 0))
        turns_before, tokens_before, played_before = self._totals.get(actor, (0, 0, 0))
        if turns < turns_before:  # the actor was restarted, and counts from zero
            turns_before, tokens_before, played_before = 0, 0, 0
        self._totals[actor] = turns, tokens, played_again
        self._turns += turns - turns_before
        self._tokens += max(0, tokens - tokens_before)
        self._played_again += max(0, played_again - played_before)

    def add_trial(self, trial: Trial) -> None:
        """Add a trial that has arrived for the first time."""
        rewards = trial.episode_rewards()
        mean_return = sum(rewards) / max(1, len(rewards))
        counts = trial.num_actions(), trial.num_invalid(), len(trial.turns)
        self._latest.append((trial.task.member, mean_return, *counts))

    def first_drop(self, reason: str) -> str | None:
        """Return a note if no group was dropped for this kind of reason before, otherwise None."""
        kind = drop_kind(reason)
        if kind.name in self._known_kinds or len(self._known_kinds) == MAX_KINDS_NOTED:
            return None
        self._known_kinds.add(kind.name)
        return f"a group is dropped: {printable(reason).rstrip('.')}. {kind.cure}".rstrip()

    def first_cut(self, trial: Trial, most: int | None) -> str | None:
        """Return a note the first time that half of a trial's actions, or more, were cut off,
        otherwise None.

        Args:
            most: Number of tokens at which an action is cut off; None if none is.
        """
        if self._is_cut_noted or most is None:
            return None
        cut = sum(turn.is_cut_at(most) for turn in trial.turns)
        if not cut or 2 * cut < trial.num_actions():
            return None
        self._is_cut_noted = True
        return (
            f"{cut} of the {trial.num_actions()} answers of a trial were cut at "
            f"transcript.max_action_tokens = {most} before they were complete, and are invalid: "
            "raise it. A program that reads one call of a tool at a time sends "
            "`parallel_tool_calls=False`"
        )

    def first_missed_deadline(self, deadline_s: float, most: int) -> str | None:
        """Return a note the first time that a group misses its deadline, otherwise None.

        Args:
            deadline_s: Value of `admission.grant_deadline_s`.
            most: Number of missed deadlines at which a group is dropped.
        """
        if self._is_lateness_noted:
            return None
        self._is_lateness_noted = True
        return (
            f"a group was not played within admission.grant_deadline_s = {deadline_s:g} s and is "
            f"granted again; at {most} missed deadlines it is dropped. Raise it, or shorten "
            "groups: lower trial.episodes or admission.trials_per_group. If calls of the "
            "environment hang, make environment.step_deadline_s much shorter than this deadline, "
            "so that the hanging call is named."
        )

    def snapshot(
        self,
        now: float,
        config: Config,
        environment: Environment,
        *,
        version: int,
        doing: tuple[str, float],
        actors: tuple[int, int],
        groups_in_flight: int,
        trials: tuple[int, int],
        under_way: tuple[int, int],
        dropped_by_reason: Mapping[str, int],
    ) -> Progress:
        """Return the progress to the next step.

        Args:
            version: Number of steps published so far.
            doing: State of the learner, and the seconds since it entered that state.
            actors: Number of actors that are connected, and number of these that still load their
                engine.
            trials: Number of trials of the next batch that have arrived, and number of trials of a
                batch.
            under_way: Number of trials that have not arrived, of all groups in flight, and number
                of turns that they have had.
        """
        arrived, needed = trials
        if version != self._version:
            self._version, self._played_again_at_first = version, self._played_again
        while len(self._latest) > needed:
            self._latest.popleft()
        turns_per_s, tokens_per_s = self._speed(now)
        due_s, is_bound = None, False
        if doing[0] == "batch not full" and arrived < needed:
            is_bound = len(self._latest) < KNOWN_SHARE * needed
            most_turns = config.trial.most_completions(environment.facts.max_turns)
            # The limit of a program's calls is far above their usual number, and gives no bound.
            if not (is_bound and _has_program(environment)):
                turns_each = most_turns if is_bound else 0
                due_s = self._due_s(needed - arrived, under_way, turns_per_s, turns_each)
        places = Counter[str]()
        for reason, count in dropped_by_reason.items():
            places[place_in_code(reason)] += count
        del places[""]
        num_trained = version * config.admission.groups_per_step
        returns = [
            # In a mix each environment has units of its own.
            mean_return / component_of(environment, member).facts.units
            for member, mean_return, *_ in self._latest
        ]
        num_actions = sum(actions for _, _, actions, _, _ in self._latest)
        num_invalid = sum(invalid for _, _, _, invalid, _ in self._latest)
        return Progress(
            step=min(version + 1, config.learner.steps),
            steps=config.learner.steps,
            doing=doing[0],
            doing_s=doing[1],
            num_actors=actors[0],
            num_loading=actors[1],
            groups_in_flight=groups_in_flight,
            trials_arrived=arrived,
            trials_needed=needed,
            turns=self._turns,
            tokens=self._tokens,
            turns_per_s=turns_per_s,
            tokens_per_s=tokens_per_s,
            mean_return=sum(returns) / len(returns) if returns else None,
            valid_share=1 - num_invalid / num_actions if num_actions else None,
            dropped=dropped_by_kind(dropped_by_reason),
            due_s=due_s,
            is_due_bound=is_bound and due_s is not None,
            played_again=self._played_again,
            groups_ended=num_trained + sum(dropped_by_reason.values()),
            drop_place=next((place for place, _ in places.most_common(1)), ""),
        )

    def _due_s(
        self, num_awaited: int, under_way: tuple[int, int], turns_per_s: float, most_turns: int
    ) -> float | None:
        """Return the seconds until the batch is complete; None if that cannot be estimated.

        The pace at which trials arrive is no measure: trials that began together arrive together.

        Args:
            num_awaited: Number of trials of the batch that have not arrived.
            under_way: As for `snapshot`.
            most_turns: Number of turns of the longest trial that the environment allows, which is
                taken for that of every trial; 0: trials are as long as the latest ones.
        """
        # Turns of a trial or a late group that are played again are counted once in `under_way`.
        is_repeated = self._played_again > self._played_again_at_first
        if not turns_per_s or is_repeated or (most_turns and self._is_lateness_noted):
            return None
        num_trials, num_turns = under_way
        turns_each = most_turns or sum(turns for *_, turns in self._latest) / len(self._latest)
        num_left = num_trials * turns_each - num_turns
        # Groups of later batches may be in flight too. If their trials begin as others end, as many
        # turns are under way at the end of the batch as now, and a trial costs `turns_each`.
        if not most_turns:
            num_left = min(num_left, num_awaited * turns_each)
        # It is below 0 where trials under way have become longer than the latest ones were.
        return num_left / turns_per_s if num_left > 0 else None

    def _speed(self, now: float) -> tuple[float, float]:
        """Return turns and tokens per second in the last `WINDOW_S`, and remember this moment."""
        self._samples.append((now, self._turns, self._tokens))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        began, turns, tokens = self._samples[0]
        if now <= began:
            return 0.0, 0.0
        return (self._turns - turns) / (now - began), (self._tokens - tokens) / (now - began)


def before_first_step(
    times: Mapping[str, Any], events: Sequence[Event], is_alive: bool | None, now: float
) -> list[str]:
    """Return lines on a run that has trained no step: its age, what it waits for, its notes.

    Args:
        times: Content of the run's `times.json`; empty if there is no such file yet.
        events: Lines of the run's `events.jsonl`.
        is_alive: Whether a process runs the run; None if that cannot be known on this machine.
        now: Present time in seconds since 1970, like the times in the files.
    """
    if not events:
        return ["no process was started yet"]
    history = run_history(events)
    began, last = events[0]["at"], max(events[-1]["at"], times.get("at", 0.0))
    if is_alive or (is_alive is None and now - last < FRESH_S):
        lines = [f"it began {time_in_words(now - began)} ago"]
    else:
        lines = [f"it ended {time_in_words(last - began)} after it began"]
    if "progress" in times:
        lines.append(
            f"{time_in_words(now - times['at'])} ago: {sentence(Progress(**times['progress']))}"
        )
    else:
        lives = (f"{life.name} {life.state}" for life in history.processes.values())
        lines.append(f"nothing is played yet: {', '.join(lives)}")
    return [*lines, *(f"note: {text}" for _, text in reversed(history.notes[:MAX_NOTES_SHOWN]))]


# Check whether the first batches have anything to learn from.


class Signal:
    """Examine the first batches for faults that keep a run from learning anything.

    There is nothing to learn from if no action was ever valid, if no reward was ever earned, or if
    all trials that are compared with each other earned the same: those of a group, or of a whole
    batch if `advantage.baseline` lacks "group". Their advantages are then all zero. There is little
    to learn from if few episodes earn anything (`RARE`). Each fault is reported once.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self._config, self._environment = config, environment
        self._facts = environment.facts
        self._num_trials = self._num_episodes = self._num_earning = 0
        self._is_reward_seen = self._is_valid_seen = self._is_spread_seen = False
        self._reported: set[str] = set()

    def batch(self, version: int, groups: Sequence[Group]) -> str | None:
        """Examine one more batch, which will be trained from `version`.

        Returns:
            A sentence that names a new fault and its cure; None if there is none.
        """
        if version >= FIRST_STEPS:
            return None
        trials = [trial for group in groups for trial in group.trials]
        actions = [turn for trial in trials for turn in trial.turns if turn.kind is Kind.ACT]
        self._num_trials += len(trials)
        earned = earning_episodes(trials)
        self._num_episodes += len(earned)
        self._num_earning += sum(earned)
        self._is_valid_seen |= any(turn.is_valid for turn in actions)
        self._is_reward_seen |= any(turn.reward for turn in actions)
        is_by_group = "group" in self._config.advantage.baseline
        for compared in [group.trials for group in groups] if is_by_group else [trials]:
            rewards = {tuple(trial.episode_rewards()) for trial in compared}
            self._is_spread_seen |= len(rewards) > 1
        if self._num_trials < ENOUGH_TRIALS:
            return None
        if not self._is_valid_seen:
            last = actions[-1].action if actions else ""
            return self._once("nothing", "no valid action", self._no_valid_action(last))
        if not self._is_reward_seen:
            return self._once("nothing", "no reward", self._no_reward())
        if not self._is_spread_seen:
            return self._once("nothing", "no variance", self._no_variance(trials))
        share = self._num_earning / max(1, self._num_episodes)
        if share < RARE and self._num_episodes >= ENOUGH_EPISODES:
            text = (
                f"{share:.1%} of {self._num_episodes} episodes have earned anything: {RARE_CURES}."
            )
            return self._once("little", "rare rewards", text)
        return None

    def _once(self, amount: str, kind: str, text: str) -> str | None:
        """Return a sentence the first time that a kind of fault is found, later None.

        Args:
            amount: How much there is to learn from, "nothing" or "little".
        """
        if kind in self._reported:
            return None
        self._reported.add(kind)
        return f"{amount} to learn from: {text}"

    # Each of the next methods writes the sentence of one fault: its likely cause in this
    # environment, then the keys that change it.

    def _no_valid_action(self, last: str) -> str:
        """Return the sentence for trials without a valid action, with what may help."""
        config, facts = self._config, self._facts
        seen = f"the last one was {last!r:.60}" if last else "none was found in the text"
        # Without an example of an action, the first word of the game's vocabulary serves as one.
        example = facts.example or (facts.words[0] if facts.words else "")
        if isinstance(self._environment, AgentTasks):
            # A program has no legal actions and no warm start, but calls of its tools.
            return (
                f"no answer of {self._num_trials} trials was a whole call of a tool ({seen}). "
                "Raise transcript.max_action_tokens where answers are cut; send tools with few "
                "arguments, whose values are enumerated; or begin with a policy that calls tools."
            )
        valid_example = f", where {example!r:.60} would be one" if example else ""
        cures = ["declare `legal_actions` in the environment, so that only legal ones are sampled"]
        if config.transcript.forced_tags == "none":
            cures.insert(0, 'let the transcript write the tags: transcript.forced_tags = "both"')
        if not config.sampling.restricted:
            cures.insert(0, "set sampling.restricted = true")
        cures.append("add [warm_start]" if config.warm_start is None else "raise warm_start.steps")
        cures[0] = cures[0][0].upper() + cures[0][1:]
        return (
            f"of {self._num_trials} trials no action was valid ({seen}{valid_example}). "
            f"{'; or '.join(cures)}."
        )

    def _no_reward(self) -> str:
        """Return the sentence for trials without any reward."""
        can_begin = not isinstance(self._environment, AgentTasks)
        cure = "begin with [warm_start], " if can_begin and not self._config.warm_start else ""
        return (
            f"{self._num_trials} trials of {self._facts.name} have earned no reward at all. The "
            "task is too hard for the policy as it is, or the environment never pays: look at a "
            f"trial in `mage view`. Choose easier tasks in environment.options, {cure}or "
            "reward partial progress."
        )

    def _no_variance(self, trials: Sequence[Trial]) -> str:
        """Return the sentence for groups whose trials earned the same, episode by episode."""
        returns = [reward for trial in trials for reward in trial.episode_rewards()]
        low, high = min(returns), max(returns)
        amount = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        head = (
            f"in each group of the first {self._num_trials} trials all returns are alike ({amount} "
            "an episode), so every advantage is zero"
        )
        if all(map(self._is_at_top, trials)):
            return f"{head}. The task is solved already: choose harder ones in environment.options."
        if self._config.sampling.temperature < 0.5:
            return f"{head}. Trials are copies of each other: raise sampling.temperature."
        return (
            f"{head}. The reward does not depend on what the policy does, or the policy always "
            "does the same: look at a group in `mage view`; raise sampling.temperature or "
            "admission.trials_per_group, or choose easier tasks in environment.options."
        )

    def _is_at_top(self, trial: Trial) -> bool:
        """Return whether every episode of a trial has earned the most that its environment pays."""
        most = component_of(self._environment, trial.task.member).facts.max_return
        return most is not None and min(trial.episode_rewards()) >= most
