"""Define signatures: known ways in which runs fail, how each shows in the metrics, and what to do.

`SIGNATURES` is their table. A row names the function that looks at the steps, the function
that looks at an evaluation, or both. The docstring of a function says how the failure shows.
Thresholds come from recorded runs of the quickstart and of two environments, Scout and Kuhn poker;
the text below each constant says which value healthy runs had, so that a threshold can be judged.
A *member* is the hidden part of a task, such as an opponent.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from mage_async.assembly import environment_of, has_steady_tasks
from mage_async.config.schema import Config, FromWinStay, Tiny
from mage_async.environments.catalogue import names
from mage_async.policy_version import OLDEST_AGE
from mage_async.results.dropped_bias import Ratio, Selection, ratio_text
from mage_async.results.intervals import halves_of, noise
from mage_async.results.progress import RARE, RARE_CURES, printable
from mage_async.results.run_files import SOURCE_OF, Record, RunRecords
from mage_async.trajectory import num_decimals


class Finding(msgspec.Struct, frozen=True):
    """Describe a signature found in a run. Its strings come from environments and peers: escape
    them.
    """

    name: str
    """Name of the signature, as in `SIGNATURES` and in `doctor.halt`."""
    onset: int
    """First step that showed the signature; for an evaluation, the version evaluated."""
    found: int
    """Step after which the signature was certain."""
    evidence: str
    """The measured values that show it, as a clause without a full stop."""
    remedy: str
    """What to do, as a sentence that names a key."""
    subject: str = ""
    """Member or actor at fault; "" if the finding is about the whole run."""

    def sentence(self) -> str:
        """Return the finding as one line, with control characters made visible."""
        about = f" of {self.subject}" if self.subject else ""
        return printable(
            f"{self.name}{about} since step {self.onset}: {self.evidence}. {self.remedy}"
        )


class Sighting(NamedTuple):
    """Describe a signature that shows in the step or evaluation just examined, with fields of
    `Finding`.
    """

    evidence: str
    subject: str = ""
    onset: int | None = None
    """First step that showed the signature; None for the first of the present steps in a row, or
    the version evaluated.
    """
    remedy: str = ""
    """Remedy for this run; "" for the remedy of the signature."""


MAX_STEPS = 100
"""Number of steps that a history keeps: the noise of the return is estimated from all of them.
Other signatures read at most 20 steps with a metric, which not every step records.
"""
FIRST_STEPS = 5
"""Number of first steps whose mean entropy counts as the entropy at the start of a run."""
LOWEST_OVER = {"entropy": 3, "invalid_action_share": 4}
"""Metrics whose lowest value so far is remembered, each with the number of steps over which it is
averaged, because a single step may be low by chance."""
SOLVED = 0.05
"""Largest distance of the return to the largest possible one at which a task counts as solved, as a
share of the span of returns. Scout ends within 0.02.
"""
RISING = 0.05
"""Rise of the return over six steps above which it counts as rising, as a share of the span. Means
of three batches of the quickstart vary by 0.02.
"""


FALL_STEPS = 10
"""Number of steps whose mean return is compared with that of the best steps in a row so far."""


@dataclass(slots=True)
class History:
    """Hold the steps of a run that its signatures look at. Adding a step takes constant time."""

    config: Config
    bounds: tuple[float, float] | None
    """Smallest and largest return of an episode, per unit (a round, hand or dial of it); None if
    they are unknown."""
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    """The newest steps, oldest first."""
    first_entropies: list[float] = field(default_factory=list)
    """Mean entropies of the first `FIRST_STEPS` steps, in nats."""
    lowest: dict[str, float] = field(default_factory=dict)
    """The lowest means so far of the metrics in `LOWEST_OVER`."""
    best: tuple[float, int] | None = None
    """The best mean return of the last episode over `FALL_STEPS` so far, and the last of these
    steps."""
    first_return: float = 0.0
    """Return of an untrained policy in a task that it has not seen: the smallest, over the
    episodes, of the mean return over the first `FALL_STEPS` steps."""
    selection: Selection = field(default_factory=Selection)
    """The groups of all steps so far, trained or dropped."""

    def add(self, record: Record) -> None:
        """Append the metrics of the next step. A metric that it does not have is ignored."""
        if "valid_action_share" in record:
            record = record | {"invalid_action_share": 1.0 - record["valid_action_share"]}
        self.records.append(record)
        self.selection.add(record)
        if "entropy" in record and len(self.first_entropies) < FIRST_STEPS:
            self.first_entropies.append(record["entropy"])
        for name, count in LOWEST_OVER.items():
            if name in record and len(self.recent(name, count)) == count:
                self.lowest[name] = min(self.lowest.get(name, math.inf), self.mean(name, count))
        steps = self.recent("return_by_episode", FALL_STEPS)
        if "return_by_episode" in record and len(steps) == FALL_STEPS:
            if self.best is None:
                # A resumed run may have trials of another number of episodes.
                columns = zip(*(each["return_by_episode"] for each in steps), strict=False)
                self.first_return = min(map(_mean, columns))
            if self.best is None or last_return(steps) > self.best[0]:
                self.best = last_return(steps), record["step"]

    @property
    def record(self) -> Record:
        """The metrics of the newest step."""
        return self.records[-1]

    def recent(self, name: str, count: int) -> list[Record]:
        """Return the last `count` steps that recorded a metric, or fewer, oldest first."""
        return list(islice((each for each in reversed(self.records) if name in each), count))[::-1]

    def mean(self, name: str, count: int) -> float:
        """Return the mean of a metric over the last `count` steps that recorded it, or fewer."""
        return _mean([each[name] for each in self.recent(name, count)])

    def latest_return(self) -> float:
        """Return the last episode's return, as a mean over the last three steps."""
        return last_return(self.recent("return_by_episode", 3))

    def span(self) -> float:
        """Return the largest minus the smallest return, or 1 if they are unknown."""
        return 1.0 if self.bounds is None else self.bounds[1] - self.bounds[0]

    # Two tests of the return, for signatures whose other metrics look the same in a policy that has
    # stopped learning and in one that has nothing left to learn.

    def is_solved(self) -> bool:
        """Return whether the return is close to the largest one; false if either is unknown."""
        if self.bounds is None or not self.recent("return_by_episode", 1):
            return False
        return self.latest_return() > self.bounds[1] - SOLVED * self.span()

    def is_rising(self) -> bool:
        """Return whether the return has risen over the last six steps."""
        # Means of three steps each, which lie six steps apart.
        steps = self.recent("return_by_episode", 9)
        rise = self.latest_return() - last_return(steps[:3])
        return len(steps) == 9 and rise > RISING * self.span()


def texts(*returns: float) -> list[str]:
    """Return returns that a sighting compares, each with its sign."""
    digits = num_decimals(returns) - 1
    return [f"{each:+.{digits}f}" for each in returns]


def last_return(records: Sequence[Record]) -> float:
    """Return the last episode's return, as a mean over some steps."""
    return _mean([record["return_by_episode"][-1] for record in records])


def _mean(values: Sequence[float]) -> float:
    """Return the mean of some values; 0 if there are none."""
    return sum(values) / max(1, len(values))


Sightings = Iterator[Sighting]


# Signatures of the loss and of the data that it is computed from.


def not_finite(run: History) -> Sightings:
    """The loss or the gradient's norm is infinite or NaN; an update with such a norm is skipped."""
    values = {name: run.record.get(name, 0.0) for name in ("loss", "grad_norm")}
    wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if wrong:
        skipped = run.record.get("skipped_updates", 0.0)
        note = f"; skipped updates of the step: {skipped:.0f}" if skipped else ""
        yield Sighting(" and ".join(wrong) + note)


NO_VARIANCE = 0.98
"""Share of tokens with advantage 0 above which nothing is learned. Kuhn poker, where the trials of
a group get the same cards, ends at 0.8, with single steps at 1; five steps in a row do not happen
by chance.
"""


def no_variance(run: History) -> Sightings:
    """Trials of a group earn the same, so their advantages are 0, although they could earn more."""
    share = run.record["zero_advantage_share"]
    if share > NO_VARIANCE and not run.is_solved():
        steps = run.recent("return_by_episode", MAX_STEPS)
        earned = (
            f"the last episode's return is {texts(run.latest_return())[0]}"
            if any(each for step in steps for each in step["return_by_episode"])
            else f"no episode of {len(steps)} steps has earned any reward"
        )
        yield Sighting(f"{share:.0%} of sampled tokens have advantage 0; {earned}")


def rare_rewards(run: History) -> Sightings:
    """Hardly an episode earns anything, so that most trials have nothing to be compared with."""
    steps = run.recent("earning_share", 8)
    share, earned = run.mean("earning_share", 8), run.latest_return()
    # Where the reward is a cost, earning nothing is best.
    if len(steps) == 8 and 0 < share < RARE and earned >= 0 and not run.is_solved():
        yield Sighting(f"{share:.1%} of the episodes of eight steps earned anything")


FEW_EFFECTIVE = 0.3
"""Effective share of tokens below which too few count: the effective sample size of the importance
weights, divided by the number of tokens. The lowest single step of a healthy run had 0.47 (Scout).
"""
MOST_MASKED = 0.5
"""Share of tokens masked by the correction above which a step trains on too few of them."""


def off_policy(run: History) -> Sightings:
    """The policy is so far from the behaviour policy that importance weights or the correction's
    mask leave few tokens effective.
    """
    effective, masked = run.record.get("effective_share", 1.0), run.record.get("masked_share", 0.0)
    if effective < FEW_EFFECTIVE or masked > MOST_MASKED:
        yield Sighting(
            f"importance weights leave {effective:.0%} of the tokens effective, and the correction "
            f"masks {masked:.0%}; mean staleness {run.record.get('staleness_mean', 0.0):.2g}"
        )


MISMATCH = 0.05
"""Mean |learner - engine| log-prob at equal version, in nats, above which engine and learner
disagree. Engines in bfloat16 are 0.01 to 0.03 off, the embedded engine 1e-7.
"""
YOUNG_K3 = 0.3
"""k3 of tokens that are at most one step old, in nats, above which engine and learner disagree; k3
estimates the KL divergence of the engine's policy from the learner's. The largest in a healthy run
was 0.22, for one step.
"""


def engine_mismatch(run: History) -> Sightings:
    """The engine's log-probs are not those of the weights that it claims to sample with: they
    differ at equal version, or on the youngest tokens of the batch.
    """
    gap = run.record.get("logprob_mismatch_mean", 0.0)
    ages = (age for age in range(OLDEST_AGE + 1) if f"k3_mean_age_{age}" in run.record)
    youngest = next(ages, 0)
    k3 = run.record.get(f"k3_mean_age_{youngest}", 0.0)
    # If even the youngest tokens are old, as under `admission.lag`, the policy has really moved
    # since they were sampled: the threshold grows as a KL divergence does, with the square of the
    # distance.
    if gap > MISMATCH or k3 > YOUNG_K3 * max(1, youngest) ** 2:
        equal = f"{gap:.2g} nats at equal version, and " if gap else ""
        yield Sighting(
            f"log-probs of engine and learner differ by {equal}k3 {k3:.2g} nats on tokens said "
            f"to be {youngest} steps old"
        )


STALE_SHARE = 0.01
"""Largest share of all tokens that one actor may sample with weights older than the bound. Under
the rule `slots`, an actor that loads new weights in time samples no such token.
"""
MAIN_SHARE = 0.6
"""Share of the tokens over the bound above which one actor is the cause. Below it, the cause is the
admission rule.
"""


def over_bound(run: History) -> Sightings:
    """One actor plays with weights older than the bound allows."""
    shares, admission = run.record.get("over_bound_by_actor", {}), run.config.admission
    most_allowed = max(STALE_SHARE, MAIN_SHARE * sum(shares.values()))
    lag = f" + {admission.lag}" if admission.lag else ""
    for actor, share in shares.items():
        if share > most_allowed:
            older = f"{share:.0%} of all tokens are older than {admission.nominal_bound}{lag}"
            yield Sighting(f"{older} steps and were played there", actor)


# Signatures of the policy: of its entropy, its actions, and its returns.

COLLAPSED_SHARE = 0.05
"""Share of the entropy of the first five steps below which entropy has collapsed. Healthy runs went
down to 0.15 of it in Kuhn poker, 0.22 in the quickstart, and 0.06 in Scout, which was solved by
then.
"""
NO_ENTROPY = 0.01
"""Mean entropy in nats below which the policy has stopped exploring: at this value about one token
in a thousand is not the most likely one.
"""
TRIAL_ENTROPY = 0.25
"""Mean entropy in nats of all sampled tokens of a trial together, below which exploration has ended
in trials of few tokens: in seven of ten groups of eight trials, all eight trials are the same. The
lowest value of a run that went on learning was 0.49.
"""


def entropy_collapse(run: History) -> Sightings:
    """Entropy falls to nothing while the return could rise and does not: exploration has ended."""
    level, mean = _mean(run.first_entropies), run.mean("entropy", 3)
    tokens = run.mean("generated_tokens_per_s", 3) / max(1e-9, run.mean("trials_per_s", 3))
    is_known = len(run.first_entropies) == FIRST_STEPS
    # A warm start may have lowered the first level already, so a share of it is not enough.
    lowest = max(NO_ENTROPY, COLLAPSED_SHARE * level, tokens and TRIAL_ENTROPY / tokens)
    if is_known and mean < lowest and not run.is_solved() and not run.is_rising():
        whole = f" ({mean * tokens:.2g} in the {tokens:.0f} of a trial)" if tokens else ""
        # An entropy bonus in the same run hardly raises an entropy that was low when RL began.
        was_low = run.config.warm_start is not None and level * tokens < 2 * TRIAL_ENTROPY
        yield Sighting(
            f"entropy is {mean:.3g} nats a token{whole}, at first {level:.3g}; the last episode's "
            f"return stays at {texts(run.latest_return())[0]}",
            remedy=UNWARMED if was_low and tokens else "",
        )


UNWARMED = (
    "The warm start left hardly anything to explore: begin a new run with warm_start = "
    '"none", or raise learner.entropy in it.'
)


RUNAWAY_TIMES, RUNAWAY_NATS = 2.0, 0.3
"""Factor and difference, in nats, to the lowest entropy so far above which entropy runs away; both
must be exceeded. The largest rise of a healthy run was 0.12 nats.
"""
RUNAWAY_ERRORS = 6.5
"""Standard errors of the rise that must be exceeded too. So many, because the lowest mean is picked
from all steps of a run.
"""


def entropy_runaway(run: History) -> Sightings:
    """Entropy rises far above its lowest level so far: the policy forgets what it has learned."""
    mean, low = run.mean("entropy", LOWEST_OVER["entropy"]), run.lowest.get("entropy", math.inf)
    # Without advantages only the bonus on entropy moves the policy: `no_variance` is the cause.
    is_taught = run.mean("zero_advantage_share", LOWEST_OVER["entropy"]) <= NO_VARIANCE
    if not is_taught or mean <= max(RUNAWAY_TIMES * low, low + RUNAWAY_NATS):
        return
    # Batches of few trials have entropies that differ by chance. This noise is measured from the
    # lowest mean on, because the steps before it may have fallen steeply.
    width = LOWEST_OVER["entropy"]
    known = [each["entropy"] for each in run.recent("entropy", MAX_STEPS)]
    means = [_mean(known[start : start + width]) for start in range(len(known) - width + 1)]
    since = known[means.index(min(means)) :]
    if mean - low > RUNAWAY_ERRORS * noise(since) * math.sqrt(2 / width):
        learner, remedy = run.config.learner, ""
        if not (learner.entropy or learner.final_entropy):
            remedy = "Lower learner.learning_rate."
        elif learner.entropy_tokens == "restricted":
            remedy = f"{LESS_BONUS}; lower learner.learning_rate."
        yield Sighting(f"entropy is {mean:.3g} nats, after as little as {low:.3g}", remedy=remedy)


LESS_BONUS = "Lower learner.entropy, or set learner.entropy_ceiling"


INVALID_RISE = 0.1
"""Rise of the share of invalid actions above its lowest mean that counts. The largest in a healthy
run was 0.04.
"""


HARDLY_VALID = 0.99
"""Share of invalid actions above which nothing but the form of an action can be learned. A run that
learns may begin with 0.95.
"""


def invalid_actions(run: History) -> Sightings:
    """More and more actions are refused or cannot be parsed, or hardly any was ever valid."""
    name = "invalid_action_share"
    mean, low = run.mean(name, LOWEST_OVER[name]), run.lowest.get(name, math.inf)
    if mean > low + INVALID_RISE:
        yield Sighting(f"{mean:.0%} of actions are invalid, after as few as {low:.1%}")
    elif mean > HARDLY_VALID:
        yield Sighting(f"{mean:.0%} of actions are invalid")


TRUNCATED = 0.1
"""Share of actions that are cut off above which it counts: of trials with ten actions each, most
then lose one.
"""
CUT_SHORT = 0.02
"""Share of a set's trials that outgrew the engine's context, or failed in every try, above which
it counts.
"""


def truncated_actions(run: History) -> Sightings:
    """Actions use up their tokens before they are complete."""
    share = run.record.get("truncated_action_share", 0.0)
    if share > TRUNCATED:
        most = run.config.transcript.max_action_tokens
        yield Sighting(f"{share:.0%} of actions used up their {most} tokens and are invalid")


def truncated_trials(config: Config, evaluation: Record) -> Sightings:
    """Trials of an evaluation outgrow their context; the set with most of them is named."""
    shares = {name: score.get("cut_short", 0.0) for name, score in evaluation["sets"].items()}
    worst = max(shares, key=lambda name: shares[name], default="")
    if worst and shares[worst] > CUT_SHORT:
        trials = f"{shares[worst]:.0%} of the trials of {worst}"
        yield Sighting(f"{trials} outgrew the engine's context, or failed in every try")


GAMED_VALID, GAMED_LEAST = 0.05, 0.95
"""Rise of the share of valid actions that counts, and the share that it must reach. Healthy runs
start there.
"""
GAMED_RETURN = 0.05
"""Fall of the return in the same steps that counts, as a share of the span of returns: 0.1 per unit
in the quickstart, where the mean of five batches varies by 0.02.
"""


def format_gaming(run: History) -> Sightings:
    """Valid actions become more frequent while the return falls: only the format is learned."""
    recorded = run.recent("valid_action_share", MAX_STEPS)
    steps = [each for each in recorded if "return_by_episode" in each][-10:]
    if len(steps) < 10:
        return
    halves = steps[:5], steps[5:]
    was, now = (_mean([each["valid_action_share"] for each in half]) for half in halves)
    earned, earns = map(last_return, halves)
    is_formal = now > max(was + GAMED_VALID, GAMED_LEAST)
    if is_formal and earns < earned - GAMED_RETURN * run.span():
        yield Sighting(
            f"valid actions rose from {was:.0%} to {now:.0%} in ten steps while the last "
            f"episode's return fell from {' to '.join(texts(earned, earns))}"
        )


FALL_ERRORS = 6.0
"""Number of standard errors by which the mean return of `FALL_STEPS` must lie below the best one.
So many, because the best and the present steps are picked from all steps of a run: without any
change, chance exceeds 5 errors in 9 % of runs of 1,000 steps, and 6 errors in 0.5 %.
"""
FALL_SHARE = 0.25
"""Share of what was gained since the first steps that must be lost. This bound, `FALL_ERRORS` and
`FALL_SPAN` were exceeded together in one of 68 recorded runs, whose policy learned a corridor, and
forgot it, twice.
"""
FALL_SPAN = 0.05
"""Share of the span of returns that must be lost, if the span is known: a run that has gained next
to nothing cannot lose much.
"""


def return_collapse(run: History) -> Sightings:
    """The last episode's return has fallen far below its best, and has stayed there for ten
    steps.
    """
    steps = run.recent("return_by_episode", FALL_STEPS)
    if run.best is None or steps[0]["step"] <= run.best[1] or not has_steady_tasks(run.config):
        return
    best, now = run.best[0], last_return(steps)
    least = FALL_SPAN * run.span() if run.bounds else 0.0
    # This cheap test comes before the noise is estimated: the function runs after every step.
    if best - now <= max(FALL_SHARE * (best - run.first_return), least):
        return
    returns = [each["return_by_episode"][-1] for each in run.recent("return_by_episode", MAX_STEPS)]
    # The newest steps may be noisier than those before them, in which the policy may have been
    # certain of its actions.
    error = max(noise(returns), statistics.stdev(returns[-FALL_STEPS:])) * math.sqrt(2 / FALL_STEPS)
    if best - now > FALL_ERRORS * error:
        is_now, was_best = texts(now, best)
        yield Sighting(
            f"the last episode's return is {is_now} in steps {steps[0]['step']} to "
            f"{run.record['step']}, and was {was_best} in the ten steps to {run.best[1]}",
            onset=steps[0]["step"],
        )


# Signatures of the system: waiting processes, failing members, resources that run out.

MISTAKEN = (
    *("the environment raised", "a call returned a wrong value"),
    *("the program did not call the policy", "the program raised after a refused call"),
)
"""Kinds of drops whose cause is the code of the user's class or program."""


def class_raises(run: History) -> Sightings:
    """Groups were dropped because the user's class raised, or returned a wrong value."""
    dropped = sum(run.selection.causes[kind] for kind in MISTAKEN)
    if dropped and (whole := run.selection.whole()):
        yield Sighting(f"{dropped} of {whole.started} groups were dropped, as the class failed")


MOST_RETRYING = 0.2
"""Share of the time of the newest steps above which waits for trials that are played again count.
"""


def slow_retries(run: History) -> Sightings:
    """The learner waits long in steps with trials that were played again after a fault."""
    if not run.record.get("retried_trials"):
        return
    steps = run.recent("waiting_s", MAX_STEPS)
    retried = [each for each in steps if each.get("retried_trials")]
    others = [each["waiting_s"] for each in steps if not each.get("retried_trials")]
    usual = statistics.median(others) if others else min(each["waiting_s"] for each in steps)
    lost = sum(max(0.0, each["waiting_s"] - usual) for each in retried)
    spent = sum(each["waiting_s"] + each.get("train_s", 0.0) for each in steps)
    if len(steps) >= 8 and lost > MOST_RETRYING * spent:
        yield Sighting(
            f"{lost / spent:.0%} of the time of {len(steps)} steps went into waits for trials that "
            "were played again after a fault"
        )


FAILURES, FAILURE_STEPS = 3, 20
"""Number of groups of one member that must be dropped within `FAILURE_STEPS` steps. With 24 members
and 4 groups per step, each member is met three times in 20 steps, so a member that always fails is
found.
"""
MOST_NAMED = 3
"""Number of failing members above which the environment is the cause, not a member."""


def member_failing(run: History) -> Sightings:
    """Groups of one member, or of many, are given up again and again."""
    recent = [
        (each["step"], each["dropped_by_member"])
        for each in run.recent("dropped_by_member", FAILURE_STEPS)
        if each["step"] > run.record["step"] - FAILURE_STEPS and each["dropped_by_member"]
    ]
    counts: Counter[str] = Counter()
    for _, dropped in recent:
        counts.update(dropped)
    failing = {name: count for name, count in counts.items() if count >= FAILURES}
    if len(failing) > MOST_NAMED:
        total = f"{sum(failing.values())} groups of {len(failing)} members"
        yield Sighting(f"{total} were given up in {FAILURE_STEPS} steps", onset=recent[0][0])
        return
    for member, count in sorted(failing.items()):
        onset = next(step for step, dropped in recent if member in dropped)
        text = f"{count} of its groups were given up in {FAILURE_STEPS} steps"
        yield Sighting(text, member, onset)


FEWEST_DROPS = 5
"""Number of dropped groups below which common properties of them are chance."""
UNEQUAL = 0.95
"""A ratio of selection (`mage_async/results/dropped_bias.py`) counts if it is below this, or above
1 / this: how often long groups are trained over how often short ones are, or one kind of group over
the others.
"""
Z_SURE = 3.3
"""Half-width, in standard deviations, of the interval of a ratio. The signature shows only if 1
lies outside of it. Every step tests every kind, so the level is 99.9 % instead of 95 %."""


def selection(run: History) -> Sightings:
    """Long groups, or those of one kind, are dropped more often than the others."""
    causes = run.selection.causes
    if causes.total() < FEWEST_DROPS:
        return
    ((cause, count),) = causes.most_common(1)  # the most frequent cause alone
    why = f"; of {causes.total()} dropped groups {count}: {cause}"
    ratio = run.selection.long_over_short(run.config.admission.trials_per_group, Z_SURE)
    if ratio is not None and _is_unequal(ratio):
        yield Sighting(
            f"long groups were trained {ratio_text(ratio)} times as often as short ones{why}"
        )
    for share, ratio in run.selection.contrasts_by_kind(Z_SURE):
        if _is_unequal(ratio) and ratio.value < 1:
            yield Sighting(
                f"its groups were trained {ratio_text(ratio)} times as often as others{why}",
                share.label,
            )


def _is_unequal(ratio: Ratio) -> bool:
    """Return whether a ratio differs from 1, by enough and not by chance."""
    is_low = ratio.value < UNEQUAL and ratio.high < 1
    return is_low or (ratio.value > 1 / UNEQUAL and ratio.low > 1)


LEAST_FREE = 1_000_000_000
"""Number of free bytes that hold a journal segment, a checkpoint and the logs of a small run."""


def disk_soon_full(run: History) -> Sightings:
    """The disk will be full before the last step, if it fills as it did in the last eight steps;
    or less than `LEAST_FREE` is left.
    """
    first, *others = run.recent("disk_free_bytes", 8)
    step, free = run.record["step"], run.record["disk_free_bytes"]
    used = max(0.0, (first["disk_free_bytes"] - free) / max(1, step - first["step"]))
    left = run.config.learner.steps - step
    if free < LEAST_FREE or (len(others) == 7 and free < used * left):
        yield Sighting(
            f"{free / 1e9:.1f} GB are free, a step takes {used / 1e6:,.0f} MB and {left} steps "
            "are left"
        )


REUSED = 0.7
"""Share of reused tokens, among those that were computed before, below which an engine must have
evicted the rest. Without evictions the share is 1.
"""


def evicted_contexts(run: History) -> Sightings:
    """An engine computes contexts again although its rule lets it reuse them."""
    # If weights change during a trial, `refresh_at_episode` and `isolate` recompute on purpose.
    may_reuse = run.config.engine.cache_rule == "keep" or run.record.get("staleness_max") == 0
    share = run.record["prefix_reuse_rate"]
    # The cache of an engine that was started again is empty.
    if may_reuse and share < REUSED and not run.record.get("retried_trials"):
        yield Sighting(
            f"{share:.0%} of the tokens that had been computed before were reused, so the engine's "
            f"cache holds fewer tokens than its {run.config.engine.max_contexts} contexts have"
        )


STARVING = 0.9
"""Share of its time that the learner waits, mean of eight steps, above which it starves. In a
healthy quickstart it is 0.3 to 0.5 on two cores, which engines and learner share.
"""


def learner_starving(run: History) -> Sightings:
    """The learner waits for trials nearly all the time."""
    waits, works = run.mean("waiting_s", 8), run.mean("train_s", 8)
    if len(run.recent("waiting_s", 8)) == 8 and waits > STARVING * (waits + works):
        yield Sighting(f"a step waits {waits:.1f} s for its batch and computes {works:.1f} s")


IDLE = 0.8
"""Share of their time that actors are idle, mean of eight steps, above which they starve; 0.35 in a
healthy run of Scout.
"""


def actors_starving(run: History) -> Sightings:
    """The actors have nothing to play nearly all the time."""
    mean = run.mean("actors_idle_share", 8)
    if len(run.recent("actors_idle_share", 8)) == 8 and mean > IDLE:
        yield Sighting(f"actors wait for {mean:.0%} of their time")


# Signatures of evaluations: a control that does not lower the return.


def memory_unused(config: Config, evaluation: Record) -> Sightings:
    """Held-out returns are the same without the earlier episodes in the context, in a run that has
    trained the policy to use them.
    """
    if not _trains_memory(config):
        return
    credit = msgspec.to_builtins(config.credit)
    pays_all = credit["kind"] in EARLY_PAID and credit.get("episode_discount") == 1.0
    is_bare = config.warm_start is None and isinstance(config.policy, Tiny)
    training = UNCLONED if is_bare else MORE_TRAINING
    for seen in _no_loss(evaluation, "heldout_blind", "without the earlier episodes"):
        remedy = seen.remedy or (training if pays_all else f"{training} {PAY_EARLY}")
        yield seen._replace(remedy=remedy)


def _trains_memory(config: Config) -> bool:
    """Return whether trials of training have earlier episodes, and the policy sees them."""
    return config.trial.episodes > 1 and config.trial.memory != "none"


MORE_TRAINING = "Train for more learner.steps."
UNCLONED = (
    "The run began without a warm start: begin a new one that clones trials which use earlier "
    'episodes (warm_start.kind = "win_stay", or "script" with a `script` that repeats what paid), '
    "or train for many more learner.steps."
)
"""Remedy in place of `MORE_TRAINING` if a tiny model has cloned nothing. Without a warm start it
learned four of five tasks in twice the steps, and not the fifth."""
PAY_EARLY = (
    "Where early episodes are not paid for what they teach, set "
    'credit.kind = "differential" or "cumulative_paper", or raise a credit.episode_discount '
    "below 1."
)
MORE_TASKS = (
    'The tasks of training are learned by heart: train on more of them (`members("train")` of an '
    "own class, environment.options of others), list words of an own class that could be exchanged "
    '(`interchangeable = [("left", "right")]`), or train for fewer learner.steps.'
)
"""Remedy where training tasks earn more than held-out ones, which do not use memory."""
EARLY_PAID = ("differential", "cumulative_paper")
"""Kinds of credit that pay an episode for what it teaches later ones, at a discount of 1."""


def swap_harmless(config: Config, evaluation: Record) -> Sightings:
    """Held-out returns are the same if another member is hidden in the last episode, in a run that
    has trained memory: the policy has not learned about the member that it plays.
    """
    if _trains_memory(config):
        yield from _no_loss(evaluation, "heldout_swapped", "with another member hidden in it")


NARROW = 0.18
"""Largest half-width of a difference of returns by which a control without a loss is reported, as a
share of the span of returns; without bounds, of the larger return. Two sets of 64 trials that win
half of the time have a half-width of 0.178, which is within it.
"""


def _no_loss(evaluation: Record, control: str, how: str) -> Sightings:
    """Yield a sighting if the last episode loses no return in a control set, compared with the
    held-out set.

    A loss counts if it exceeds its 95 % half-width. If that half-width is above `NARROW`, nothing
    is concluded.
    If training tasks earn more than held-out ones, the sighting names that as the cause.
    """
    sets = evaluation["sets"]
    heldout, other = sets.get("heldout"), sets.get(control)
    if heldout is None or other is None or len(heldout["return_by_episode"]) < 2:
        return
    full, reduced = heldout["return_by_episode"][-1], other["return_by_episode"][-1]
    half_width = math.hypot(halves_of(heldout)[-1], halves_of(other)[-1])
    bounds = _bounds(evaluation["environment"]) if "environment" in evaluation else None
    span = bounds[1] - bounds[0] if bounds else max(abs(full), abs(reduced))
    if full - reduced <= half_width <= NARROW * span:
        earns, keeps, half = texts(full, reduced, half_width)
        seen = (
            f"held-out, the last episode earns {earns}, and {how} {keeps}: no loss beyond the "
            f"interval of the difference, ± {half[1:]}"
        )
        train, remedy = sets.get("train", heldout), ""
        trained, half_width = train["return_by_episode"][-1], halves_of(train)[-1]
        if trained - full > math.hypot(halves_of(heldout)[-1], half_width):
            seen += f"; on tasks of training it earns {texts(full, trained)[1]}"
            remedy = MORE_TASKS
        yield Sighting(seen, remedy=remedy)


def idle_warm_start(records: RunRecords) -> Sightings:
    """The warm start may have taught nothing: its loss, or the ratio of its gate, has not fallen,
    its gate is still shut, or the policy that was cloned from win-stay, lose-shift earns no more
    than random play.
    """
    warm, recorded = records.config.warm_start, records.warm_start
    if warm is None or not recorded:
        return
    if recorded["fault"]:
        yield Sighting(recorded["fault"], remedy=recorded["cure"])
        return
    # A script may explore at random, and a policy without memory cannot repeat what paid.
    if not isinstance(warm, FromWinStay) or records.config.trial.memory == "none":
        return
    heldout = records.evaluation.get("references", {}).get("heldout", {})
    scores = (each["sets"]["heldout"] for each in records.curve if each["version"] == 0)
    score = next(scores, None)
    if score is None or not {"random", "win-stay"} <= heldout.keys():
        return
    halves = records.evaluation["reference_ci95"]["heldout"]
    own, half = score["return_by_episode"][-1], halves_of(score)[-1]
    chance, cloned = heldout["random"][-1], heldout["win-stay"][-1]
    is_chance = own - chance <= math.hypot(half, halves["random"][-1])
    if is_chance and cloned - own > math.hypot(half, halves["win-stay"][-1]):
        earns, by_chance, by_cloned = texts(own, chance, cloned)
        yield Sighting(
            f"after it the last held-out episode earns {earns}, random play {by_chance}, and the "
            f"player that was cloned {by_cloned}"
        )


def class_edited(records: RunRecords) -> Sightings:
    """A class of the user was edited between two starts of the run."""
    for change in records.launch.get("changes", []):
        if change["key"].startswith(SOURCE_OF):
            name, step = change["key"].removeprefix(SOURCE_OF), change["step"]
            yield Sighting(f"it was edited after step {step}, and is played as edited", name, step)


UNTAUGHT = ("no_variance", "rare_rewards")
"""Signatures of a policy with hardly any training signal."""
FOLLOW_FROM_UNTAUGHT = {"memory_unused", "swap_harmless"}
"""Signatures of evaluations that are not reported while one of `UNTAUGHT` shows: such a policy
cannot have learned to use its memory. `Doctor.conclude` tests `UNTAUGHT` at the last step alone,
whichever step an evaluation belongs to."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Describe a way in which runs fail."""

    remedy: str
    """What to do, as a sentence that names a key."""
    in_step: Callable[[History], Sightings] | None = None
    """Function that looks at the newest step of a run."""
    steps_in_a_row: int = 3
    """Number of steps in a row that must show the signature, because a single one may be chance."""
    needs: str = "step"
    """Metric without which a step is skipped; every step has its number."""
    in_evaluation: Callable[[Config, Record], Sightings] | None = None
    """Function that looks at a point of the curve, or at the final evaluation."""
    in_run: Callable[[RunRecords], Sightings] | None = None
    """Function that looks at all records of a run."""


SIGNATURES = {
    "not_finite": Signature(
        "A skipped update leaves the weights as they were. If more follow, lower "
        "learner.learning_rate or learner.grad_clip, or set policy.dtype to float32 where it is "
        "bfloat16, and go on from a checkpoint before the first: `mage train --from RUN_DIR "
        "--checkpoint STEP`.",
        not_finite,
        steps_in_a_row=1,
    ),
    "no_variance": Signature(
        "Raise admission.trials_per_group or sampling.temperature, or choose easier tasks in "
        "environment.options, or along its environment.ladder; where advantage.baseline is by "
        "group, replace groups that earn the same (admission.replaced_groups); with a reward "
        "that is never earned, warm-start by [warm_start].",
        no_variance,
        steps_in_a_row=5,
        needs="zero_advantage_share",
    ),
    "rare_rewards": Signature(
        f"{RARE_CURES[0].upper()}{RARE_CURES[1:]}.",
        rare_rewards,
        needs="earning_share",
    ),
    "truncation": Signature(
        "Raise transcript.max_action_tokens; for whole trials raise engine.max_tokens.",
        truncated_actions,
        in_evaluation=truncated_trials,
    ),
    "invalid_actions": Signature(
        "Raise advantage.format_penalty, or let the transcript write the tags: "
        'transcript.forced_tags = "both"; lower learner.learning_rate where entropy rises too. If '
        "actions were never valid, declare `legal_actions` in the environment, or add "
        "[warm_start]. An agent's program has neither: raise transcript.max_action_tokens where "
        "its calls of tools are cut.",
        invalid_actions,
        steps_in_a_row=2,
        needs="valid_action_share",
    ),
    "entropy_collapse": Signature(
        "Raise learner.entropy and learner.final_entropy, or lower learner.learning_rate, and go "
        "on from a checkpoint before it: `mage train --from RUN_DIR --checkpoint STEP`.",
        entropy_collapse,
        steps_in_a_row=2,
        needs="entropy",
    ),
    "entropy_runaway": Signature(
        f'{LESS_BONUS} or learner.entropy_tokens = "restricted"; lower learner.learning_rate.',
        entropy_runaway,
        steps_in_a_row=2,
        needs="entropy",
    ),
    "off_policy": Signature(
        "Lower admission.max_staleness, learner.learning_rate or learner.minibatches.",
        off_policy,
    ),
    "engine_mismatch": Signature(
        'Where the gap grows, the engine misses new weights: set transport.weights = "disk" and '
        'engine.in_flight = "interrupt"; where it was there from the first step, set policy.dtype '
        "to what the engine computes in.",
        engine_mismatch,
    ),
    "over_bound": Signature(
        "Restart that actor and look at its log; where its machine is slow, lower "
        "admission.grant_deadline_s, so that others play its groups.",
        over_bound,
    ),
    "format_gaming": Signature(
        "Lower advantage.format_penalty, and advantage.length_penalty if there is one.",
        format_gaming,
        steps_in_a_row=2,
        needs="valid_action_share",
    ),
    "return_collapse": Signature(
        "Go on from the best checkpoint in a new run, `mage train --from RUN_DIR --checkpoint "
        "best`, with a lower learner.learning_rate or admission.max_staleness, or a "
        "learner.kl above 0; `mage evaluate RUN_DIR --checkpoint best` measures it.",
        return_collapse,
        steps_in_a_row=1,
        needs="return_by_episode",
    ),
    "class_raises": Signature(
        "`mage journal RUN_DIR --kind drop` names exception, file and line: mend the class, and "
        "begin a new run, because the tasks of these groups were never trained.",
        class_raises,
        steps_in_a_row=1,
        needs="dropped_groups",
    ),
    "member_failing": Signature(
        "Read why by `mage journal RUN_DIR --kind drop` and mend the environment; raise "
        "environment.step_deadline_s where its steps are slow.",
        member_failing,
        steps_in_a_row=1,
        needs="dropped_by_member",
    ),
    "selection": Signature(
        "Faults choose what is trained: mend what the drops name "
        "(`mage journal RUN_DIR --kind drop`), or raise environment.retries; where groups are "
        'too old, lower admission.max_groups_in_play or set admission.rule = "slots".',
        selection,
        steps_in_a_row=1,
        needs="dropped_groups",
    ),
    "disk_soon_full": Signature(
        "Make room, or lower learner.keep_checkpoints or journal.max_bytes.",
        disk_soon_full,
        needs="disk_free_bytes",
    ),
    "evicted_contexts": Signature(
        "Raise max_total_tokens or mem_fraction_static in engine.server, or lower "
        "engine.max_contexts; `mage plan` says how many contexts an engine can cache.",
        evicted_contexts,
        steps_in_a_row=1,
        needs="prefix_reuse_rate",
    ),
    "slow_retries": Signature(
        "Read in the notes of the run what failed (`events.jsonl`): mend the class, or what it "
        "calls; lower environment.retries where a fault never passes.",
        slow_retries,
        steps_in_a_row=1,
        needs="waiting_s",
    ),
    "learner_starving": Signature(
        "Start more actors (--actors), raise engine.max_contexts, or admission.max_staleness. "
        "Where all cores are busy, play shorter trials instead, or on more machines.",
        learner_starving,
        needs="waiting_s",
    ),
    "actors_starving": Signature(
        "Start fewer actors (--actors), or raise admission.max_staleness or learner.threads.",
        actors_starving,
        needs="actors_idle_share",
    ),
    "memory_unused": Signature(
        f"{MORE_TRAINING} {PAY_EARLY}",
        in_evaluation=memory_unused,
    ),
    "swap_harmless": Signature(
        "Train for more learner.steps; choose tasks that differ more (`members` of an own class, "
        "environment.options of others), or look whether a member can be told from its first "
        "episodes at all: raise trial.episodes.",
        in_evaluation=swap_harmless,
    ),
    "idle_warm_start": Signature(
        "Raise warm_start.max_stable_steps, warm_start.steps or warm_start.trials.",
        in_run=idle_warm_start,
    ),
    "class_edited": Signature(
        "Returns before and after that step may not be comparable: begin a new run where they have "
        "to be.",
        in_run=class_edited,
    ),
}
"""All signatures by name. Those that look at steps can halt a run, and are listed once more in
`SignatureName` of `mage_async/config/schema.py`.
"""


# The code below examines a run: step by step while it trains, or as a whole from its records.

FORGET_STEPS = 10
"""If a signature shows again more than this many steps after it last showed, that is a new finding;
if it shows earlier, it belongs to the old one."""


class Doctor:
    """Look for all signatures in one run; a call takes constant time and returns new findings."""

    def __init__(self, config: Config, bounds: tuple[float, float] | None) -> None:
        """Begin with a run of which no step is known.

        Args:
            bounds: As `History.bounds`.
        """
        self.last_step = 0
        """The newest step that was examined."""
        self.findings: list[Finding] = []
        """All findings so far, oldest first."""
        self._config, self._history = config, History(config, bounds)
        self._streaks: dict[str, dict[str, tuple[int, int]]] = {}
        """First step and length of the current row of steps that show a signature, by the name of
        the signature and then by subject."""
        self._last_found: dict[tuple[str, str], int] = {}
        """The last step that showed a signature for certain, by signature and subject."""
        self._found_in_evaluation: set[str] = set()
        """Signatures found in an evaluation or in the whole run, which are reported only once."""

    @staticmethod
    def of(config: Config) -> "Doctor":
        """Return the doctor of a run that is about to begin.

        Raises:
            ConfigError: the environment cannot be made.
        """
        return Doctor(config, _bounds(asdict(environment_of(config).facts)))

    @staticmethod
    def recorded(records: RunRecords) -> "Doctor":
        """Return the doctor of a recorded run, which has examined nothing yet."""
        doctor = Doctor(records.config, _recorded_bounds(records))
        doctor.note_warm_start(records.warm_start)
        return doctor

    @property
    def selection(self) -> Selection:
        """The groups of all examined steps, trained or dropped."""
        return self._history.selection

    def note_warm_start(self, recorded: Record) -> None:
        """Note whether the run has had a warm start, which it has not if nothing was worth cloning.

        Args:
            recorded: As `RunRecords.warm_start`.
        """
        warm = self._config.warm_start if recorded else None
        self._history.config = msgspec.structs.replace(self._config, warm_start=warm)

    def step(self, record: Record) -> list[Finding]:
        """Examine the metrics of a step; a step that a restarted learner repeats is skipped."""
        step = record["step"]
        if step <= self.last_step:
            return []
        self.last_step = step
        self._history.add(record)
        found = []
        for name, signature in SIGNATURES.items():
            if signature.in_step is None or signature.needs not in record:
                continue
            before, streaks = self._streaks.get(name, {}), dict[str, tuple[int, int]]()
            for seen in signature.in_step(self._history):
                onset, length = before.get(seen.subject, (step, 0))
                streaks[seen.subject] = onset, length + 1
                if length + 1 < signature.steps_in_a_row:
                    continue
                last = self._last_found.get((name, seen.subject))
                self._last_found[name, seen.subject] = step
                if last is None or step - last > FORGET_STEPS:
                    found.append(_finding(name, seen, onset, step))
            # A subject that does not show the signature in this step begins a new streak later.
            self._streaks[name] = streaks
        self.findings += found
        return found

    def evaluated(self, evaluation: Record) -> list[Finding]:
        """Examine a point of the curve, or the final evaluation."""
        version = evaluation["version"]
        is_untaught = any(
            length >= SIGNATURES[name].steps_in_a_row
            for name in UNTAUGHT
            for _, length in self._streaks.get(name, {}).values()
        )
        followers = FOLLOW_FROM_UNTAUGHT if is_untaught else set()
        found = [
            _finding(name, seen, version, version)
            for name, signature in SIGNATURES.items()
            if signature.in_evaluation and name not in self._found_in_evaluation | followers
            for seen in signature.in_evaluation(self._history.config, evaluation)
        ]
        return self._remembered(found)

    def conclude(self, records: RunRecords) -> list[Finding]:
        """Examine a run as a whole, and all its recorded evaluations."""
        self.note_warm_start(records.warm_start)
        final = [records.evaluation] if records.evaluation else []
        found = [
            _finding(name, seen, 0, 0)
            for name, signature in SIGNATURES.items()
            if signature.in_run and name not in self._found_in_evaluation
            for seen in signature.in_run(records)
        ]
        found = self._remembered(found)
        return [*found, *(new for each in (*records.curve, *final) for new in self.evaluated(each))]

    def _remembered(self, found: list[Finding]) -> list[Finding]:
        """Return new findings of an evaluation or of the whole run, which are found only once."""
        self._found_in_evaluation.update(finding.name for finding in found)
        self.findings += found
        return found


def examine(records: RunRecords) -> list[Finding]:
    """Return all findings of a recorded run, finished or not: of its steps, then evaluations."""
    doctor = Doctor.recorded(records)
    for record in records.metrics:
        doctor.step(record)
    doctor.conclude(records)
    return doctor.findings


def _finding(name: str, seen: Sighting, onset: int, found: int) -> Finding:
    """Return the finding that a sighting makes."""
    onset = onset if seen.onset is None else seen.onset
    remedy = seen.remedy or SIGNATURES[name].remedy
    return Finding(name, onset, found, seen.evidence, remedy, seen.subject)


def _recorded_bounds(records: RunRecords) -> tuple[float, float] | None:
    """Return the bounds of the return as the final evaluation or the last start recorded them, or
    those of a built-in environment.

    A user's environment is not loaded: reading a run must not execute its code, which may not even
    be on this machine.
    """
    if facts := records.evaluation.get("environment") or records.launch.get("environment"):
        return _bounds(facts)
    if records.config.environment.name not in names():
        return None
    return _bounds(asdict(environment_of(records.config).facts))


def _bounds(facts: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return `History.bounds` from an environment's `Facts` as plain data."""
    least, most, units = (facts[name] for name in ("min_return", "max_return", "units"))
    return None if least is None or most is None else (least / units, most / units)
