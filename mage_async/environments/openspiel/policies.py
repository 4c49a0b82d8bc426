"""Whole policies of small games: equilibria by counterfactual regret minimisation, best responses.

A table gives the probability of each action for every information state of OpenSpiel.
Solving Leduc poker takes ten seconds, so tables are kept in the user's cache.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mage_async.environments.openspiel.engine import engine

Table = Mapping[str, Sequence[tuple[int, float]]]


def equilibrium(game: Any, iterations: int) -> Table:
    """The average policy of so many iterations of CFR, from the cache where it is there."""
    file = _cache_folder() / f"{_key(game, iterations)}.json"
    if file.is_file():
        return json.loads(file.read_text())
    solver = engine().CFRSolver(game)
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    table = dict(solver.tabular_average_policy().policy_table())
    _store(file, table)
    return table


def greedy(table: Table) -> Table:
    """The likeliest action always; the first one where several are."""
    return {
        known: [(max(actions, key=lambda each: each[1])[0], 1.0)]
        for known, actions in table.items()
    }


def best_response(game: Any, against: Table) -> Table:
    """The best response to a table, in either seat; an empty table is uniform play."""
    table: dict[str, list[tuple[int, float]]] = {}
    for seat in range(2):
        actions = _response(game, seat, against).get_best_response_actions()
        table |= {known: [(action, 1.0)] for known, action in actions.items()}
    return table


def best_value(game: Any, seat: int, against: Table) -> float:
    """What a best response earns in a seat."""
    return float(_response(game, seat, against).value_from_state(game.new_initial_state()))


def _response(game: Any, seat: int, against: Table) -> Any:
    """The engine's; it copies a mapping, but would not keep a policy object alive."""
    return engine().TabularBestResponse(game, seat, _complete(game, against))


def _complete(game: Any, table: Table) -> dict[str, list[tuple[int, float]]]:
    """The table with every legal action, as the engine wants it; uniform where it says nothing."""
    complete: dict[str, list[tuple[int, float]]] = {}
    waiting = [game.new_initial_state()]
    while waiting:
        state = waiting.pop()
        if state.is_terminal():
            continue
        legal = state.legal_actions()
        waiting += [state.child(action) for action in legal]
        known = "" if state.is_chance_node() else state.information_state_string()
        if known and known not in complete:
            chances = dict(table[known]) if known in table else dict.fromkeys(legal, 1 / len(legal))
            complete[known] = [(action, chances.get(action, 0.0)) for action in legal]
    return complete


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mage_async" / "openspiel"


def _key(game: Any, iterations: int) -> str:
    text = f"{game}/cfr/{iterations}/{version('open_spiel')}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _store(file: Path, table: Table) -> None:
    """Write under another name first, so that no process ever reads half a table."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(table))
    partial.replace(file)
