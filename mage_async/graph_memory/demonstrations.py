"""What the scripted trials of a warm start are told, so that a policy learns to read strategies.

A model that reads knows what to do with advice. One that is cloned from scripts has seen none: it
would take strategies for noise, and no weight of the memory could tell a good one from a bad one.
So a share of the demonstrations begins with strategies of the demonstrations before, in the words
of the memory, and the script follows them in its first episode (`mage_async/trials/scripted.py`).
"""

import random

from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.graph_memory.graph import Query
from mage_async.graph_memory.memory import GraphMemory
from mage_async.graph_memory.paths import episodes_of, lessons
from mage_async.trajectory import Guidance, Task, Trial


class Demonstrations:
    """Strategies of the scripted trials so far, by the kind of task: the latest of each state.

    They come from other tasks, so they are as often wrong as right where tasks are unlike, and the
    later episodes of a demonstration show that what the trial itself has seen comes first.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self._rules, self._memory = config.graph_memory, GraphMemory(config, environment)
        self._source = random.Random(f"{config.seed}/told")
        self._known = dict[Query, dict[str, str]]()

    def guidance(self, task: Task) -> Guidance | None:
        """What the next trial is told; nothing where it is none of the guided share."""
        known = self._known.get(self._memory.query(task), {})
        if not known or self._source.random() >= self._rules.guided:
            return None
        decisions = list(known.items())
        self._source.shuffle(decisions)
        return self._memory.telling(decisions)

    def learn(self, trial: Trial) -> None:
        """Take over what the best episode of a trial decided otherwise than its worst."""
        if not self._memory.is_on or not (episodes := episodes_of(trial)):
            return
        _, found = lessons(episodes)
        query = self._memory.query(trial.task)
        known = self._known.get(query, {})
        for state, action in filter(self._memory.fits, found):
            known.pop(state, None)  # the latest stand last
            known[state] = action
        self._known[query] = dict(list(known.items())[-self._rules.strategies :])
