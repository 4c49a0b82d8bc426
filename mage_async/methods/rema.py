"""ReMA (arXiv 2503.09501) with shared weights: a role that reflects and a role that plays.

Both roles are paid the same return, and each is normalised within the group among its own turns.
The ratio per turn of the paper is `learner.correction = "gspo"`.
"""

from typing import ClassVar

from mage_async.methods.method import Method

BY_ROLE = ["group", "kind"]
"""Actions, reflections and strategies of a group, each with a mean and a deviation of their own."""


class Rema(Method):
    """Keys alone; no hook is needed."""

    presets: ClassVar = {
        "rema": {
            "trial.memory": "reflection",
            "advantage.estimator": "group_mean",
            "advantage.baseline": BY_ROLE,
            "advantage.scale": BY_ROLE,
            "advantage.anchor_weight": 0.0,
        }
    }
