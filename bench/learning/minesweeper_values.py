"""Where does memory matter in MineSweeper 4×4? What players earn on held-out boards, by mines.

    python -m bench.learning.minesweeper_values [--mines 2 3 4] [--turns 7] [--exact-up-to 2]
    python -m bench.learning.minesweeper_values --noise

Scripts, that open any cell or reason, and forget or remember (2,000 trials of three episodes); the
best who forgets but knows which boards are held out, and the best who knows the mines (both exact;
the first for so many mines at most: 3 take a minute or two). Prints a table, writes one JSON.

`--noise`: on the boards to train on, what memory is worth to a player that opens any cell and looks
back now and then, and how much the returns of its trials differ: what RL has to find a signal in.
"""

import argparse
import random
from functools import partial
from statistics import fmean, pstdev

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.environments.games.minesweeper import MineSweeper, MineSweeperScript
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.trajectory import Task
from tests.helpers.game_values import forgetful_value, knowing_value

EPISODES, TRIALS = 3, 2000
STYLES = {
    "any cell, forgets": (0.0, 0.0),
    "any cell, remembers": (0.0, 1.0),
    "reasons, forgets": (1.0, 0.0),
    "reasons, remembers": (1.0, 1.0),
}
LOOKS_BACK = (0.0, 0.3, 1.0)
"""How often a player that opens any cell knows what earlier episodes have shown."""


def main() -> None:
    """Measure each number of mines, and print what episodes earn."""
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


def _report_noise(every: list[int], turns: int) -> None:
    """By mines and memory, mean and standard deviation of the return of the last episode."""
    rows = []
    for mines in every:
        environment = MineSweeper(size=4, mines=mines, turns=turns, view="news")
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
    """The last episode's return in each trial, on boards drawn with the same luck."""
    members, luck = environment.members("train"), random.Random(0)
    tasks = [Task("minesweeper", luck.choice(members), number) for number in range(TRIALS)]
    return [_last_return(environment, task, _script(mines, 0.0, memory, luck)) for task in tasks]


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
