"""Pay turns by a discriminator of steps: the inverse RL of StepAgent (arXiv 2411.03817).

GAIL (Ho and Ermon 2016, arXiv 1606.03476) trains D(s, a) to tell an expert's steps from the
policy's. As both act in the same states, the best D is

    D(s, a) = p_E(s, a) / (p_E(s, a) + p(s, a))

and a turn is paid its log-odds, log D - log (1 - D) = log p_E - log p: 0 where nobody can tell the
two apart, so that an episode's length is neither paid nor charged, as it would be by GAIL's own
-log (1 - D).

D is a logistic regression on the text of a step: the action, the state with the action, and each
word of the state at its place with the action. It is fitted to the steps of one batch, from
zero, which is a convex problem with one solution. So rewards are a function of the batch and the
configuration alone: a resumed or replayed run, and a reader of its journal, compute the same ones.

Shapes: `P` distinct pairs of state and action, `F` features.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from mage_async.methods.stepagent.method import Settings
from mage_async.trajectory import Trial

Step = tuple[str, str]
"""The text of a state, `Turn.anchor`, and an action."""
MOST_WORDS = 512
"""Words of a state that are features of their own."""
_ROUNDS = 300
"""Iterations of the fit."""


def fitted_log_odds(
    expert: Mapping[Step, int], policy: Mapping[Step, int], *, smoothing: float
) -> dict[Step, float]:
    """Fit a discriminator to the counts of the expert's and the policy's steps.

    Minimises the cross-entropy, summed over steps, plus half of `smoothing` times the squared
    weights, by Nesterov's accelerated gradient. The step size of each weight is the inverse of an
    upper bound of its curvature, so the fit cannot diverge.

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

    curvature = on_features(0.25 * totals * lengths) + smoothing
    weights = ahead = np.zeros(len(curvature))
    for number in range(_ROUNDS):
        shares = 0.5 * (1 + np.tanh(0.5 * logits(ahead)))
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
    log_odds = fitted_log_odds(expert, policy, smoothing=settings.smoothing) if pairs else {}
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
