"""Measure turns per CPU-second of each environment, on one core and without a model.

Each trial is three episodes of one task, played by uniformly random legal actions; eight trials
share a task, as those of a group do, and tasks take all variants in order. A turn is one action of
the agent with the opponent's answer, the text, a share of the episode's beginning, and the choice
among the legal actions. In Sokoban a turn has up to three steps of the player. One process plays
two thousand trials concurrently, one turn of each after the other.

    python -m bench.system.environments
"""

import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from bench.lib.baseline import verdict, write_baseline
from bench.lib.options import option_parser
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment, Play
from mage_async.trajectory import Task

NUM_AT_ONCE = 2000
"""Number of trials that are played concurrently."""
NUM_EPISODES = 3
GROUP = 8
"""Number of trials that share a task."""
NUM_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """An environment with its options, and its least turns per CPU-second."""

    title: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    least: int = 0
    """Wanted turns per CPU-second; 0 if there is no bound."""
    num_trials: int = NUM_AT_ONCE


ROWS = (
    Row("kuhn", "kuhn", least=20_000),
    Row("tictactoe against scripts", "tictactoe", {"simulations": 0}, 20_000),
    Row("sokoban 6×6, 2 boxes", "sokoban", least=5_000),
    Row("sokoban 8×8, 3 boxes", "sokoban", {"size": 8, "boxes": 3, "turns": 12, "longest": 36}),
    Row("minesweeper 6×6, 3 mines", "minesweeper", least=10_000),
    Row("minesweeper 4×4, 2 mines", "minesweeper", {"size": 4, "mines": 2}),
    Row("rps", "rps"),
    Row("scout", "scout"),
    Row("openspiel leduc_poker, random", "openspiel", {"train": ["random"], "heldout": ["cfr"]}),
    Row(
        "tictactoe against mcts-100",
        "openspiel",
        {"game": "tic_tac_toe", "train": ["mcts-100"]},
        num_trials=200,  # the opponent's search is slow
    ),
)


def turns_per_second(environment: Environment, num_trials: int) -> float:
    """Play trials, `NUM_AT_ONCE` of them concurrently; return turns per CPU-second."""
    members, seats = environment.members("train"), environment.seats()
    name, source = environment.facts.name, random.Random(0)

    def task(number: int) -> Task:
        group = number // GROUP
        return Task(name, members[group % len(members)], group, seats[group % len(seats)])

    num_turns, started = 0, time.process_time()
    for first in range(0, num_trials, NUM_AT_ONCE):
        tasks = [task(number) for number in range(first, min(num_trials, first + NUM_AT_ONCE))]
        for episode in range(NUM_EPISODES):
            plays: list[Play] = [environment.begin(each, episode) for each in tasks]
            while plays:
                going = []
                for play in plays:
                    outcome = play.act(source.choice(play.legal_actions()))
                    num_turns += 1
                    if not outcome.is_done:
                        going.append(play)
                plays = going
    return num_turns / (time.process_time() - started)


def main() -> int:
    """Measure all rows in several rounds; print the table and write the figures; return 1 if a
    bound is missed.
    """
    option_parser(__doc__).parse_args()
    speeds: dict[str, list[float]] = {row.title: [] for row in ROWS}
    for _ in range(NUM_ROUNDS):
        for row in ROWS:
            environment = load(row.name, **row.options)
            speeds[row.title].append(turns_per_second(environment, row.num_trials))
    figures = {}
    print(f"{'environment':<34}{'turns/s':>10}{'least … most':>22}{'wanted':>10}")
    for row in ROWS:
        each = sorted(speeds[row.title])
        median = statistics.median(each)
        figures[row.title] = {
            "turns_per_s": round(median),
            "least": round(each[0]),
            "most": round(each[-1]),
            "wanted": row.least or None,
            "options": row.options,
        }
        spread = f"{each[0]:,.0f} … {each[-1]:,.0f}"
        wanted = f"{row.least:,}" if row.least else ""
        print(f"{row.title:<34}{median:>10,.0f}{spread:>22}{wanted:>10}")
    shape = {"trials_at_once": NUM_AT_ONCE, "episodes": NUM_EPISODES, "rounds": NUM_ROUNDS}
    write_baseline("environments", {"shape": shape, "rows": figures})
    found = {row.title: figures[row.title]["turns_per_s"] for row in ROWS}
    return verdict(
        [
            f"{row.title} {found[row.title]:,} turns/s, at least {row.least:,}"
            for row in ROWS
            if found[row.title] < row.least
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
