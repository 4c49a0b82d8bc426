"""How each process spent its last seconds: a bar and its largest parts, a line a process."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mage_services.terminal.run_state import RunState

STATE_STYLES = {
    "training": "spring_green3",
    "engine": "spring_green3",
    "environment": "deep_sky_blue3",
    "publishing": "medium_purple2",
    "checkpoint": "orchid3",
    "parity": "plum3",
}
"""Work is coloured, waiting is grey and amber."""
WAIT_STYLES = {"batch not full": "orange3", "no grant": "orange3", "no fresh weights": "gold3"}
MAX_ACTOR_LINES = 6


def processes(state: RunState, width: int) -> RenderableType:
    """Where each process's last seconds went; many actors share a line."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=9)
    grid.add_column()
    grid.add_column(no_wrap=True, overflow="ellipsis")
    bar_width = max(10, (width - 56) // 2)
    for name, shares, life in _process_rows(state):
        grid.add_row(
            _title(name, state.nodes.get(name)),
            _bar(shares, bar_width),
            _causes(shares) if shares else Text(life, "dim"),
        )
    return grid


def _title(name: str, node: str | None) -> Text:
    return Text(name) if node is None else Text.assemble(name, (f" {node}", "dim"))


def _process_rows(state: RunState) -> list[tuple[str, dict[str, float], str]]:
    shares = state.shares()
    rows = [(name, shares.get(name, {}), life) for name, life in state.processes.items()]
    actors = [row for row in rows if row[0].startswith("actor")]
    if len(actors) <= MAX_ACTOR_LINES:
        return rows
    others = [row for row in rows if row not in actors]
    mean = _mean_shares([row[1] for row in actors if row[1]])
    ready = sum(row[2] != "starting" for row in actors)
    num_nodes = len({state.nodes[row[0]] for row in actors if row[0] in state.nodes})
    where = f" on {num_nodes} nodes" if num_nodes > 1 else ""
    together = (f"{len(actors)} actors{where}", mean, f"{ready} ready")
    return sorted([*others, together], key=lambda row: row[0] == "evaluator")


def _mean_shares(all_shares: Sequence[dict[str, float]]) -> dict[str, float]:
    states = {state for shares in all_shares for state in shares}
    means = {s: sum(shares.get(s, 0.0) for shares in all_shares) / len(all_shares) for s in states}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _bar(shares: dict[str, float], width: int) -> Text:
    """Shares as one bar of `width` cells."""
    bar, filled, until = Text(), 0, 0.0
    for state, share in shares.items():
        until += share
        cells = round(until * width) - filled
        bar.append("█" * cells, state_style(state))
        filled += cells
    return bar.append("·" * (width - filled), "grey35")


def _causes(shares: dict[str, float]) -> Text:
    text = Text()
    for state, share in list(shares.items())[:3]:
        if share >= 0.005:
            text.append(f"{share:3.0%} ", "default").append(f"{state}  ", state_style(state))
    return text


def state_style(state: str) -> str:
    """Work in colours, waiting in ambers, what is new in grey."""
    return (STATE_STYLES | WAIT_STYLES).get(state, "grey62")
