"""Where does memory matter in MineSweeper 4×4? What players earn on held-out boards, by mines.

    python -m bench.learning.minesweeper_values [--mines 2 3 4] [--turns 7] [--exact-up-to 2]

Scripts, that open any cell or reason, and forget or remember (2,000 trials of three episodes); the
best who forgets but knows which boards are held out, and the best who knows the mines (both exact;
the first for so many mines at most: 3 take a minute or two). Prints a table, writes one JSON.
"""

import argparse
import random
from functools import partial
from statistics import fmean

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.environments.minesweeper.game import MineSweeper
from mage_async.environments.minesweeper.script import MineSweeperScript
from mage_async.environments.scripted_returns import scripted_returns
from tests.helpers.game_values import forgetful_value, knowing_value

EPISODES, TRIALS = 3, 2000
STYLES = {
    "any cell, forgets": (0.0, 0.0),
    "any cell, remembers": (0.0, 1.0),
    "reasons, forgets": (1.0, 0.0),
    "reasons, remembers": (1.0, 1.0),
}


def main() -> None:
    """Measure each number of mines, and print what episodes earn."""
    given = _arguments()
    figures = {}
    for mines in given.mines:
        found = _measured(mines, given.turns, is_exact=mines <= given.exact_up_to)
        figures[f"{mines} mines"] = found
        for name, values in found.items():
            print(f"{mines} mines  {name:36}", *(f"{value:7.2f}" for value in values))
    write_baseline("minesweeper_values", {"turns": given.turns, "returns": figures})


def _measured(mines: int, turns: int, *, is_exact: bool) -> dict[str, list[float]]:
    environment = MineSweeper(size=4, mines=mines, turns=turns, view="news")
    found = {}
    for name, style in STYLES.items():
        make = partial(_script, mines, *style)
        found[name] = list(scripted_returns(environment, "heldout", EPISODES, make, TRIALS))
    boards = [environment.board(each) for each in environment.members("heldout")]
    if is_exact:
        found["best who forgets, knows these boards"] = [forgetful_value(boards, turns)]
    found["best who knows the mines"] = [fmean(knowing_value(each, turns) for each in boards)]
    return found


def _script(mines: int, care: float, memory: float, source: random.Random) -> MineSweeperScript:
    return MineSweeperScript(source, mines, care, memory)


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--mines", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--turns", type=int, default=7, help="most of an episode")
    parser.add_argument("--exact-up-to", type=int, default=2, help="mines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
