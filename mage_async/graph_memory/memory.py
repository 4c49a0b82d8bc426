"""The graph memory of a run: what a group is told, and what is learned from a trained batch.

One step, for the groups of a trained batch in order of grant:

1. **Utility.** Of each group that was told of strategies, the mean reward of the trials that were
   told minus that of the others, which had the same task: delta R = R_with - R_without.
2. **Weights.** REINFORCE on log p(strategies): every edge moves by
   rate * delta R * d log p / d w, times min(1, p now / p when they were drawn), because groups are
   trained some steps after they were granted. All gradients of a batch are taken at the same
   weights.
3. **Induction.** The best and the worst episode of each group are contrasted: what the best decided
   otherwise becomes strategies, behind the path of the best.

The version of a memory is how many steps it has learned from, which is the version of the policy
that was trained by the same steps. All of it follows from the journal's records in their order.
"""

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from hashlib import blake2s

import msgspec
from msgspec.structs import replace

from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.environments.mix.parts import label_of
from mage_async.graph_memory.drawing import Scores, best, drawn, gradient, logprob
from mage_async.graph_memory.graph import Graph, Query, Slopes, Table
from mage_async.graph_memory.paths import (
    Decision,
    Episode,
    episodes_of,
    lessons,
    path_of,
    return_of,
    with_shuffled_rewards,
)
from mage_async.trajectory import Group, Guidance, Task

Played = Sequence[Sequence[Episode]]
"""The episodes of each trial of a group."""
_ENCODER = msgspec.msgpack.Encoder()
OFF = Config()


class GraphMemory:
    """Without arguments: that of a run which asks for none."""

    def __init__(self, config: Config = OFF, environment: Environment | None = None) -> None:
        self._config, self._environment = config, environment
        self.graph, self.version = Graph(), 0

    @property
    def is_on(self) -> bool:
        """Whether trials are told of anything; otherwise nothing is learned or kept."""
        return self._config.graph_memory.strategies > 0

    def adopt(self, config: Config) -> None:
        """Go on under another configuration: a resumed run may change it."""
        self._config = config

    def table(self) -> Table:
        """All that is to be remembered."""
        return self.graph.table(self.version)

    def begin(self, table: Table | None) -> None:
        """Take over what the journal says."""
        table = table if table is not None and self.is_on else Table()
        self.graph, self.version = Graph.of(table), table.version

    def digest(self) -> str:
        """Digest of all that is remembered, as a commit records it; empty where nothing is."""
        if not self.is_on:
            return ""
        return blake2s(_ENCODER.encode(self.table()), digest_size=8).hexdigest()

    def guidance(self, number: int, task: Task) -> Guidance | None:
        """What the `number`-th group is told: strategies drawn by their weights."""
        rules, scores = self._config.graph_memory, self.scores(self.query(task))
        source = random.Random(f"{self._config.seed}/memory/{self.version}/{number}")
        decisions = drawn(scores, rules.strategies, source)
        count = self._config.admission.trials_per_group
        guided = min(count - 1, max(1, round(rules.guided * count)))
        return self.telling(decisions, logprob(scores, decisions), guided, self.version)

    def best(
        self, task: Task, scores: Scores | None = None, version: int | None = None
    ) -> Guidance | None:
        """What a trial of an evaluation is told: the strategies of the highest scores.

        Args:
            scores: those of another version; None: the own ones.
        """
        scores = self.scores(self.query(task)) if scores is None else scores
        decisions = best(scores, self._config.graph_memory.strategies)
        version = self.version if version is None else version
        return self.telling(decisions, logprob(scores, decisions), 1, version)

    def telling(
        self, decisions: Sequence[Decision], nats: float = 0.0, guided: int = 1, version: int = 0
    ) -> Guidance | None:
        """Strategies as trials are told them; None where there are none.

        Args:
            nats: log-prob of drawing them.
            guided: how many trials of the group are told.
            version: of the memory that they come from.
        """
        if not decisions:
            return None
        has_rules = self._config.transcript.rules
        text = ("; " if has_rules else " ").join(map(self._said, decisions))
        text = f"{_BEFORE}{text}.\n" if has_rules else text
        return Guidance(version, guided, tuple(decisions), text, nats)

    def trained(self, groups: Sequence[Group]) -> None:
        """Groups were trained, in order of grant, and the journal says so."""
        if not self.is_on:
            return
        rules = self._config.graph_memory
        batch = list(zip(groups, self._played(groups), strict=True))
        moves = [self._move(group, played) for group, played in batch]
        for slopes, step in filter(None, moves):
            self.graph.move(slopes, step)
        for group, played in batch:
            self._induce(self.query(group.trials[0].task), played)
        self.graph.forget(rules.max_paths)
        self.version += 1

    def queries(self) -> list[Query]:
        """The kinds of tasks that the memory knows strategies for."""
        return self.graph.known_queries()

    def query(self, task: Task) -> Query:
        """What is known of a task before it is played; the hidden member is not."""
        label = label_of(self._environment, task.member) if self._environment else None
        return (label or task.environment, task.seat)

    def scores(self, query: Query) -> dict[Decision, float]:
        """Relevance of the strategies that a kind of task may be told of."""
        scores = self.graph.scores(query)
        return {decision: score for decision, score in scores.items() if self.fits(decision)}

    def _played(self, groups: Sequence[Group]) -> Sequence[Played]:
        """The episodes of each group, with the rewards that are learned from."""
        batch = [[episodes_of(trial) for trial in group.trials] for group in groups]
        if self._config.graph_memory.rewards == "own":
            return batch
        source = random.Random(f"{self._config.seed}/shuffled/{self.version}")
        return with_shuffled_rewards(batch, source)

    def _move(self, group: Group, played: Played) -> tuple[Slopes, float] | None:
        """A group's gradient and how far to go along it; None where it says nothing."""
        told, gap = group.guidance, _gap(group, played)
        if told is None or gap is None:
            return None
        self._note(told.decisions, gap)
        query = self.query(group.trials[0].task)
        scores = self.scores(query)
        if not all(decision in scores for decision in told.decisions):
            return None  # some were forgotten since
        ratio = math.exp(min(0.0, logprob(scores, told.decisions) - told.logprob))
        slopes = self.graph.slopes(query, gradient(scores, told.decisions))
        return slopes, self._config.graph_memory.rate * gap * ratio

    def _note(self, decisions: Iterable[Decision], gap: float) -> None:
        for decision in decisions:
            known = self.graph.strategies.get(decision)
            if known is not None:
                mean = known.gap + (gap - known.gap) / (known.shown + 1)
                self.graph.strategies[decision] = replace(known, shown=known.shown + 1, gap=mean)

    def _induce(self, query: Query, played: Played) -> None:
        better, found = lessons([episode for trial in played for episode in trial])
        path, weight = path_of(better), self._config.graph_memory.initial
        for decision in filter(self.fits, found):
            self.graph.add(query, path, decision, born=self.version + 1, weight=weight)

    def fits(self, decision: Decision) -> bool:
        """Whether a trial can be told of a strategy beside others as long."""
        rules = self._config.graph_memory
        most = rules.max_bytes // max(1, rules.strategies)
        return len(self._said(decision).encode(errors="replace")) < most

    def _said(self, decision: Decision) -> str:
        """A strategy in words for a model that reads, and bare for one that learns the words."""
        state, action = decision
        return f"at “{state}”: {action}" if self._config.transcript.rules else f"{state} {action}"


_BEFORE = "In earlier tasks of this kind these decisions paid, which may help here too: "


def _gap(group: Group, played: Played) -> float | None:
    """Mean reward of the trials that were told minus that of the others; None where all were told,
    or none.
    """
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for trial, episodes in zip(group.trials, played, strict=True):
        if episodes:
            mean = statistics.fmean(map(return_of, episodes))
            rewards[trial.memory is not None].append(mean)
    if not all(rewards.values()):
        return None
    return statistics.fmean(rewards[True]) - statistics.fmean(rewards[False])
