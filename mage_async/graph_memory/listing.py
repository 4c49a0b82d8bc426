"""A memory as a line of a run's file, and what a line says to a trial of an evaluation."""

from collections.abc import Mapping
from typing import Any

from mage_async.graph_memory.drawing import probabilities
from mage_async.graph_memory.memory import GraphMemory

MOST_LISTED = 32
"""Strategies of a kind of task, those of the highest scores."""


def listed(memory: GraphMemory) -> dict[str, Any]:
    """Plain data: the strategies of every kind of task, the most relevant first."""
    return {
        "version": memory.version,
        "digest": memory.digest(),
        "strategies": [row for query in memory.queries() for row in _rows(memory, query)],
    }


def _rows(memory: GraphMemory, query: tuple[str, int]) -> list[dict[str, Any]]:
    scores, graph = memory.scores(query), memory.graph
    if not scores:
        return []
    shares = probabilities(scores)
    order = sorted(scores, key=lambda decision: -scores[decision])[:MOST_LISTED]
    return [
        {
            "kind": query[0],
            "seat": query[1],
            "state": decision[0],
            "action": decision[1],
            "score": scores[decision],
            "probability": shares[decision],
            "paths": graph.num_paths(decision),
            "born": graph.strategies[decision].born,
            "shown": graph.strategies[decision].shown,
            "gap": graph.strategies[decision].gap,
        }
        for decision in order
    ]


def scores_in(line: Mapping[str, Any], query: tuple[str, int]) -> dict[tuple[str, str], float]:
    """The relevance of a kind's strategies, as a line has them."""
    return {
        (row["state"], row["action"]): row["score"]
        for row in line["strategies"]
        if (row["kind"], row["seat"]) == query
    }
