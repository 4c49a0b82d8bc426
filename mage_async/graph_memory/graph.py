"""The graph: kinds of tasks, paths, strategies, and the trained weights of the edges between them.

    query q  --w_qt-->  path t  --w_tm-->  strategy m

A query is what is known of a task before it is played: its environment, or the part of a mix, and
the seat. The relevance of a strategy for a query is

    rho(m | q) = sum over q', t of sim(q, q') w_qt(q', t) w_tm(t, m)

Weights stay above `LEAST`: the product of two negative ones would count for a strategy that has
only done harm, and of two zeros nothing could be learned any more.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from mage_async.graph_memory.paths import Decision, Path

Query = tuple[str, int]
"""Environment or part of a mix, and seat."""
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
LEAST, MOST = 0.01, 10.0
"""Bounds of weights."""
OTHER_SEAT = 0.5
"""Similarity of two queries that differ in their seat alone."""


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a strategy beside its edges."""

    born: Natural
    """Version of the memory that first had it."""
    shown: Natural = 0
    """Groups whose trials were told of it."""
    gap: float = 0.0
    """Mean of the reward of trials that were told, minus that of the others of their group."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A memory, for the journal: all that `GraphMemory` remembers."""

    version: Natural = 0
    """Steps it has learned from."""
    paths: tuple[Path, ...] = ()
    strategies: tuple[tuple[Decision, Strategy], ...] = ()
    queries: tuple[tuple[Query, Natural, float], ...] = ()
    """Edges: query, number of the path, weight."""
    supports: tuple[tuple[Natural, Natural, float], ...] = ()
    """Edges: number of the path, number of the strategy, weight."""


class Graph:
    """Nodes and edges; every order is that of their first appearance."""

    def __init__(self) -> None:
        self.strategies: dict[Decision, Strategy] = {}
        self.queries: dict[tuple[Query, Path], float] = {}
        """Weights w_qt."""
        self.supports: dict[tuple[Path, Decision], float] = {}
        """Weights w_tm."""

    def add(
        self, query: Query, path: Path, decision: Decision, *, born: int, weight: float
    ) -> None:
        """Add nodes and edges that are not there yet; new edges begin with `weight`."""
        self.strategies.setdefault(decision, Strategy(born))
        self.queries.setdefault((query, path), weight)
        self.supports.setdefault((path, decision), weight)

    def scores(self, query: Query) -> dict[Decision, float]:
        """Relevance of every strategy that a similar query leads to."""
        strengths = self._strengths(query)
        found: dict[Decision, float] = {}
        for (path, decision), weight in self.supports.items():
            if path in strengths:
                found[decision] = found.get(decision, 0.0) + strengths[path] * weight
        return found

    def slopes(self, query: Query, by_score: Mapping[Decision, float]) -> "Slopes":
        """The chain rule: a gradient by scores as one by the weights of edges."""
        strengths, slopes = self._strengths(query), Slopes()
        through: dict[Path, float] = {}
        for (path, decision), weight in self.supports.items():
            if path in strengths and decision in by_score:
                slopes.supports[path, decision] = by_score[decision] * strengths[path]
                through[path] = through.get(path, 0.0) + by_score[decision] * weight
        for each, path in self.queries:
            if path in through:
                slopes.queries[each, path] = similarity(query, each) * through[path]
        return slopes

    def move(self, slopes: "Slopes", step: float) -> None:
        """Add a multiple of a gradient to the weights, within their bounds."""
        for edge, slope in slopes.queries.items():
            self.queries[edge] = _bounded(self.queries[edge] + step * slope)
        for support, slope in slopes.supports.items():
            self.supports[support] = _bounded(self.supports[support] + step * slope)

    def forget(self, most_paths: int) -> None:
        """Remove the weakest paths where there are too many (of equals the oldest), and strategies
        that nothing leads to any more.
        """
        weak = sorted(self._paths(), key=self._strength)[: max(0, len(self._paths()) - most_paths)]
        gone = set(weak)
        self.queries = {edge: w for edge, w in self.queries.items() if edge[1] not in gone}
        self.supports = {edge: w for edge, w in self.supports.items() if edge[0] not in gone}
        led_to = {decision for _, decision in self.supports}
        self.strategies = {each: known for each, known in self.strategies.items() if each in led_to}

    def table(self, version: int) -> Table:
        """All of it, for the journal."""
        paths = {path: number for number, path in enumerate(self._paths())}
        numbers = {decision: number for number, decision in enumerate(self.strategies)}
        return Table(
            version=version,
            paths=tuple(paths),
            strategies=tuple(self.strategies.items()),
            queries=tuple((query, paths[path], w) for (query, path), w in self.queries.items()),
            supports=tuple((paths[p], numbers[d], w) for (p, d), w in self.supports.items()),
        )

    @staticmethod
    def of(table: Table) -> "Graph":
        """The graph that a journal has."""
        graph, decisions = Graph(), [decision for decision, _ in table.strategies]
        graph.strategies = dict(table.strategies)
        graph.queries = {(query, table.paths[t]): weight for query, t, weight in table.queries}
        graph.supports = {(table.paths[t], decisions[m]): w for t, m, w in table.supports}
        return graph

    def known_queries(self) -> list[Query]:
        """Every kind of task that led to a strategy."""
        return list(dict.fromkeys(query for query, _ in self.queries))

    def num_paths(self, decision: Decision) -> int:
        """How many paths lead to a strategy."""
        return sum(each == decision for _, each in self.supports)

    def _strengths(self, query: Query) -> dict[Path, float]:
        """How strongly a query leads to each path."""
        found: dict[Path, float] = {}
        for (each, path), weight in self.queries.items():
            if like := similarity(query, each):
                found[path] = found.get(path, 0.0) + like * weight
        return found

    def _paths(self) -> list[Path]:
        return list(dict.fromkeys(path for _, path in self.queries))

    def _strength(self, path: Path) -> float:
        """The strongest way through a path."""
        to = max(weight for (_, each), weight in self.queries.items() if each == path)
        return to * max(weight for (each, _), weight in self.supports.items() if each == path)


class Slopes:
    """A gradient by the weights of edges."""

    def __init__(self) -> None:
        self.queries: dict[tuple[Query, Path], float] = {}
        self.supports: dict[tuple[Path, Decision], float] = {}


def similarity(one: Query, other: Query) -> float:
    """1 for the same kind of task, `OTHER_SEAT` in another seat, 0 in another environment."""
    if one[0] != other[0]:
        return 0.0
    return 1.0 if one[1] == other[1] else OTHER_SEAT


def _bounded(weight: float) -> float:
    return min(MOST, max(LEAST, weight))
