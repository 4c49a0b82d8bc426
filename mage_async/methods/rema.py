"""Train a planner and an executor that take every turn together: ReMA (arXiv 2503.09501).

Before each action the planner writes a remark, which says what to do, and the executor acts
(`trial.strategy = "turn"`; the texts of both prompts are in `mage_async/trials/prompts.py`). The
advantage of both roles is GRPO's, of the score of the whole trial. The loss of a role is a mean
over its turns and then over trials, with one clipped importance ratio for each turn (`gspo`, clip
0.2, dual clip 3). Averaged over the tokens of a turn, this loss has the gradient of the authors'
loss. Either the two roles share all weights, and only their prompts tell them apart, or each has a
low-rank adapter. They learn together, or in turn for some steps each, as with the authors'
`switch_agent`.
"""

from collections.abc import Collection
from typing import ClassVar

from mage_async.config.presets import GRPO
from mage_async.config.section import Natural, Section
from mage_async.errors import ConfigError
from mage_async.methods.method import Method, check_two_adapters
from mage_async.trajectory import Kind


class Settings(Section):
    """A planner and an executor (ReMA, arXiv 2503.09501); see `docs/methods/rema.md`."""

    separate_roles: bool = False
    """Planner and executor have a low-rank adapter each; needs `policy.lora`."""
    alternate: Natural = 0
    """Number of steps for which the planner learns alone, and then the executor alone, in turn; 0:
    both learn in every step."""


SHARED = GRPO | {
    "methods.rema.alternate": 0,
    "trial.episodes": 1,
    "trial.memory": "history",
    "trial.strategy": "turn",
    "credit.kind": "single_episode",
    "advantage.weight": "trial",
    "advantage.penalise": "return",
    "learner.average": "turn",
    "learner.correction.kind": "gspo",
    "learner.correction.clip_low": 0.2,
    "learner.correction.clip_high": 0.2,
    "learner.correction.dual_clip": 3.0,
}
"""The authors' script with shared weights."""

SEPARATE = SHARED | {
    "methods.rema.separate_roles": True,
    "methods.rema.alternate": 10,
    "policy.lora.rank": 16,
}
"""The authors' script with two models, of which one is trained at a time."""


class Rema(Method):
    """Train the two roles of every turn, together or alternately."""

    Settings = Settings
    presets: ClassVar = {"rema": SHARED, "rema_separate": SEPARATE}

    def check(self) -> None:
        """Refuse roles that do not take every turn, and two adapters where they cannot be used."""
        if self.config.trial.strategy != "turn":
            raise ConfigError(
                'methods.rema: the planner writes before each action: set trial.strategy = "turn", '
                f"got {self.config.trial.strategy!r}"
            )
        if self.settings.separate_roles:
            check_two_adapters("methods.rema.separate_roles", self.config)

    def roles(self) -> tuple[str, str] | None:
        """Return a planner and an executor, where they are separate."""
        return ("planner", "executor") if self.settings.separate_roles else None

    def takes_second_role(self, kind: Kind, is_last: bool) -> bool:
        """Return whether a turn is an action, which the executor takes."""
        return kind is Kind.ACT

    def trained_kinds(self, version: int) -> Collection[Kind]:
        """Return the kinds of turns of the role that learns at a version; all, if both learn."""
        period = self.settings.alternate
        if not period:
            return tuple(Kind)
        executor_learns = version // period % 2 == 1
        return [kind for kind in Kind if (kind is Kind.ACT) == executor_learns]
