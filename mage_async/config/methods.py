"""MAGE and LaMer as sets of keys: `mage --method mage_code` writes them over a configuration.

The `*_code` methods do what the published code does, habits included; the `*_paper` methods what
the papers say, with those habits repaired. What differs is in the keys and nowhere else, so a run's
`config.toml` says it all, and `--set` after `--method` changes any of it.

| as coded | repaired |
|---|---|
| LaMer discounts later episodes by the rest of this one too | by their distance alone |
| means over turns: long trials weigh more | over trials |
| reflections share the mean of actions, with score 0 | compared with reflections |
| both seats share a mean | seats are kept apart |
| penalties reach the first of GiGPO's two terms | both |

Both keep the published discount of 0.6 between episodes, at which MAGE's objective weighs the
first episode more than the last (`mage_async/credit/returns.py`). The shipped configurations say
1.0.
"""

from collections.abc import Mapping
from typing import Any

PUBLISHED = {
    "trial.memory": "reflection",
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
"""What both papers and both codes share; MAGE's scripts of Kuhn poker and tic-tac-toe also set
`learner.kl` to 0.1.
"""

AS_CODED = {
    "advantage.baseline": ["group"],
    "advantage.weight": "sample",
    "advantage.penalise": "score",
}

REPAIRED = {
    "advantage.baseline": ["group", "member", "seat", "kind"],
    "advantage.weight": "trial",
    "advantage.penalise": "return",
}

SINGLE_EPISODE = (
    PUBLISHED
    | REPAIRED
    | {"trial.episodes": 1, "trial.memory": "history", "credit.kind": "single_episode"}
)
"""Ordinary RL: what is learned is a policy, not to learn."""

UNTRAINED = {"learner.steps": 0, "warm_start": "none"}
"""No training at all, so the credit does not matter."""

BY_ROLE = ["group", "kind"]
"""Actions, reflections and strategies of a group, each with a mean and a deviation of their own."""

BOTH_SEATS = {
    "population.both_seats": 0.33,
    "advantage.baseline": ["group", "seat", "kind", "episode", "index"],
    "advantage.scale": ["member", "seat"],
}
"""A third of the groups is self-play, trained on from both seats, each with a mean and a deviation
of its own.
"""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "lamer_code": PUBLISHED | AS_CODED | {"credit.kind": "cumulative_code"},
    "lamer_paper": PUBLISHED | REPAIRED | {"credit.kind": "cumulative_paper"},
    "mage_code": PUBLISHED | AS_CODED | {"credit.kind": "differential"},
    "mage_paper": PUBLISHED | REPAIRED | {"credit.kind": "differential"},
    "grpo": SINGLE_EPISODE
    | {
        "advantage.estimator": "group_mean",
        "advantage.baseline": ["group"],
        "advantage.scale": ["group"],
        "advantage.anchor_weight": 0.0,
    },
    "gigpo": SINGLE_EPISODE,
    "rloo": SINGLE_EPISODE
    | {
        "advantage.estimator": "leave_one_out",
        "advantage.baseline": ["group", "kind", "index"],
        "advantage.anchor_weight": 0.0,
    },
    "retry": SINGLE_EPISODE | {"trial.memory": "none"},
    "zero_shot": UNTRAINED | {"trial.memory": "none"},
    "react": UNTRAINED | {"trial.memory": "history"},
    "reflexion": UNTRAINED | {"trial.memory": "reflection"},
    "scaling_inter": {"curriculum.episodes": [1, 2, 3], "trial.episodes": 3},
    "sge": {"trial.strategy": "turn", "sampling.strategy_temperature": 1.5},
    "rema": {
        "trial.memory": "reflection",
        "advantage.estimator": "group_mean",
        "advantage.baseline": BY_ROLE,
        "advantage.scale": BY_ROLE,
        "advantage.anchor_weight": 0.0,
    },
    "information_bonus": {"credit.information_bonus": 0.1},
    "metacure": {
        "policy.separate_exploration": True,
        "policy.lora.rank": 16,
        "credit.kind": "final_only",
        "credit.information_bonus": 1.0,
        "credit.exploration_share": 0.0,
        "advantage.scale": ["episode"],
    },
    "stepagent_implicit": {"expert.form": "implicit"},
    "stepagent_irl": {"expert.form": "irl"},
    "sac_glam": {
        "trial.episodes": 1,
        "credit.kind": "single_episode",
        "credit.turn_discount": 0.95,
        "learner.correction.kind": "none",
        "learner.entropy": 0.0,
        "learner.final_entropy": 0.0,
        "learner.tokens_per_pass": 0,
        "learner.minibatches": 16,
        "transcript.forced_tags": "both",
        "transcript.max_action_tokens": 1,
        "sac.hindsight": 4,
    },
    "graph_memory": {
        "graph_memory.strategies": 3,
        "advantage.baseline": ["group", "memory", "kind", "episode", "index"],
    },
    "both_seats": BOTH_SEATS,
    "mage_population": BOTH_SEATS
    | {
        "population.rivals": 0.17,
        "population.every": 5,
        "population.rivals_remember": True,
        "population.matchmaker": "progress",
    },
}
"""Keys by method; behind MAGE and LaMer the papers' baselines.

`grpo`, `gigpo` and `rloo` are trained on one episode and evaluated on as many as
`evaluation.episodes` says. `retry` is `gigpo` without any memory: what its `won_within` gains over
one episode is luck, and anything that claims to learn within a trial has to beat it. `zero_shot`,
`react` and `reflexion` are the model as it is: by itself, with its earlier episodes to read, and
with its remarks on them; a model that reads needs `transcript.rules = true` for each.

Nine change one thing each of whatever configuration they are written over:

- `scaling_inter` (arXiv 2509.08755): a horizon that grows in stages of `curriculum.steps`, here
  over episodes; how many turns are few depends on the environment: set `curriculum.turns` too.
- `sge` (arXiv 2603.02045): a strategy before each action, drawn hotter than the action. Which
  temperatures the paper uses was not found. Left out: strategies of other trials of the group in
  the prompt; those of the own trial stay in its history.
- `rema` (arXiv 2503.09501, with shared weights): the reflecting and the playing role are both paid
  the same return, and each is normalised within the group and among its own turns. Its ratio per
  turn is `learner.correction = "gspo"`.
- `information_bonus`: MetaCURE's bonus alone, for finding out the hidden member before the last
  episode, at the weight of its code; one policy does both, as the episode is in its context.
- `stepagent_implicit` and `stepagent_irl` (arXiv 2411.03817): the environment's best scripted
  player is asked at every turn. Its action is preferred to the policy's, or a discriminator of the
  two pays the turn; `docs/methods/stepagent.md`.
- `graph_memory` (arXiv 2511.07800): half of each group's trials begin with three strategies that
  earlier tasks taught, drawn by trained weights; both halves have a baseline of their own.
- `both_seats` and `mage_population` (MAGE, arXiv 2603.03680): self-play in which the policy plays
  both seats and is trained on both; the latter with past versions that remember the trial, and
  members drawn by how much the agent's return against them changes;
  `docs/methods/mage_population.md`.

`sac_glam` (arXiv 2410.12481) is soft actor-critic with a replay buffer and goals relabelled in
hindsight, on one episode; `docs/methods/sac_glam.md` has its equations. `metacure` (arXiv
2006.08170) is an explorer that is paid the bonus alone, and an exploiter that is paid the last
episode, each a low-rank adapter of its own; `docs/methods/metacure.md`.
"""
