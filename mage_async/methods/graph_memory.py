"""Begin trials with strategies of earlier tasks, from the graph memory of arXiv 2511.07800.

The first trials of a group are guided: they begin with a few strategies as text, drawn by trainable
weights. The other trials of the group, which have the same task, begin without strategies. A step
of learning processes the groups of a trained batch in order of grant:

1. **Utility.** For each guided group, delta R = R_with - R_without is the mean return of its guided
   trials minus that of the others. With `told = "singly"`, as in the paper, a group gets one
   strategy, and delta R is the utility of this strategy; with "jointly" a group gets several, and
   delta R is the utility of each of them.
2. **Weights.** REINFORCE on log p(strategies): every edge moves by
   rate * delta R * d log p / d w, times min(1, p now / p when they were drawn), because groups are
   trained some steps after they were granted. All gradients of a batch are taken at the same
   weights.
3. **Induction.** The best and the worst episode of each group are compared. The decisions in which
   the best one differs become strategies, with edges from the best one's path.

The graph has three layers and two kinds of weighted edges:

    query q  --w_qt-->  path t  --w_tm-->  strategy m

A query consists of the facts about a task that are known before it is played: its environment and
the seat of the policy. (If a run mixes several environments, each of them is a *part* of the mix,
and the query names the part.) A path is a finished episode, and a strategy is a state with an
action to take in it. The relevance of a strategy for a query is

    rho(m | q) = sum over q', t of sim(q, q') w_qt(q', t) w_tm(t, m)

where the similarity of two parts of a mix is the cosine of the word counts of their rules.

The paper has a second language model summarise episodes; here paths and strategies are read off the
record of a trial, with `Play.anchor`, a text that is equal for equal states, as the state.
"""

import math
import operator
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2s
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, replace

from mage_async.config.schema import Config
from mage_async.config.section import Count, NonNegative, Section, Share
from mage_async.environments.environment import Environment
from mage_async.environments.mix import Mix, label_of
from mage_async.errors import ConfigError
from mage_async.methods.method import Method
from mage_async.trajectory import Group, Guidance, Kind, Task, Trial


class Settings(Section):
    """The trainable graph memory of arXiv 2511.07800; see `docs/methods/graph_memory.md`."""

    strategies: Count = 3
    """Strategies of earlier tasks that a guided trial begins with, at most."""
    told: Literal["singly", "jointly"] = "jointly"
    """"singly": a guided trial of training begins with one strategy, which alone accounts for the
    change of return, as in the paper; "jointly": with `strategies` of them, which share one change
    of return. A trial of an evaluation begins with `strategies` of them in both cases."""
    least_similarity: Share = 1.0
    """Least similarity of two parts of a mix (cosine of the word counts of their rules) at which
    the strategies of one are used in the other; 1: each part has its own."""
    guided: Share = 0.5
    """Share of a group's trials that begin with strategies, at least one trial and not all; their
    return is compared with that of the others, to measure the use of a strategy. The same share of
    the scripted trials of a warm start is guided, so that the policy learns to read strategies."""
    rate: NonNegative = 1.0
    """Step size of the weights of edges, per unit of a trial's mean return per episode."""
    max_paths: Count = 64
    """Largest number of paths in the graph; of more, the weakest are removed."""
    max_bytes: Count = 512
    """Largest number of bytes, and so of tokens, of all strategies of a trial together."""
    rewards: Literal["own", "shuffled"] = "own"
    """"own": the memory learns from the reward of each action; "shuffled": from the reward of
    another action of the batch, as a control."""


NEW_EDGE_WEIGHT = 0.5
"""Weight of a new edge. It lies between the bounds `LEAST` and `MOST` of all weights, so that
rewards can raise and lower it; `Settings.rate` sets how fast."""


# Paths and strategies


Decision = tuple[str, str]
"""A strategy: a state, and the action to take in it."""
Transition = tuple[str, str, str]
"""State, action, and the sign of the action's reward: "+", "-" or "0"."""
Path = tuple[Transition, ...]
"""Transitions of a finished episode, as the graph keeps them."""

MOST_TRANSITIONS = 32
"""Largest number of transitions of a path; a longer one is cut."""
_BRIEF_BYTES = 80
"""Largest number of bytes of a text in a path."""


class Step(NamedTuple):
    """Record one action of an episode."""

    state: str
    action: str
    reward: float


Episode = tuple[Step, ...]
"""All actions of one episode, in order."""


def episodes_of(trial: Trial) -> list[Episode]:
    """Return the steps of each episode, in order; the action of an invalid turn is empty."""
    steps: dict[int, list[Step]] = {}
    for turn in trial.turns:
        if turn.kind is Kind.ACT:
            action = turn.action if turn.is_valid else ""
            steps.setdefault(turn.episode, []).append(Step(turn.anchor, action, turn.reward))
    return [tuple(each) for each in steps.values()]


def return_of(episode: Episode) -> float:
    """Return the sum of an episode's rewards."""
    return sum(step.reward for step in episode)


def path_of(episode: Episode) -> Path:
    """Return the path of an episode: each transition once, at its first place, with texts cut to
    `_BRIEF_BYTES`.
    """
    transitions = (
        (_brief(step.state), _brief(step.action), _sign(step.reward)) for step in episode
    )
    return tuple(dict.fromkeys(transitions))[:MOST_TRANSITIONS]


def contrasted(better: Episode, worse: Episode) -> list[Decision]:
    """Return the decisions of the better episode that differ from the worse one's and earned more.

    Only states that both episodes met are compared; in a state that was met twice the last decision
    counts. If no decision earned more by itself, as when rewards come only at the end, the first
    decision that differs is returned.
    """
    better_steps = {step.state: step for step in better}
    worse_steps = {step.state: step for step in worse}
    differ = [
        step
        for state, step in better_steps.items()
        if state in worse_steps and step.action and step.action != worse_steps[state].action
    ]
    earned_more = [step for step in differ if step.reward > worse_steps[step.state].reward]
    chosen = earned_more or differ[:1]
    return [(step.state, step.action) for step in chosen]


def lessons(episodes: Sequence[Episode]) -> tuple[Episode, list[Decision]]:
    """Return the best of some episodes, and the decisions in which it differs from the worst one.

    If all episodes earned the same, best and worst are one episode, and no decision differs.
    """
    better, worse = max(episodes, key=return_of), min(episodes, key=return_of)
    return better, contrasted(better, worse)


def with_shuffled_rewards(
    batch: Sequence[Sequence[Sequence[Episode]]], source: random.Random
) -> list[list[list[Episode]]]:
    """Return the episodes with all rewards of the batch permuted over the actions: a control in
    which there is nothing to learn.
    """
    steps = [step for group in batch for trial in group for episode in trial for step in episode]
    rewards = [step.reward for step in steps]
    source.shuffle(rewards)
    shuffled = iter(rewards)

    def with_next_rewards(episode: Episode) -> Episode:
        return tuple(step._replace(reward=next(shuffled)) for step in episode)

    return [[[*map(with_next_rewards, trial)] for trial in group] for group in batch]


def _sign(reward: float) -> str:
    """Return the sign of a reward, for a transition: "+", "-" or "0"."""
    return "+" if reward > 0 else "-" if reward < 0 else "0"


def _brief(text: str) -> str:
    """Return a text for a path; of a long text only the beginning, with a digest of the whole."""
    data = text.encode(errors="replace")
    if len(data) <= _BRIEF_BYTES:
        return text
    digest = blake2s(data, digest_size=4).hexdigest()
    # 12 bytes are left for the ellipsis (3), a space and the digest (8).
    return f"{data[: _BRIEF_BYTES - 12].decode(errors='ignore')}… {digest}"


# The graph


Query = tuple[str, int]
"""Environment or part of a mix, and seat."""
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
LEAST, MOST = 0.01, 10.0
"""Bounds of weights. Both are positive: the product of two negative weights would favour a strategy
that has only done harm, and the gradient of a product of two zeros is zero.
"""
OTHER_SEAT = 0.5
"""Similarity of two queries that differ in their seat alone."""


class StrategyStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold statistics of one strategy, which itself is a `Decision`."""

    born: Natural
    """First version of the memory that had the strategy."""
    shown: Natural = 0
    """Number of groups whose guided trials began with it."""
    gap: float = 0.0
    """Mean over these groups of the return of guided trials minus that of the others."""


class GraphState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hold the state of a memory, as the journal records it."""

    version: Natural = 0
    """Number of steps that the memory has learned from."""
    paths: tuple[Path, ...] = ()
    strategies: tuple[tuple[Decision, StrategyStatistics], ...] = ()
    queries: tuple[tuple[Query, Natural, float], ...] = ()
    """Edges: query, number of the path, weight."""
    supports: tuple[tuple[Natural, Natural, float], ...] = ()
    """Edges: number of the path, number of the strategy, weight."""


class Graph:
    """Hold nodes and edges, in the order of their first appearance."""

    def __init__(self, similarity: Callable[[str, str], float] = operator.eq) -> None:
        self.similarity = similarity
        """Function that returns the similarity of two environments, 0 to 1."""
        self.strategies: dict[Decision, StrategyStatistics] = {}
        self.queries: dict[tuple[Query, Path], float] = {}
        """Weights w_qt."""
        self.supports: dict[tuple[Path, Decision], float] = {}
        """Weights w_tm."""

    def add(
        self, query: Query, path: Path, decision: Decision, *, born: int, weight: float
    ) -> None:
        """Add nodes and edges that are not there yet; new edges begin with `weight`."""
        self.strategies.setdefault(decision, StrategyStatistics(born))
        self.queries.setdefault((query, path), weight)
        self.supports.setdefault((path, decision), weight)

    def scores(self, query: Query) -> dict[Decision, float]:
        """Return the relevance, rho, of every strategy that has a path from a similar query."""
        strengths = self._strengths(query)
        found: dict[Decision, float] = {}
        for (path, decision), weight in self.supports.items():
            if path in strengths:
                found[decision] = found.get(decision, 0.0) + strengths[path] * weight
        return found

    def edge_gradient(self, query: Query, by_score: Mapping[Decision, float]) -> "EdgeGradient":
        """Return the gradient with respect to the weights of edges.

        Args:
            by_score: gradient with respect to each strategy's score for the query.
        """
        strengths, gradient = self._strengths(query), EdgeGradient({}, {})
        by_path: dict[Path, float] = {}  # gradient with respect to each path's strength
        for (path, decision), weight in self.supports.items():
            if path in strengths and decision in by_score:
                gradient.supports[path, decision] = by_score[decision] * strengths[path]
                by_path[path] = by_path.get(path, 0.0) + by_score[decision] * weight
        for each, path in self.queries:
            if path in by_path:
                gradient.queries[each, path] = self._similarity(query, each) * by_path[path]
        return gradient

    def move(self, gradient: "EdgeGradient", step: float) -> None:
        """Add `step` times a gradient to the weights, within their bounds."""
        for edge, slope in gradient.queries.items():
            self.queries[edge] = _bounded(self.queries[edge] + step * slope)
        for support, slope in gradient.supports.items():
            self.supports[support] = _bounded(self.supports[support] + step * slope)

    def forget(self, most_paths: int) -> None:
        """Remove the weakest paths beyond `most_paths` (of equals the oldest), and strategies
        without a path.
        """
        paths = self._paths()
        num_removed = max(0, len(paths) - most_paths)
        # The sort is stable, and `paths` begins with the oldest.
        removed = set(sorted(paths, key=self._strength)[:num_removed])
        self.queries = {edge: w for edge, w in self.queries.items() if edge[1] not in removed}
        self.supports = {edge: w for edge, w in self.supports.items() if edge[0] not in removed}
        with_path = {decision for _, decision in self.supports}
        self.strategies = {
            decision: statistic
            for decision, statistic in self.strategies.items()
            if decision in with_path
        }

    def table(self, version: int) -> GraphState:
        """Return the graph for the journal."""
        paths = {path: number for number, path in enumerate(self._paths())}
        numbers = {decision: number for number, decision in enumerate(self.strategies)}
        return GraphState(
            version=version,
            paths=tuple(paths),
            strategies=tuple(self.strategies.items()),
            queries=tuple((query, paths[path], w) for (query, path), w in self.queries.items()),
            supports=tuple((paths[p], numbers[d], w) for (p, d), w in self.supports.items()),
        )

    @staticmethod
    def of(table: GraphState, similarity: Callable[[str, str], float] = operator.eq) -> "Graph":
        """Return the graph of a recorded state."""
        graph, decisions = Graph(similarity), [decision for decision, _ in table.strategies]
        graph.strategies = dict(table.strategies)
        graph.queries = {(query, table.paths[t]): weight for query, t, weight in table.queries}
        graph.supports = {(table.paths[t], decisions[m]): w for t, m, w in table.supports}
        return graph

    def known_queries(self) -> list[Query]:
        """Return the queries that lead to a strategy."""
        return list(dict.fromkeys(query for query, _ in self.queries))

    def num_paths(self, decision: Decision) -> int:
        """Return the number of paths that lead to a strategy."""
        return sum(each == decision for _, each in self.supports)

    def _strengths(self, query: Query) -> dict[Path, float]:
        """Return the strength of each path for a query: the sum of sim(query, q) w_qt(q, path)."""
        found: dict[Path, float] = {}
        for (each, path), weight in self.queries.items():
            if like := self._similarity(query, each):
                found[path] = found.get(path, 0.0) + like * weight
        return found

    def _similarity(self, one: Query, other: Query) -> float:
        """Return the similarity of two queries, lower by `OTHER_SEAT` if their seats differ."""
        return self.similarity(one[0], other[0]) * (1.0 if one[1] == other[1] else OTHER_SEAT)

    def _paths(self) -> list[Path]:
        """Return the paths in the order of their first appearance."""
        return list(dict.fromkeys(path for _, path in self.queries))

    def _strength(self, path: Path) -> float:
        """Return the largest product w_qt * w_tm of the edges of a path."""
        largest_in = max(weight for (_, each), weight in self.queries.items() if each == path)
        largest_out = max(weight for (each, _), weight in self.supports.items() if each == path)
        return largest_in * largest_out


class EdgeGradient(NamedTuple):
    """Hold a gradient with respect to the weights of edges."""

    queries: dict[tuple[Query, Path], float]
    supports: dict[tuple[Path, Decision], float]


def cosine(one: str, other: str) -> float:
    """Return the cosine of the word counts of two texts, 0 to 1."""
    first, second = (Counter(re.findall(r"\w+", text.lower())) for text in (one, other))
    lengths = math.hypot(*first.values()) * math.hypot(*second.values())
    return sum(first[word] * second[word] for word in first) / lengths if lengths else 0.0


def _bounded(weight: float) -> float:
    """Return the weight, or the bound of weights that it exceeds."""
    return min(MOST, max(LEAST, weight))


# Draws of strategies by their scores
#
# The first strategy is drawn with probability p(m) = exp(rho(m)) / sum of exp(rho) over all
# strategies, as in the paper. Each further one is drawn in the same way from the strategies whose
# state no earlier draw had (Plackett and Luce).


Scores = Mapping[Decision, float]
"""Relevance of each strategy, rho."""


def probabilities(scores: Scores) -> dict[Decision, float]:
    """Return the softmax of scores."""
    most = max(scores.values())
    parts = {decision: math.exp(score - most) for decision, score in scores.items()}
    total = math.fsum(parts.values())
    return {decision: part / total for decision, part in parts.items()}


def drawn(scores: Scores, count: int, source: random.Random) -> tuple[Decision, ...]:
    """Draw at most `count` strategies, no two for one state."""

    def draw(left: Scores) -> Decision:
        weights = probabilities(left)
        return source.choices(list(weights), list(weights.values()))[0]

    return _chosen(scores, count, draw)


def best(scores: Scores, count: int) -> tuple[Decision, ...]:
    """Return at most `count` strategies with the highest scores, no two for one state."""
    return _chosen(scores, count, lambda left: max(left, key=left.__getitem__))


def _chosen(
    scores: Scores, count: int, choose: Callable[[Scores], Decision]
) -> tuple[Decision, ...]:
    """Choose strategies one by one, each from those whose state no earlier choice had."""
    found: list[Decision] = []
    while len(found) < count and (left := _remaining(scores, found)):
        found.append(choose(left))
    return tuple(found)


def logprob(scores: Scores, decisions: Sequence[Decision]) -> float:
    """Return the log-probability, in nats, of drawing these strategies in this order."""
    # 1e-300 stands for a probability that was rounded to 0, whose log would be an error.
    return math.fsum(
        math.log(max(probabilities(_remaining(scores, decisions[:place]))[decision], 1e-300))
        for place, decision in enumerate(decisions)
    )


def gradient(scores: Scores, decisions: Sequence[Decision]) -> dict[Decision, float]:
    """Return the gradient of `logprob` with respect to each score."""
    found = dict.fromkeys(scores, 0.0)
    for place, decision in enumerate(decisions):
        for each, share in probabilities(_remaining(scores, decisions[:place])).items():
            found[each] -= share
        found[decision] += 1.0
    return found


def _remaining(scores: Scores, found: Sequence[Decision]) -> dict[Decision, float]:
    """Return the scores of the strategies whose state differs from the states of all strategies in
    `found`.
    """
    taken = {state for state, _ in found}
    return {each: score for each, score in scores.items() if each[0] not in taken}


Played = Sequence[Sequence[Episode]]
"""The episodes of each trial of a group."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(GraphState)
MAX_LISTED = 32
"""Largest number of strategies of one query in a record; those of the highest scores are listed."""


class GraphMemory(Method):
    """Draw guidance from a graph of strategies, and train the graph on every batch.

    The version of the graph is the number of steps that the graph has learned from.
    """

    Settings = Settings
    presets: ClassVar = {
        "graph_memory": {
            "methods.graph_memory.strategies": 3,
            "methods.graph_memory.told": "singly",
            # Guided trials are compared with guided ones, and others with others. Of three trials,
            # the default on cores, one would be alone.
            "admission.trials_per_group": 8,
            "advantage.baseline": ["group", "memory", "kind", "episode", "index"],
        }
    }

    def __init__(
        self, settings: Any, config: Config, environment: Environment | None = None
    ) -> None:
        super().__init__(settings, config, environment)
        self.graph, self.version = Graph(self._similarity), 0
        self._demonstrations = random.Random(f"{config.seed}/told")
        self._demonstrated: dict[Query, dict[str, str]] = {}
        """Strategies from the scripted trials so far: by query, the action for each state."""

    def check(self) -> None:
        """Refuse groups of one trial, in which a guided trial could not be compared with others,
        and groups in which the baseline would compare a trial with itself alone.
        """
        num_trials, advantage = self.config.admission.trials_per_group, self.config.advantage
        if num_trials < 2:
            raise ConfigError(
                "methods.graph_memory compares guided trials with others of their group: set "
                "admission.trials_per_group to at least 2, or leave the method out"
            )
        guided = self._num_guided()
        is_apart = "memory" in advantage.baseline and advantage.needs_other_trials()
        if is_apart and min(guided, num_trials - guided) < 2:
            raise ConfigError(
                f"methods.graph_memory: {guided} of {num_trials} trials of a group are guided, and "
                'advantage.baseline has "memory", so guided trials are compared with guided ones '
                "alone, and others with others: a trial that is alone would never be trained. Set "
                "admission.trials_per_group to at least 4, with methods.graph_memory.guided = 0.5, "
                'or leave "memory" out of advantage.baseline'
            )

    def guidance(self, number: int, task: Task) -> Guidance | None:
        """Draw strategies for a group by their weights."""
        settings, scores = self.settings, self.scores(self.query(task))
        source = random.Random(f"{self.config.seed}/memory/{self.version}/{number}")
        num_strategies = 1 if settings.told == "singly" else settings.strategies
        decisions = drawn(scores, num_strategies, source)
        nats = logprob(scores, decisions)
        return self._guidance_of(decisions, nats, self._num_guided(), self.version)

    def _num_guided(self) -> int:
        """Return the number of trials of a group that begin with strategies."""
        num_trials = self.config.admission.trials_per_group
        return int(min(num_trials - 1, max(1, round(self.settings.guided * num_trials))))

    def guidance_tokens(self) -> int:
        """Return the smallest number of tokens of a guidance: two for each strategy, its state and
        action.
        """
        return int(2 * self.settings.strategies)

    def evaluation_guidance(
        self, task: Task, record: Mapping[str, Any] | None = None
    ) -> Guidance | None:
        """Return the strategies of the highest scores."""
        query = self.query(task)
        scores = self.scores(query) if record is None else recorded_scores(record, query)
        decisions = best(scores, self.settings.strategies)
        version = self.version if record is None else record["version"]
        return self._guidance_of(decisions, logprob(scores, decisions), 1, version)

    def begin(self, state: bytes | None, version: int) -> None:
        """Replace the graph by that of the journal."""
        table = GraphState(version=version) if state is None else _DECODER.decode(state)
        self.graph, self.version = Graph.of(table, self._similarity), table.version

    def state(self) -> bytes:
        """Return the graph for the journal."""
        return _ENCODER.encode(self.graph.table(self.version))

    def learn(self, groups: Sequence[Group]) -> None:
        """Train the weights and add strategies, in the three parts of this module's docstring."""
        batch = list(zip(groups, self._played(groups), strict=True))
        # All gradients are computed before the first weight moves.
        moves = [self._learn_from(group, played) for group, played in batch]
        for gradient_of_group, step in filter(None, moves):
            self.graph.move(gradient_of_group, step)
        for group, played in batch:
            self._induce(self.query(group.trials[0].task), played)
        self.graph.forget(self.settings.max_paths)
        self.version += 1

    def record(self) -> dict[str, Any]:
        """Return the strategies of every query, the most relevant first."""
        # A part of a mix without strategies of its own may use those of a similar part.
        mixed = product(dict.fromkeys(one for one, _ in self._cosines), self.environment.seats())
        queries = dict.fromkeys([*self.graph.known_queries(), *mixed])
        strategies = [row for query in queries for row in self._rows(query)]
        digest = blake2s(self.state(), digest_size=8).hexdigest()
        return {"version": self.version, "digest": digest, "strategies": strategies}

    # A pretrained model can follow advice. A model that is cloned from scripts has never seen any:
    # it would ignore strategies, so their utility could not be measured. Therefore some
    # demonstrations begin with strategies of earlier demonstrations, in the form that the memory
    # writes, and their script follows them in the first episode. These strategies come from other
    # tasks and may be wrong. In its later episodes a demonstration follows its own observations,
    # not the advice: this teaches the model to prefer them.

    def guide_demonstration(self, task: Task) -> Guidance | None:
        """Return strategies of earlier demonstrations, for the share `guided` of demonstrations."""
        known = self._demonstrated.get(self.query(task), {})
        if not known or self._demonstrations.random() >= self.settings.guided:
            return None
        decisions = list(known.items())
        self._demonstrations.shuffle(decisions)
        return self._guidance_of(decisions)

    def learn_demonstration(self, trial: Trial) -> None:
        """Keep the strategies in which the best episode of a trial differs from the worst one."""
        if not (episodes := episodes_of(trial)):
            return
        _, decisions = lessons(episodes)
        query = self.query(trial.task)
        known = self._demonstrated.get(query, {})
        for state, action in filter(self.fits, decisions):
            known.pop(state, None)  # moves the state to the end
            known[state] = action
        self._demonstrated[query] = dict(list(known.items())[-self.settings.strategies :])

    def _guidance_of(
        self,
        decisions: Sequence[Decision],
        logprob_of_draw: float = 0.0,
        num_guided: int = 1,
        version: int = 0,
    ) -> Guidance | None:
        """Return strategies as a guidance; None if there are no strategies.

        Args:
            logprob_of_draw: log-prob of drawing the strategies, in nats.
            num_guided: number of trials of the group that begin with them.
            version: version of the memory from which they come.
        """
        if not decisions:
            return None
        has_rules = self.config.transcript.rules
        text = ("; " if has_rules else " ").join(map(self._text_of, decisions))
        text = f"{_PREFACE}{text}.\n" if has_rules else text
        return Guidance(version, num_guided, tuple(decisions), text, logprob_of_draw)

    def query(self, task: Task) -> Query:
        """Return the environment, or the part of a mix, and the seat of a task.

        The hidden member is not part of a query: nobody knows it before the task is played.
        """
        return (label_of(self.environment, task.member) or task.environment, task.seat)

    def _similarity(self, one: str, other: str) -> float:
        """Return the similarity of two environments by label; 0 if below `least_similarity`."""
        similarity = 1.0 if one == other else self._cosines.get((one, other), 0.0)
        return similarity if similarity >= self.settings.least_similarity else 0.0

    @cached_property
    def _cosines(self) -> dict[tuple[str, str], float]:
        """The similarity of the rules of each two parts of a mix, by label; empty without a mix."""
        parts = self.environment.parts if isinstance(self.environment, Mix) else ()
        rules = {part.label: part.environment.rules() for part in parts}
        return {(one, other): cosine(rules[one], rules[other]) for one in rules for other in rules}

    def scores(self, query: Query) -> dict[Decision, float]:
        """Return the relevance of the strategies that a guidance for a query may hold."""
        scores = self.graph.scores(query)
        return {decision: score for decision, score in scores.items() if self.fits(decision)}

    def _played(self, groups: Sequence[Group]) -> Sequence[Played]:
        """Return the episodes of each group, with the rewards that are learned from."""
        batch = [[episodes_of(trial) for trial in group.trials] for group in groups]
        if self.settings.rewards == "own":
            return batch
        source = random.Random(f"{self.config.seed}/shuffled/{self.version}")
        return with_shuffled_rewards(batch, source)

    def _learn_from(self, group: Group, played: Played) -> tuple[EdgeGradient, float] | None:
        """Update the statistics of a group's strategies, and return the group's gradient and the
        step along it; None if the group changes no weight, as without guidance.
        """
        guidance, gap = group.guidance, _gap(group, played)
        if guidance is None or gap is None:
            return None
        self._update_statistics(guidance.decisions, gap)
        query = self.query(group.trials[0].task)
        scores = self.scores(query)
        if not all(decision in scores for decision in guidance.decisions):
            return None  # the graph has forgotten one of them since they were drawn
        ratio = math.exp(min(0.0, logprob(scores, guidance.decisions) - guidance.logprob))
        of_edges = self.graph.edge_gradient(query, gradient(scores, guidance.decisions))
        return of_edges, self.settings.rate * gap * ratio

    def _update_statistics(self, decisions: Iterable[Decision], gap: float) -> None:
        """Add a group's difference of returns to the statistics of its strategies."""
        for decision in decisions:
            known = self.graph.strategies.get(decision)
            if known is not None:
                mean = known.gap + (gap - known.gap) / (known.shown + 1)
                self.graph.strategies[decision] = replace(known, shown=known.shown + 1, gap=mean)

    def _induce(self, query: Query, played: Played) -> None:
        """Add the strategies that the episodes of a group teach to the graph."""
        better, found = lessons([episode for trial in played for episode in trial])
        path, weight = path_of(better), NEW_EDGE_WEIGHT
        for decision in filter(self.fits, found):
            self.graph.add(query, path, decision, born=self.version + 1, weight=weight)

    def fits(self, decision: Decision) -> bool:
        """Return whether `strategies` texts as long as this one fit into `max_bytes`."""
        settings = self.settings
        most: int = settings.max_bytes // max(1, settings.strategies)
        return len(self._text_of(decision).encode(errors="replace")) < most

    def _text_of(self, decision: Decision) -> str:
        """Return a strategy as a phrase, or as bare words for a tiny model, which has no rules."""
        state, action = decision
        return f"at “{state}”: {action}" if self.config.transcript.rules else f"{state} {action}"

    def _rows(self, query: Query) -> list[dict[str, Any]]:
        """Return the strategies of a query as plain data, at most `MAX_LISTED`."""
        scores, graph = self.scores(query), self.graph
        if not scores:
            return []
        shares = probabilities(scores)
        order = sorted(scores, key=lambda decision: -scores[decision])[:MAX_LISTED]
        return [
            {
                "kind": query[0],
                "seat": query[1],
                "state": decision[0],
                "action": decision[1],
                "score": scores[decision],
                "probability": shares[decision],
                "paths": graph.num_paths(decision),
                **asdict(graph.strategies[decision]),
            }
            for decision in order
        ]


_PREFACE = "In earlier tasks of this kind these decisions paid, which may help here too: "


def _gap(group: Group, played: Played) -> float | None:
    """Return the mean return of a group's guided trials minus that of the others, or None if there
    are no guided trials or no others. The return of a trial is its mean over episodes.
    """
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for trial, episodes in zip(group.trials, played, strict=True):
        if episodes:
            mean = statistics.fmean(map(return_of, episodes))
            rewards[trial.memory is not None].append(mean)
    if not all(rewards.values()):
        return None
    return statistics.fmean(rewards[True]) - statistics.fmean(rewards[False])


def recorded_scores(record: Mapping[str, Any], query: Query) -> dict[Decision, float]:
    """Return the relevance of the strategies of a query, as `GraphMemory.record` wrote them."""
    return {
        (row["state"], row["action"]): row["score"]
        for row in record["strategies"]
        if (row["kind"], row["seat"]) == query
    }
