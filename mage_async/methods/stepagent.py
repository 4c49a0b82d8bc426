"""Ask an expert at each turn, and train on its answers: StepAgent (arXiv 2411.03817).

The method has two forms (`docs/methods/stepagent.md`). "implicit" adds a preference loss on the
first token in which the expert's action differs from the policy's (`stepagent_preference.py`);
"irl" rewards each turn by the log-odds of a discriminator that tells the expert's steps from the
policy's (`fitted_log_odds`). The expert is the environment's best script, recorded trials, or a
policy.
"""

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from mage_async.assembly import named_parts
from mage_async.config.section import Natural, NonNegative, Positive, Section
from mage_async.environments.environment import Environment, Play, Script
from mage_async.environments.mix import component_of
from mage_async.environments.user_calls import make_pending_calls
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.methods.method import Adviser, Advisers, Method
from mage_async.trajectory import Kind, Task, Trial


class Settings(Section):
    """Comparison with an expert at each action (StepAgent, arXiv 2411.03817); see
    `docs/methods/stepagent.md`."""

    form: Literal["implicit", "irl"] = "implicit"
    """"implicit": at every turn the expert's action is preferred to the policy's, as in DPO; "irl":
    a discriminator, which tells the expert's actions from the policy's, rewards every turn."""
    source: str = "script"
    """The expert: "script", the environment's best scripted player; or a file of recorded trials,
    as `mage journal --export FILE.jsonl` writes them; or, with "implicit" only, the model directory
    of a policy with the same tokenizer."""
    weight: NonNegative = 1.0
    """With "implicit": weight of the preference loss, relative to an advantage of 1. With "irl":
    reward per nat of the discriminator's log-odds."""
    beta: Positive = 0.1
    """With "implicit": DPO's beta, the reward per nat by which the policy's log-prob of an action
    differs from the reference policy's."""
    cycle: Natural = 0
    """With "implicit": after every so many steps the policy becomes the reference policy. 0: the
    reference policy is always the one that training began with."""
    states: Literal["policy", "expert"] = "policy"
    """With "irl": the expert's steps on which the discriminator is fitted: "policy", its actions in
    the states that the policy reached; "expert", for scripts only, the steps of trials that the
    expert plays itself, on the same tasks."""
    smoothing: Positive = 1.0
    """With "irl": weight decay of the discriminator. Half of it times the squared weights is added
    to the cross-entropy summed over steps; the smaller it is, the closer is the fit."""


class StepAgent(Method):
    """Ask an expert in training, and train on its answers in one of two forms."""

    Settings = Settings
    presets: ClassVar = {
        "stepagent_implicit": {"methods.stepagent.form": "implicit"},
        "stepagent_irl": {"methods.stepagent.form": "irl"},
    }
    metrics: ClassVar = {
        "expert_agreement": (
            "share",
            "Actions equal to those of the expert, among all for which the expert knew one.",
        ),
        "expert_loss": (
            "1",
            "Mean preference loss of the pairs of an expert's and a policy's action.",
        ),
        "expert_preferred_share": (
            "share",
            "Pairs in which the expert's action has gained on the policy's since training began.",
        ),
    }

    def check(self) -> None:
        """Refuse keys that contradict each other, and environments without an expert."""
        settings = self.settings
        if self.config.learner.ranks > 1 and settings.form == "implicit":
            raise ConfigError(
                f'learner.ranks = {self.config.learner.ranks}: methods.stepagent.form = "implicit" '
                'works in one process alone: set methods.stepagent.form = "irl", or set '
                "learner.ranks = 1"
            )
        self._check_variants()
        if settings.source != "script":
            if self.frozen_policy() and settings.form == "irl":
                raise ConfigError(
                    f'methods.stepagent.source = "{settings.source}" is a model directory, whose '
                    'actions are not written down; set methods.stepagent.form = "implicit", or a '
                    "file of its recorded trials"
                )
            self.advisers()  # reads the file, so that an unreadable one is refused here
            return
        for name, part in named_parts(self.config):
            if part.script(random.Random(0)) is None:
                raise ConfigError(
                    f"environment {name!r} has no `script` to be the expert: write one, or set "
                    "methods.stepagent.source to a file of recorded trials, or leave the table out"
                )

    def _check_variants(self) -> None:
        """Refuse `states` and `cycle` together with keys that they do not work with."""
        settings, problem = self.settings, ""
        if settings.states == "expert" and (settings.form != "irl" or settings.source != "script"):
            problem = 'states = "expert" needs form = "irl" and source = "script"'
        elif settings.cycle and self.config.policy.lora is not None:
            problem = "cycle: the reference of adapters is the model without them: set cycle = 0"
        elif settings.cycle and self.config.learner.kl:
            problem = "cycle renews the reference of learner.kl too: set learner.kl or cycle to 0"
        if problem:
            raise ConfigError(f"methods.stepagent.{problem}")

    @property
    def rewards_need_environment(self) -> bool:
        """Whether the expert plays trials of its own."""
        return bool(self.settings.states == "expert")

    def advisers(self) -> Advisers | None:
        """Return the function that makes the expert of a trial; None: the expert is a policy, whose
        forward the learner computes.
        """
        return None if self.frozen_policy() else self._experts

    def turn_rewards(self, trials: Sequence[Trial]) -> list[list[float]] | None:
        """Return the rewards of the discriminator."""
        if self.settings.form != "irl":
            return None
        expert = self._expert_steps(trials) if self.settings.states == "expert" else None
        return step_rewards(trials, self.settings, expert)

    def _expert_steps(self, trials: Sequence[Trial]) -> Counter[tuple[str, str]]:
        """Let the expert play the tasks of the trials itself; count its states and actions."""
        steps: Counter[tuple[str, str]] = Counter()
        for trial in trials:
            part = component_of(self.environment, trial.task.member)
            expert = scripted(part, trial.task, trial.index)
            if expert is None:
                continue
            for episode in range(trial.num_episodes):
                play = self.environment.begin(trial.task, episode)
                make_pending_calls(play)
                is_over = False
                while not is_over:
                    action = expert.action(play, episode, ()) or ""
                    steps[play.anchor, action] += 1
                    outcome = play.act(action)
                    # In an environment whose calls may wait, the call returns the outcome.
                    outcome = make_pending_calls(play) or outcome
                    is_over = outcome.is_done
        return steps

    def loss_term(self) -> Any:
        """Return the preference loss."""
        if self.settings.form != "implicit":
            return None
        from mage_async.methods.stepagent_preference import PreferenceLoss  # with torch

        return PreferenceLoss(self.settings)

    def frozen_policy(self) -> Path | None:
        """Return the expert's model directory, where the expert is a policy."""
        source = Path(self.settings.source)
        return source if source.is_dir() else None

    def batch_metrics(self, trials: Sequence[Trial]) -> dict[str, float]:
        """Return the share of actions in which the policy acted as the expert."""
        pairs = [
            (trial.turns[each.turn].action, each.action)
            for trial in trials
            for each in trial.alternatives
        ]
        if not pairs:
            return {}
        return {"expert_agreement": sum(own == experts for own, experts in pairs) / len(pairs)}

    @cached_property
    def _experts(self) -> Advisers:
        """Function that makes the expert of a trial; a file of recorded trials is read once."""
        source = self.settings.source
        return scripted if source == "script" else recorded_experts(Path(source))


MAX_ACTION_CHARS = 1024
"""Largest number of characters of an expert's action."""


@dataclass(frozen=True, slots=True)
class ScriptedExpert:
    """Advise by the environment's script, whose choices are checked."""

    script: Script

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str:
        """Return the choice of the script.

        Raises:
            EnvironmentFault: the choice is no text, or a longer one than `MAX_ACTION_CHARS`.
        """
        chosen: object = self.script.choose(play)
        if not isinstance(chosen, str) or len(chosen) > MAX_ACTION_CHARS:
            raise EnvironmentFault(
                f"an expert's action is text of at most {MAX_ACTION_CHARS:,} characters, "
                f"got {chosen!r:.60}"
            )
        return chosen


def scripted(environment: Environment, task: Task, index: int) -> Adviser | None:
    """Return the environment's best scripted player; None: it has none."""
    # A user's class may declare `script` alone.
    choice = getattr(environment, "best_script", environment.script)
    script = choice(random.Random(f"{task.seed}/{index}/expert"))
    return None if script is None else ScriptedExpert(script)


class _Turn(msgspec.Struct):
    """Describe one turn of a `_Row`."""

    episode: int
    kind: str
    action: str
    is_valid: bool = True


class _Row(msgspec.Struct):
    """Describe the fields that are read from a line of `mage journal --export FILE.jsonl`."""

    environment: str
    member: str
    seat: int
    seed: int
    reward_by_episode: list[float]
    turns: list[_Turn]


Place = tuple[Task, int, tuple[str, ...]]
"""A task, an episode, and the actions of the episode so far, which determine the state."""


def recorded_experts(file: Path) -> Advisers:
    """Return a function that makes advisers which answer with the actions of recorded trials.

    An action is looked up by task, episode and earlier actions. If several recorded episodes begin
    with the same actions, the one with the highest return decides among those whose next action is
    valid.

    Args:
        file: Trials as `mage journal --export FILE.jsonl` writes them.

    Raises:
        ConfigError: the file cannot be read, or does not hold recorded trials.
    """
    try:
        lines = file.read_bytes().splitlines()
        rows = [msgspec.json.decode(line, type=_Row) for line in lines if line.strip()]
    except (OSError, UnicodeError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f'methods.stepagent.source = "{file}" is neither "script" nor a file of recorded '
            f"trials, as mage journal --export FILE.jsonl writes it: {error}"
        ) from None
    actions = _best(rows)
    return lambda environment, task, index: _RecordedExpert(actions, task)


@dataclass(frozen=True, slots=True)
class _RecordedExpert:
    """Advise in one trial: by the recorded actions for its task."""

    actions: Mapping[Place, str]
    task: Task

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str | None:
        """Return the recorded action."""
        return self.actions.get((self.task, episode, tuple(done)))


def _best(rows: Sequence[_Row]) -> dict[Place, str]:
    """Return actions by place; those of episodes with a higher return overwrite others."""
    played: list[tuple[float, Task, int, list[_Turn]]] = []
    for row in rows:
        task = Task(row.environment, row.member, row.seed, row.seat)
        for episode, reward in enumerate(row.reward_by_episode):
            acts = [turn for turn in row.turns if turn.kind == Kind.ACT.name.lower()]
            own = [turn for turn in acts if turn.episode == episode]
            played.append((reward, task, episode, own))
    played.sort(key=lambda each: each[0])
    return {
        (task, episode, tuple(turn.action for turn in acts[:number])): acts[number].action
        for _, task, episode, acts in played
        for number in range(len(acts))
        if acts[number].is_valid and len(acts[number].action) <= MAX_ACTION_CHARS
    }


Step = tuple[str, str]
"""The text of a state, `Turn.anchor`, and an action."""
MOST_WORDS = 512
"""Largest number of words of a state that become features; later words are left out."""
_ROUNDS = 300
"""Iterations of the fit."""


def fitted_log_odds(
    expert: Mapping[Step, float], policy: Mapping[Step, float], *, smoothing: float
) -> dict[Step, float]:
    """Fit a discriminator to the counts of the expert's and the policy's steps.

    GAIL (Ho and Ermon 2016, arXiv 1606.03476) trains D(s, a) to tell an expert's steps from the
    policy's. If both act in the same states, the best D is

        D(s, a) = p_E(s, a) / (p_E(s, a) + p(s, a))

    and a turn is paid its log-odds, log D - log (1 - D) = log p_E - log p, which is 0 where nobody
    can tell the two apart. So an episode does not earn more or less by its length alone; with
    GAIL's own reward, -log (1 - D), it would. With `states = "expert"` they act in different
    states, and p_E and p are the probabilities of state and action together (`step_rewards` weights
    the expert's counts).

    D is a logistic regression on the text of a step: the action, the state with the action, and
    each word of the state at its place with the action. It is fitted to the steps of one batch,
    from zero, which is a convex problem with one solution. So rewards are a function of the batch
    and the configuration alone: a resumed or replayed run, and a reader of its journal, compute the
    same ones.

    Minimises the cross-entropy, summed over steps, plus half of `smoothing` times the squared
    weights, by Nesterov's accelerated gradient. The step size of each weight is the inverse of an
    upper bound of its curvature, so the fit cannot diverge.

    Shapes: `P` distinct pairs of state and action, `F` features.

    Returns:
        Log-odds, in nats, that a step is the expert's and not the policy's, for each given step.
    """
    steps = list(dict.fromkeys([*expert, *policy]))
    counts = np.array([(expert.get(step, 0), policy.get(step, 0)) for step in steps], float)
    totals = counts.sum(1)  # [P]
    # A logistic regression on features that are 0 or 1, laid out pair by pair.
    numbers: dict[Hashable, int] = {}
    rows = [[numbers.setdefault(key, len(numbers)) for key in _features(*step)] for step in steps]
    lengths = np.array([len(row) for row in rows], np.int64)
    features = np.array([number for row in rows for number in row], np.int64)
    starts = np.cumsum(lengths) - lengths

    def logits(weights: np.ndarray) -> np.ndarray:
        """Compute the log-odds of each pair: float64 [P]."""
        return np.add.reduceat(weights[features], starts)

    def on_features(values: np.ndarray) -> np.ndarray:
        """Sum values, float64 [P], over the pairs that have each feature: float64 [F]."""
        return np.bincount(features, np.repeat(values, lengths))

    # Upper bounds of the weights' curvatures: a sigmoid's slope is at most 0.25, and all features
    # of a pair add up in one logit.
    curvature = on_features(0.25 * totals * lengths) + smoothing
    weights = ahead = np.zeros(len(curvature))
    for number in range(_ROUNDS):
        shares = 0.5 * (1 + np.tanh(0.5 * logits(ahead)))  # the sigmoid, without overflow
        gradient = on_features(totals * shares - counts[:, 0]) + smoothing * ahead
        before, weights = weights, ahead - gradient / curvature
        ahead = weights + number / (number + 3) * (weights - before)
    return dict(zip(steps, logits(weights).tolist(), strict=True))


def step_rewards(
    trials: Sequence[Trial], settings: Settings, expert: Counter[Step] | None = None
) -> list[list[float]]:
    """Return the reward of each turn of each trial: `settings.weight` per nat of log-odds, and 0
    where the expert knew no action.

    Args:
        expert: steps of the expert's own trials; None: its actions in the policy's states.
    """
    pairs = [
        ((trial.turns[step.turn].anchor, step.action), _own(trial, step.turn))
        for trial in trials
        for step in trial.alternatives
    ]
    if expert is None:
        expert = Counter(theirs for theirs, _ in pairs)
    policy = Counter(own for _, own in pairs)
    # An expert that plays itself takes more or fewer steps than the policy. With raw counts, the
    # log of the ratio of these numbers would be added to the reward of every turn, and an episode
    # would earn more or less by its length alone.
    weight = len(pairs) / max(1, expert.total())
    weighted = {step: weight * count for step, count in expert.items()}
    log_odds = fitted_log_odds(weighted, policy, smoothing=settings.smoothing) if pairs else {}
    paid = [[0.0] * len(trial.turns) for trial in trials]
    for trial, rewards in zip(trials, paid, strict=True):
        for step in trial.alternatives:
            rewards[step.turn] = settings.weight * log_odds[_own(trial, step.turn)]
    return paid


def _own(trial: Trial, number: int) -> Step:
    """Return the state of a turn and the policy's action."""
    turn = trial.turns[number]
    return turn.anchor, turn.action


def _features(state: str, action: str) -> Iterator[Hashable]:
    """Yield a key for each feature that a step has."""
    yield action
    yield state, action
    for place, word in enumerate(state.split()[:MOST_WORDS]):
        yield place, word, action
