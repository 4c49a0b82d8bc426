"""Signatures: ways in which runs are known to fail, how each shows in the metrics, what to do.

A signature is one class here and one line of `SIGNATURES`. Its docstring says what the metrics look
like, `remedy` which key to change. Thresholds come from recorded runs of the quickstart, Scout and
Kuhn poker; the constant above each class names the healthy figure that it stays clear of.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from mage_async.admission.staleness_metrics import OLDEST_AGE
from mage_async.config.schema import Config

Record = dict[str, Any]
"""The metrics of a step, or an evaluation with its `version` and `sets`, as a run records them."""


class Finding(msgspec.Struct, frozen=True):
    """A signature found in a run. Its strings come from environments and peers: escape them."""

    name: str
    """Name of the signature, as in `SIGNATURES` and in `doctor.halt`."""
    onset: int
    """The first step that showed the signature; for an evaluation, the version evaluated."""
    found: int
    """The step after which the signature was certain."""
    evidence: str
    """The figures, as a clause without a full stop."""
    remedy: str
    """What to do, as a sentence that names a key."""
    subject: str = ""
    """The member or the actor at fault; empty if the finding is about the whole run."""

    def sentence(self) -> str:
        """Return the finding as one line, with control characters made visible."""
        about = f" of {self.subject}" if self.subject else ""
        text = f"{self.name}{about} since step {self.onset}: {self.evidence}. {self.remedy}"
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A signature that shows in the step or evaluation just examined; see `Finding`."""

    onset: int
    evidence: str
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of a run before its first step."""

    config: Config
    bounds: tuple[float, float] | None
    """Smallest and largest return per unit of an episode; `None` if they are unknown."""

    def span(self) -> float:
        """Return the largest minus the smallest return, or 1 if they are unknown."""
        return 1.0 if self.bounds is None else self.bounds[1] - self.bounds[0]


class Signature:
    """A way in which runs fail. One object examines one run, in constant time and memory a step.

    A subclass overrides `step`, `evaluated`, or both.
    """

    remedy: ClassVar[str]
    """What to do, as a sentence that names a key."""
    steps_in_a_row: ClassVar[int] = 3
    """Steps that must show the signature in a row, because one alone may be chance."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._streak = Streak(self.steps_in_a_row)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Examine the metrics of the next step. A metric that the run did not record is ignored."""
        return ()

    def evaluated(self, evaluation: Record) -> Iterable[Sighting]:
        """Examine a point of the curve, or the final evaluation."""
        return ()

    def lasting(self, record: Record, holds: bool, evidence: str) -> list[Sighting]:
        """Return a sighting if `holds` was true in `steps_in_a_row` steps up to this one."""
        is_certain = self._streak.add(record["step"], holds)
        return [Sighting(self._streak.onset, evidence)] if is_certain else []


# Memory of a signature over the steps: streaks, windows, levels.


@dataclass(slots=True)
class Streak:
    """Counts the steps in a row in which a condition held."""

    needed: int
    onset: int = 0
    """The first step of the streak."""
    _length: int = 0

    def add(self, step: int, holds: bool) -> bool:
        """Count a step, and return whether the streak has the needed length."""
        if not holds:
            self._length = 0
            return False
        if not self._length:
            self.onset = step
        self._length += 1
        return self._length >= self.needed


@dataclass(slots=True)
class Window:
    """The last `size` values of a metric."""

    size: int
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    def add(self, value: float) -> None:
        """Append a value; the oldest one drops out."""
        self.values.append(value)

    @property
    def is_full(self) -> bool:
        """Whether `size` values were added."""
        return len(self.values) == self.size

    def mean(self, start: int = 0, stop: int | None = None) -> float:
        """Return the mean of `values[start:stop]`; index 0 is the oldest value."""
        values = list(self.values)[start:stop]
        return sum(values) / max(1, len(values))

    def halves(self) -> tuple[float, float]:
        """Return the means of the older and of the newer half."""
        middle = self.size // 2
        return self.mean(0, middle), self.mean(middle)


@dataclass(slots=True)
class LowestMean:
    """The lowest mean of `window.size` consecutive values so far."""

    window: Window
    value: float = math.inf

    def add(self, value: float) -> float | None:
        """Append a value; return the mean of the window, or `None` while it is not full."""
        self.window.add(value)
        if not self.window.is_full:
            return None
        mean = self.window.mean()
        self.value = min(self.value, mean)
        return mean


SOLVED = 0.05
"""A task counts as solved this close to the largest return, as a share of the span of returns.
Scout ends within 0.02."""
RISING = 0.05
"""Rise of the return over six steps, as a share of the span. Means of three batches of the
quickstart vary by 0.02."""


class Progress:
    """Whether a run still improves, or has solved its task.

    A policy that has learned all there is looks like one that has stopped learning, except for its
    return.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._returns = Window(9)

    def add(self, record: Record) -> None:
        """Append the return of a step's last episode."""
        self._returns.add(record["return_by_episode"][-1])

    def latest(self) -> float:
        """Return the mean over the last three steps."""
        return self._returns.mean(-3)

    def is_solved(self) -> bool:
        """Whether the return is close to the largest possible; false if that is unknown."""
        bounds = self._case.bounds
        return bounds is not None and self.latest() > bounds[1] - SOLVED * self._case.span()

    def is_rising(self) -> bool:
        """Whether the return has risen over the last six steps."""
        rise = self.latest() - self._returns.mean(0, 3)
        return self._returns.is_full and rise > RISING * self._case.span()


# What the loss computes, and from which data.


class NotFinite(Signature):
    """The loss or the gradient's norm is infinite or NaN, and the update has spoilt the weights."""

    remedy = (
        "Lower learner.learning_rate or learner.grad_clip, or set policy.dtype to float32 where it "
        "is bfloat16, and go on from a checkpoint before it."
    )
    steps_in_a_row = 1

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `loss` and `grad_norm`."""
        values = {name: record.get(name, 0.0) for name in ("loss", "grad_norm")}
        wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        return self.lasting(record, bool(wrong), " and ".join(wrong))


NO_VARIANCE = 0.98
"""Share of tokens with advantage 0. Kuhn poker, whose groups share their cards, ends at 0.8, with
single steps at 1; five steps in a row are not chance."""


class NoVariance(Signature):
    """Trials of a group earn the same, so they teach nothing, and they could earn more."""

    remedy = (
        "Raise admission.trials_per_group or sampling.temperature, or choose easier tasks in "
        "environment.options; with a reward that is never earned, warm-start by [warm_start]."
    )
    steps_in_a_row = 5

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.progress = Progress(case)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `zero_advantage_share`, unless the task is solved."""
        if (share := record.get("zero_advantage_share")) is None:
            return ()
        self.progress.add(record)
        return self.lasting(
            record,
            share > NO_VARIANCE and not self.progress.is_solved(),
            f"{share:.0%} of sampled tokens have advantage 0; the last episode's return is "
            f"{self.progress.latest():+.2f}",
        )


FEW_EFFECTIVE = 0.3
"""Effective share of tokens. The lowest single step of a healthy run had 0.47 (Scout)."""
MOST_MASKED = 0.5
"""Share of tokens masked by the correction: above it, a step learns from the smaller half."""


class OffPolicy(Signature):
    """The policy is so far from the behaviour policy that importance weights or masks leave few
    tokens.
    """

    remedy = "Lower admission.max_staleness, learner.learning_rate or learner.minibatches."

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `effective_share` and `masked_share`."""
        effective, masked = record.get("effective_share", 1.0), record.get("masked_share", 0.0)
        age = record.get("staleness_mean", 0.0)
        return self.lasting(
            record,
            effective < FEW_EFFECTIVE or masked > MOST_MASKED,
            f"importance weights leave {effective:.0%} of the tokens effective, and the "
            f"correction masks {masked:.0%}; mean staleness {age:.2g}",
        )


MISMATCH = 0.05
"""Mean |learner - engine| log-prob at equal version, nats. Engines in bfloat16 are 0.01 to 0.03
off, the embedded engine 1e-7."""
YOUNG_K3 = 0.3
"""k3 of the youngest tokens of a batch, nats. The largest in a healthy run was 0.22, for one step.
"""


class EngineMismatch(Signature):
    """The engine's log-probs are not those of the weights that it claims to sample with."""

    remedy = (
        'Where the gap grows, the engine misses new weights: set transport.weights = "disk" and '
        'engine.in_flight = "interrupt"; where it was there from the first step, set policy.dtype '
        "to what the engine computes in."
    )

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `logprob_mismatch_mean`, and at k3 of the youngest tokens of the batch."""
        gap = record.get("logprob_mismatch_mean", 0.0)
        ages = (age for age in range(OLDEST_AGE + 1) if f"k3_mean_age_{age}" in record)
        age = next(ages, 0)
        k3 = record.get(f"k3_mean_age_{age}", 0.0)
        equal = f"{gap:.2g} nats at equal version, and " if gap else ""
        return self.lasting(
            record,
            gap > MISMATCH or k3 > YOUNG_K3,
            f"log-probs of engine and learner differ by {equal}k3 {k3:.2g} nats on tokens said "
            f"to be {age} steps old",
        )


STALE_SHARE = 0.01
"""Share of all tokens that one actor played over the bound; the rule `slots` allows none."""
MAIN_SHARE = 0.6
"""Share of the tokens over the bound that one actor played: with less, the admission rule and not
the actor is the cause."""


class OverBoundByActor(Signature):
    """One actor plays with weights older than the bound allows."""

    remedy = (
        "Restart that actor and look at its log; where its machine is slow, lower "
        "admission.grant_deadline_s, so that others play its groups."
    )

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._streaks: dict[str, Streak] = {}

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `over_bound_by_actor`."""
        shares = record.get("over_bound_by_actor", {})
        # An actor that is absent from the record has no token over the bound: its streak ends.
        self._streaks = {
            actor: self._streaks.get(actor, Streak(self.steps_in_a_row)) for actor in shares
        }
        most_allowed = max(STALE_SHARE, MAIN_SHARE * sum(shares.values()))
        rules = self.case.config.admission
        lag = f" + {rules.lag}" if rules.lag else ""
        for actor, share in shares.items():
            streak = self._streaks[actor]
            if streak.add(record["step"], share > most_allowed):
                evidence = f"{share:.0%} of all tokens are older than {rules.max_staleness}{lag}"
                yield Sighting(streak.onset, f"{evidence} steps and were played there", actor)


# The policy: its entropy, its actions, and what it earns by them.

COLLAPSED_SHARE = 0.05
"""Share of the entropy of the first five steps. Healthy runs went down to 0.15 of it in Kuhn poker,
0.22 in the quickstart, and 0.06 in Scout, which was solved by then."""
NO_ENTROPY = 0.01
"""Nats: one token in a thousand is not the most likely one; no sampling explores with so little."""


class EntropyCollapse(Signature):
    """Entropy falls to nothing while the return could rise and does not: exploration has ended."""

    remedy = (
        "Raise learner.entropy and learner.final_entropy, or lower learner.learning_rate, and go "
        "on from a checkpoint before it."
    )
    steps_in_a_row = 2

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.progress = Progress(case)
        self._first: list[float] = []
        self._recent = Window(3)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `entropy`, unless the task is solved or the return rises."""
        if (entropy := record.get("entropy")) is None:
            return ()
        if len(self._first) < 5:
            self._first.append(entropy)
        self._recent.add(entropy)
        self.progress.add(record)
        level, mean = sum(self._first) / len(self._first), self._recent.mean()
        is_low = len(self._first) == 5 and mean < max(NO_ENTROPY, COLLAPSED_SHARE * level)
        return self.lasting(
            record,
            is_low and not self.progress.is_solved() and not self.progress.is_rising(),
            f"entropy is {mean:.3g} nats, at first {level:.3g}; the last episode's return "
            f"stays at {self.progress.latest():+.2f}",
        )


RUNAWAY_TIMES, RUNAWAY_NATS = 2.0, 0.3
"""Factor and difference to the lowest entropy so far; both must be exceeded. The largest rise of a
healthy run was 0.12 nats."""


class EntropyRunaway(Signature):
    """Entropy rises far above the level that the policy had come down to: it forgets."""

    remedy = "Lower learner.entropy or set learner.entropy_ceiling; lower learner.learning_rate."
    steps_in_a_row = 2

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._lowest = LowestMean(Window(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `entropy`."""
        if "entropy" not in record or (mean := self._lowest.add(record["entropy"])) is None:
            return ()
        low = self._lowest.value
        is_high = mean > max(RUNAWAY_TIMES * low, low + RUNAWAY_NATS)
        return self.lasting(
            record, is_high, f"entropy is {mean:.3g} nats, after as little as {low:.3g}"
        )


INVALID_RISE = 0.1
"""Rise of the share of invalid actions above its lowest mean. The largest in a healthy run was
0.04."""


class InvalidRising(Signature):
    """More and more actions are refused or cannot be parsed."""

    remedy = (
        "Raise advantage.format_penalty, or let the transcript write the tags: "
        'transcript.forced_tags = "both"; lower learner.learning_rate where entropy rises too.'
    )
    steps_in_a_row = 2

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._lowest = LowestMean(Window(4))

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `valid_action_share`."""
        if "valid_action_share" not in record:
            return ()
        if (mean := self._lowest.add(1.0 - record["valid_action_share"])) is None:
            return ()
        low = self._lowest.value
        evidence = f"{mean:.0%} of actions are invalid, after as few as {low:.1%}"
        return self.lasting(record, mean > low + INVALID_RISE, evidence)


TRUNCATED = 0.1
"""Share of actions that are cut off: of ten trials with ten actions each, nearly all would be hurt.
"""
CUT_SHORT = 0.02
"""Share of a set's trials that outgrew the engine's context, or had a call that failed."""


class Truncation(Signature):
    """Actions use up their tokens before they are complete, or trials outgrow their context."""

    remedy = "Raise transcript.max_action_tokens; for whole trials raise engine.max_tokens."

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `truncated_action_share`."""
        share = record.get("truncated_action_share", 0.0)
        most = self.case.config.transcript.max_action_tokens
        evidence = f"{share:.0%} of actions used up their {most} tokens and are invalid"
        return self.lasting(record, share > TRUNCATED, evidence)

    def evaluated(self, evaluation: Record) -> Iterable[Sighting]:
        """Look at `cut_short` of the set that has most of it."""
        shares = {name: score.get("cut_short", 0.0) for name, score in evaluation["sets"].items()}
        worst = max(shares, key=lambda name: shares[name], default="")
        if shares and shares[worst] > CUT_SHORT:
            share = f"{shares[worst]:.0%} of the trials of {worst}"
            evidence = f"{share} outgrew the engine's context, or had a call that failed"
            yield Sighting(evaluation["version"], evidence)


GAMED_VALID, GAMED_LEAST = 0.05, 0.95
"""Rise of the share of valid actions, and the share it reaches. Healthy runs start there."""
GAMED_RETURN = 0.05
"""Fall of the return in the same steps, as a share of the span of returns: 0.1 per unit in the
quickstart, where the mean of five batches varies by 0.02."""


class FormatGaming(Signature):
    """Valid actions become more while the return falls: the form is learned, not the task."""

    remedy = "Lower advantage.format_penalty, and advantage.length_penalty if there is one."
    steps_in_a_row = 2

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._valid, self._returns = Window(10), Window(10)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `valid_action_share` and the last episode's return."""
        if "valid_action_share" not in record:
            return ()
        self._valid.add(record["valid_action_share"])
        self._returns.add(record["return_by_episode"][-1])
        if not self._valid.is_full:
            return ()
        (was, now), (earned, earns) = self._valid.halves(), self._returns.halves()
        is_formal = now > max(was + GAMED_VALID, GAMED_LEAST)
        is_poorer = earns < earned - GAMED_RETURN * self.case.span()
        return self.lasting(
            record,
            is_formal and is_poorer,
            f"valid actions rose from {was:.0%} to {now:.0%} in ten steps while the last "
            f"episode's return fell from {earned:+.2f} to {earns:+.2f}",
        )


# The system around the learning: who waits, what fails, what runs out.

FAILURES, FAILURE_STEPS = 3, 20
"""Groups of one member that were dropped, within so many steps: with 24 members and 4 groups a
step, each member is met three times."""
MOST_NAMED = 3
"""If more members fail than these, the environment is the cause, not a member."""


class MemberFailing(Signature):
    """Groups of one member, or of many, are given up again and again."""

    remedy = (
        "Read why by `mage journal RUN_DIR --kind drop` and mend the environment; raise "
        "environment.step_deadline_s where its steps are slow."
    )

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._drops: deque[tuple[int, dict[str, int]]] = deque()

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `dropped_by_member` of the last steps."""
        step, drops = record["step"], record.get("dropped_by_member", {})
        if drops:
            self._drops.append((step, drops))
        while self._drops and self._drops[0][0] <= step - FAILURE_STEPS:
            self._drops.popleft()
        if not drops:
            return
        counts: Counter[str] = Counter()
        for _, dropped in self._drops:
            counts.update(dropped)
        failing = {name: count for name, count in counts.items() if count >= FAILURES}
        if len(failing) > MOST_NAMED:
            total = f"{sum(failing.values())} groups of {len(failing)} members"
            yield Sighting(self._drops[0][0], f"{total} were given up in {FAILURE_STEPS} steps")
            return
        for member in sorted(failing):
            onset = next(at for at, dropped in self._drops if member in dropped)
            evidence = f"{failing[member]} of its groups were given up in {FAILURE_STEPS} steps"
            yield Sighting(onset, evidence, member)


LEAST_FREE = 1_000_000_000
"""Bytes: less does not hold a journal segment, a checkpoint and the logs of a small run."""


class DiskSoonFull(Signature):
    """The disk will be full before the last step."""

    remedy = "Make room, or lower learner.keep_checkpoints or journal.max_bytes."

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._free: deque[tuple[int, int]] = deque(maxlen=8)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Extrapolate `disk_free_bytes` from the last eight steps to the last step of the run."""
        if (free := record.get("disk_free_bytes")) is None:
            return ()
        step = record["step"]
        self._free.append((step, free))
        first_step, free_then = self._free[0]
        used = max(0.0, (free_then - free) / max(1, step - first_step))
        left = self.case.config.learner.steps - step
        is_short = len(self._free) == self._free.maxlen and free < used * left
        return self.lasting(
            record,
            is_short or free < LEAST_FREE,
            f"{free / 1e9:.1f} GB are free, a step takes {used / 1e6:,.0f} MB and {left} steps "
            "are left",
        )


STARVING = 0.9
"""Share of the time of eight steps. The learner of a healthy quickstart waits for 0.3 to 0.5 of it
on two cores, where engines and learner share them."""


class LearnerStarving(Signature):
    """The learner waits for trials nearly all the time."""

    remedy = "Start more actors (--actors), raise engine.max_contexts, or admission.max_staleness."

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._waits, self._works = Window(8), Window(8)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Compare `waiting_s` with `train_s`."""
        self._waits.add(record.get("waiting_s", 0.0))
        self._works.add(record.get("train_s", 0.0))
        waits, works = self._waits.mean(), self._works.mean()
        return self.lasting(
            record,
            self._waits.is_full and waits > STARVING * (waits + works),
            f"a step waits {waits:.1f} s for its batch and computes {works:.1f} s",
        )


IDLE = 0.8
"""Share of the actors' time, mean of eight steps. Actors of a healthy Scout are idle for 0.35."""


class ActorsStarving(Signature):
    """The actors have nothing to play nearly all the time."""

    remedy = "Start fewer actors (--actors), or raise admission.max_staleness or learner.threads."

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._idle = Window(8)

    def step(self, record: Record) -> Iterable[Sighting]:
        """Look at `actors_idle_share`."""
        if (share := record.get("actors_idle_share")) is None:
            return ()
        self._idle.add(share)
        mean = self._idle.mean()
        evidence = f"actors wait for {mean:.0%} of their time"
        return self.lasting(record, self._idle.is_full and mean > IDLE, evidence)


# Evaluations: a control that does not lower the return.


def no_loss(evaluation: Record, control: str, how: str) -> Iterable[Sighting]:
    """Yield a sighting if the last episode earns as much in a control set as in the held-out set.

    A difference counts if it exceeds its 95 % half-width.
    """
    sets = evaluation["sets"]
    heldout, other = sets.get("heldout"), sets.get(f"heldout_{control}")
    if heldout is None or other is None or len(heldout["return_by_episode"]) < 2:
        return
    full, reduced = heldout["return_by_episode"][-1], other["return_by_episode"][-1]
    noise = math.hypot(heldout["ci95_by_episode"][-1], other["ci95_by_episode"][-1])
    if full - reduced <= noise:
        yield Sighting(
            evaluation["version"],
            f"held-out, the last episode earns {full:+.2f}, and {how} {reduced:+.2f} "
            f"(± {noise:.2f})",
        )


class MemoryUnused(Signature):
    """Held-out returns are the same without the earlier episodes in the context."""

    remedy = (
        'Pay early episodes for what they teach: credit.kind = "differential" or "cumulative" with '
        "a higher credit.episode_discount; train for more learner.steps."
    )

    def evaluated(self, evaluation: Record) -> Iterable[Sighting]:
        """Compare with the set `heldout_blind`, unless the run has no memory to remove."""
        if self.case.config.trial.memory != "none":
            yield from no_loss(evaluation, "blind", "without the earlier episodes")


class SwapHarmless(Signature):
    """Held-out returns are the same where another member is hidden in the last episode: what was
    learned is not about this one.
    """

    remedy = (
        "Choose tasks that differ more in environment.options, or look whether a member can be "
        "told from its first episodes at all: raise trial.episodes."
    )

    def evaluated(self, evaluation: Record) -> Iterable[Sighting]:
        """Compare with the set `heldout_swapped`."""
        return no_loss(evaluation, "swapped", "with another member hidden in it")


SIGNATURES: dict[str, type[Signature]] = {
    "not_finite": NotFinite,
    "no_variance": NoVariance,
    "truncation": Truncation,
    "invalid_actions": InvalidRising,
    "entropy_collapse": EntropyCollapse,
    "entropy_runaway": EntropyRunaway,
    "off_policy": OffPolicy,
    "engine_mismatch": EngineMismatch,
    "over_bound": OverBoundByActor,
    "format_gaming": FormatGaming,
    "member_failing": MemberFailing,
    "disk_soon_full": DiskSoonFull,
    "learner_starving": LearnerStarving,
    "actors_starving": ActorsStarving,
    "memory_unused": MemoryUnused,
    "swap_harmless": SwapHarmless,
}
"""All signatures by name. Those that override `step` can halt a run, and are listed once more in
`SignatureName` of `mage_async/config/running.py`.
"""
