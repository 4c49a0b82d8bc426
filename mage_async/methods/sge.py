"""Explore with strategies in words, and reflect on earlier strategies: SGE (arXiv 2603.02045).

The policy writes a strategy before each action, sampled at a higher temperature than the action;
the core has keys for this (`trial.strategy`, `sampling.strategy_temperature`). This file adds
reflection: some trials begin with two strategies from the last trained group with their task: the
first strategy of the episode that earned most, and that of the episode that earned least. The text
says which is which. Strategies of a trial's own group cannot be used, because all trials of a group
are played at once.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from mage_async.config.section import Count, Section, Share
from mage_async.errors import ConfigError
from mage_async.methods.method import Method
from mage_async.trajectory import Group, Guidance, Kind, Task, Trial


class Settings(Section):
    """Reflection on strategies of earlier trials of the same task (SGE, arXiv 2603.02045)."""

    reflected: Share = 0.5
    """Share of a group's trials that begin with strategies of the last trained group with the same
    hidden member and seat, if there is one."""
    max_bytes: Count = 512
    """Largest number of bytes of the text with which such a trial begins; longer strategies are
    cut."""


MOST_TASKS = 1024
"""Number of tasks whose strategies are kept; the one trained longest ago is forgotten first."""

Place = tuple[str, int]
"""Hidden member and seat of a task."""


class Strategies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the first strategies of the two episodes of a group that earned most and least."""

    paid: str
    """First strategy of the episode that earned most."""
    failed: str
    """First strategy of the episode that earned least; empty if all earned the same."""


class SgeState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the method's state, as the journal records it."""

    version: Annotated[int, Meta(ge=0)] = 0
    """Number of steps that the method has learned from."""
    strategies: tuple[tuple[Place, Strategies], ...] = ()


class Sge(Method):
    """Keep two strategies of each task, and begin later trials of the task with them."""

    Settings = Settings
    presets: ClassVar = {
        "sge": {
            "methods.sge.reflected": 0.5,
            "trial.strategy": "turn",
            "sampling.strategy_temperature": 1.5,
        }
    }

    def check(self) -> None:
        """Refuse keys with which no trial would ever begin with strategies."""
        if self.config.trial.strategy == "none":
            raise ConfigError(
                "methods.sge begins trials with strategies of earlier ones, and "
                'trial.strategy = "none" writes none: set it to "turn" or "episode", or leave the '
                "method out"
            )
        if self.config.population.mixed_groups:
            raise ConfigError(
                "methods.sge keeps strategies by the hidden member that a whole group meets: set "
                "population.mixed_groups = false, or leave the method out"
            )

    def guidance(self, number: int, task: Task) -> Guidance | None:
        """Return the strategies of the last trained group of a task."""
        known = self._known.get((task.member, task.seat))
        guided = round(self.settings.reflected * self.config.admission.trials_per_group)
        if known is None or not guided:
            return None
        decisions = [("paid", known.paid)]
        if known.failed:
            decisions.append(("failed", known.failed))
        # A tiny model, whose prompts have no rules in words, gets the bare strategies.
        templates = _TEMPLATES if self.config.transcript.rules else dict.fromkeys(_TEMPLATES, "{} ")
        max_bytes = self.settings.max_bytes // len(decisions)
        text = "".join(_cut(templates[how], strategy, max_bytes) for how, strategy in decisions)
        # The strategies are not drawn at random, so the log-prob of the decisions is 0.
        return Guidance(self._version, guided, tuple(decisions), text, logprob=0.0)

    def begin(self, state: bytes | None, version: int) -> None:
        """Replace the strategies by those of the journal."""
        known = SgeState(version) if state is None else msgspec.msgpack.decode(state, type=SgeState)
        self._version, self._known = known.version, dict(known.strategies)

    def state(self) -> bytes:
        """Return the strategies for the journal."""
        return msgspec.msgpack.encode(SgeState(self._version, tuple(self._known.items())))

    def learn(self, groups: Sequence[Group]) -> None:
        """Keep two strategies of each group's task."""
        self._version += 1
        for group in groups:
            found = [each for trial in group.trials for each in strategies_of(trial)]
            if found:
                best, worst = max(found), min(found)  # by return, and by text among equals
                task = group.trials[0].task
                failed = worst[1] if worst[0] < best[0] else ""
                self._known.pop((task.member, task.seat), None)  # moves the task to the end
                self._known[task.member, task.seat] = Strategies(best[1], failed)
        self._known = dict(list(self._known.items())[-MOST_TASKS:])


_TEMPLATES = {
    "paid": "In an earlier trial of this task this strategy worked best: {}\n",
    "failed": "This one worked worst: {}\nReflect on why before you write your own.\n",
}


def strategies_of(trial: Trial) -> list[tuple[float, str]]:
    """Return, for each episode with a strategy, its return and its first strategy."""
    found: dict[int, str] = {}
    for turn in trial.turns:
        if turn.kind is Kind.STRATEGY and turn.action:
            found.setdefault(turn.episode, turn.action)
    return [
        (sum(turn.reward for turn in trial.turns if turn.is_act_of(episode)), strategy)
        for episode, strategy in found.items()
    ]


def _cut(template: str, strategy: str, max_bytes: int) -> str:
    """Put a strategy into a template, cut so that the text has at most `max_bytes`."""
    most = max(0, max_bytes - len(template.format("").encode()))
    return template.format(strategy.encode(errors="replace")[:most].decode(errors="ignore"))
