"""Define MAGE, LaMer and their baselines as sets of keys, which `mage --method NAME` writes over a
configuration.

The `*_code` presets do what the authors' code does, also where it departs from their papers; the
`*_paper` presets do what the papers say, and compare like with like where the papers are silent.
The presets differ in keys and nowhere else. So a run's `config.toml` states all that a preset sets,
and `--set` after `--method` changes any of it.

| | `*_code` | `*_paper` |
|---|---|---|
| LaMer discounts later episodes | by episodes and by the turns left in this one | by episodes |
| GiGPO's first baseline is a mean over | turns, so long trials weigh more | trials |
| a reflection is compared with | actions, as if its score were 0 | reflections |
| turns in different seats of a game | share a baseline | have one each |
| episodes of a group | share a baseline | have one each |
| reflections of a group, in GiGPO's second term | are all one state | are one state per episode |
| a penalty changes | the first of GiGPO's two terms | both terms |
| the context holds of earlier episodes | reflections alone | histories and reflections |

Both sets keep the published discount of 0.6 between episodes, at which MAGE's objective weighs the
first episode more than the last (`mage_async/credit/returns.py`); the schema's default is 1.0. The
authors' scripts use another discount in some environments, so a `*_code` preset keeps the discount
that a configuration file states.
"""

from collections.abc import Mapping
from typing import Any

from mage_async.errors import ConfigError
from mage_async.methods import catalogue
from mage_async.user_modules import did_you_mean

PUBLISHED = {
    "trial.stop_on_success": True,
    "credit.turn_discount": 0.95,
    "credit.episode_discount": 0.6,
    "advantage.estimator": "gigpo",
    "advantage.scale": "none",
    "advantage.anchor_weight": 1.0,
    "advantage.format_penalty": 0.5,
    "learner.correction.kind": "none",
    "learner.correction.clip_low": 0.2,
    "learner.correction.clip_high": 0.2,
    "learner.correction.dual_clip": 3.0,
}
"""Keys that the papers and the code of both MAGE and LaMer have in common. MAGE's scripts of Kuhn
poker and tic-tac-toe also set `learner.kl`; these two scripts and the one of Sokoban also set
`advantage.length_penalty` (`configs/papers/`).
"""

AS_CODED = {
    "trial.memory": "reflection",
    "advantage.baseline": ["group"],
    "advantage.weight": "sample",
    "advantage.anchor": "coded",
    "advantage.penalise": "score",
}
"""The column `*_code` of the table above; the discount of LaMer follows from `credit.kind`."""

REPAIRED = {
    "trial.memory": "history_and_reflection",
    "advantage.baseline": ["group", "member", "seat", "kind", "episode"],
    "advantage.weight": "trial",
    "advantage.anchor": "global",
    "advantage.penalise": "return",
}
"""The column `*_paper` of the table above."""

DISCOUNT = "credit.episode_discount"

SINGLE_EPISODE = {
    key: value for key, value in (PUBLISHED | REPAIRED).items() if key != DISCOUNT
} | {
    "trial.episodes": 1,
    "trial.memory": "history",
    "credit.kind": "single_episode",
}
"""Ordinary RL on single episodes: the model learns to act well, not to use earlier episodes."""

ONE_SCORE = {
    "advantage.value": "trial_score",
    "advantage.baseline": ["group"],
    "advantage.anchor_weight": 0.0,
}
"""One score per trial, so that all its tokens have the same advantage (RLOO, arXiv 2402.14740)."""

TOKEN_NORMALISED = ONE_SCORE | {
    "advantage.estimator": "token_normalised",
    "advantage.scale": [],
    "advantage.epsilon": 1e-8,
    "advantage.epsilon_unit": "return",
}
"""The score minus the group's mean, normalised over the tokens of the whole batch
(REINFORCE++-baseline, arXiv 2501.03262). `advantage.scale = []` is the whole batch."""

GRPO = ONE_SCORE | {
    "advantage.estimator": "group_mean",
    "advantage.scale": ["group"],
    "advantage.epsilon": 1e-6,
    "advantage.epsilon_unit": "return",
    "learner.average": "trial",
}
"""The score minus the group's mean, divided by the group's deviation; the loss is averaged over the
tokens of each trial first (GRPO, arXiv 2402.03300)."""

UNTRAINED = {"learner.steps": 0, "warm_start": "none"}
"""No training at all: an evaluation of the model as it is."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "lamer_code": PUBLISHED | AS_CODED | {"credit.kind": "cumulative_code"},
    "lamer_paper": PUBLISHED | REPAIRED | {"credit.kind": "cumulative_paper"},
    "mage_code": PUBLISHED | AS_CODED | {"credit.kind": "differential"},
    "mage_paper": PUBLISHED | REPAIRED | {"credit.kind": "differential"},
    "grpo": SINGLE_EPISODE | GRPO,
    "gigpo": SINGLE_EPISODE,
    "reinforce_pp_baseline": SINGLE_EPISODE | TOKEN_NORMALISED,
    "rloo": SINGLE_EPISODE | ONE_SCORE | {"advantage.estimator": "leave_one_out"},
    "retry": SINGLE_EPISODE | {"trial.memory": "none"},
    "zero_shot": UNTRAINED | {"trial.memory": "none"},
    "react": UNTRAINED | {"trial.memory": "history"},
    "reflexion": UNTRAINED | {"trial.memory": "reflection"},
}
"""Keys by preset: MAGE and LaMer, then the baselines of the papers.

`grpo`, `gigpo`, `reinforce_pp_baseline` and `rloo` train on one episode and are evaluated on
`evaluation.episodes`. `retry` is `gigpo` without any memory: it wins more trials within three
episodes than within one (`won_within`) by luck alone, and a method that claims to learn within a
trial has to beat it. `zero_shot`, `react` and `reflexion` are the untrained model: without memory,
with its earlier episodes in the context, and with its reflections on them. A pretrained model needs
`transcript.rules = true` for each of the three. `mage_async/methods/` has the other methods, each
with its presets.
"""


def presets() -> dict[str, Mapping[str, Any]]:
    """Return the keys of all presets by name: those of this file, then those of the methods."""
    return {**PRESETS, **catalogue.presets()}


def keys_of_method(
    name: str, *, environment: str | None = None, stated_discount: float | None = None
) -> Mapping[str, Any]:
    """Return the keys that `--method NAME` writes over a configuration.

    Args:
        name: name of a preset; or a method to turn on: its name, or `module:Class` of a user's own.
        environment: name of the environment; LaMer's paper uses another discount in MineSweeper.
        stated_discount: `credit.episode_discount` of the file; None if the file does not state it.

    Raises:
        ConfigError: there is no such preset or method.
    """
    if ":" in name:
        return {f'methods."{name}"': {}}
    known = presets()
    if name not in known and name in catalogue.METHODS:
        return {f"methods.{name}": {}}
    if name not in known:
        # A preset may have the name of its method.
        names = list(dict.fromkeys([*known, *catalogue.METHODS]))
        raise ConfigError(
            f"--method: there is no {name!r}{did_you_mean(name.lower(), names)}; known: "
            f"{', '.join(names)}, or module:Class of your own"
        )
    keys = dict(known[name])
    if name.endswith("_code") and stated_discount is not None:
        keys.pop(DISCOUNT, None)
    if name == "lamer_paper" and environment == "minesweeper":
        keys[DISCOUNT] = 0.9
    return keys
