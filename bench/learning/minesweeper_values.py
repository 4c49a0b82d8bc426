"""Compute what players with and without memory earn in MineSweeper 4×4, by number of mines.

    python -m bench.learning.minesweeper_values [--mines 2 3 4] [--turns 7] [--exact-up-to 2]
    python -m bench.learning.minesweeper_values --noise

The players are scripts that open random cells or infer mines, each with and without memory of
earlier episodes (2,000 trials of three episodes); the best player without memory that knows the set
of held-out boards; and the best player that knows the mines. The last two are exact, the first of
them only up to `--exact-up-to` mines (3 take a minute or two). Returns are on held-out boards. The
program prints a table and writes a baseline.

`--noise` measures, on the training boards, how much memory adds to the return of a player that
opens random cells, and the standard deviation of its returns: the signal that RL has to find, and
its noise.
"""

import argparse
import random
from functools import partial
from statistics import fmean, pstdev

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.environments.game_references import scripted_returns
from mage_async.environments.games.minesweeper import MineSweeper, MineSweeperScript
from mage_async.trajectory import Task
from tests.helpers.game_values import forgetful_value, knowing_value

EPISODES, TRIALS = 3, 2000
"""Episodes of a trial, and trials of a player."""
# Probabilities to infer mines from numbers, and to use earlier episodes.
STYLES = {
    "any cell, forgets": (0.0, 0.0),
    "any cell, remembers": (0.0, 1.0),
    "reasons, forgets": (1.0, 0.0),
    "reasons, remembers": (1.0, 1.0),
}
LOOKS_BACK = (0.0, 0.3, 1.0)
"""Probabilities with which a player that opens random cells uses what earlier episodes have
shown."""


def main() -> None:
    """Measure each number of mines, and print the returns by episode."""
    given = _arguments()
    if given.noise:
        _report_noise(given.mines, given.turns)
        return
    figures = {}
    for mines in given.mines:
        found = _measured(mines, given.turns, is_exact=mines <= given.exact_up_to)
        figures[f"{mines} mines"] = found
        for name, values in found.items():
            print(f"{mines} mines  {name:36}", *(f"{value:7.2f}" for value in values))
    write_baseline("minesweeper_values", {"turns": given.turns, "returns": figures})


def _measured(mines: int, turns: int, *, is_exact: bool) -> dict[str, list[float]]:
    """Return the returns of each player by episode; of exact values, the only one."""
    environment = _environment(mines, turns)
    found = {}
    for name, style in STYLES.items():
        make = partial(_script, mines, *style)
        found[name] = list(scripted_returns(environment, "heldout", EPISODES, make, TRIALS))
    boards = [environment.board(each) for each in environment.members("heldout")]
    if is_exact:
        found["best who forgets, knows these boards"] = [forgetful_value(boards, turns)]
    found["best who knows the mines"] = [fmean(knowing_value(each, turns) for each in boards)]
    return found


def _environment(mines: int, turns: int) -> MineSweeper:
    """Return the 4×4 game in which an observation shows the newly opened cells only."""
    return MineSweeper(size=4, mines=mines, turns=turns, view="news")


def _report_noise(every: list[int], turns: int) -> None:
    """Print mean and standard deviation of the last episode's return, by mines and memory."""
    rows = []
    for mines in every:
        environment = _environment(mines, turns)
        found = {memory: _last_returns(environment, mines, memory) for memory in LOOKS_BACK}
        boards = len(environment.members("train"))
        for memory, returns in found.items():
            gain, spread = fmean(returns) - fmean(found[0.0]), pstdev(returns)
            row = {"mines": mines, "boards": boards, "memory": memory, "gain": gain}
            rows.append(row | {"mean": fmean(returns), "spread": spread})
            shown = f"{fmean(returns):7.2f} ± {spread:5.2f}  gain {gain:5.2f}"
            print(f"{mines} mines, {boards} boards  looks back {memory:3.1f}  {shown}")
    write_baseline("minesweeper_noise", {"turns": turns, "trials": TRIALS, "rows": rows})


def _last_returns(environment: MineSweeper, mines: int, memory: float) -> list[float]:
    """Return the last episode's return of each trial; all memories play the same boards."""
    members, source = environment.members("train"), random.Random(0)
    tasks = [Task("minesweeper", source.choice(members), number) for number in range(TRIALS)]
    return [_last_return(environment, task, _script(mines, 0.0, memory, source)) for task in tasks]


def _last_return(environment: MineSweeper, task: Task, script: MineSweeperScript) -> float:
    for episode in range(EPISODES):
        play, earned = environment.begin(task, episode), 0.0
        while play.legal_actions():
            earned += play.act(script.choose(play)).reward
    return earned


def _script(mines: int, care: float, memory: float, source: random.Random) -> MineSweeperScript:
    return MineSweeperScript(source, mines, care, memory)


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--mines", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--turns", type=int, default=7, help="most of an episode")
    parser.add_argument("--exact-up-to", type=int, default=2, help="mines")
    parser.add_argument("--noise", action="store_true", help="instead: the spread of returns")
    return parser.parse_args()


if __name__ == "__main__":
    main()
