"""Train on few tasks with and without exchanged words: is a new task met, or are the old ones known
by heart?

    python -m bench.learning.few_tasks --only Guests        two variants, three seeds: 30 minutes
    python -m bench.learning.few_tasks --seeds 0            two tasks, two variants: 20 minutes

`Guests` has fifteen tasks, of which ten are trained, `Cups` six, of which four are. Each class is
trained with the README's command and nothing else, and once more with `interchangeable` words. The
program prints the return of the last episode on trained tasks, on held-out ones, and on these with
every episode played without memory (`blind`) or with another task hidden in the last one
(`swapped`), each with the half-width of its 95 % interval. A result that is in `--run-dir` is not
measured again.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.last_episode import Return, returns_of
from bench.lib.options import option_parser

FOODS = ("soup", "fish", "rice", "cake", "pear", "nuts")
PAIRS = ["-".join(pair) for pair in itertools.combinations(FOODS, 2)]
COLOURS, CUPS = ("red", "green", "blue"), ("one", "two", "three")
ORDERS = ["-".join(order) for order in itertools.permutations(COLOURS)]
SETS = ("train", "heldout", "heldout_blind", "heldout_swapped")


class Guests:
    """A guest likes two of six foods. Offer one at each of four turns; a liked one earns 1."""

    legal_actions = FOODS
    words = (*FOODS, "offer", "likes", "leaves")
    max_turns, min_return, max_return = 4, 0.0, 4.0

    def members(self, split: str) -> list[str]:
        """Return ten pairs of foods to train on, or the other five."""
        return [pair for index, pair in enumerate(PAIRS) if (index % 3 == 2) == (split != "train")]

    def reset(self, seed: int, task: str) -> str:
        """Receive another guest of the same taste."""
        self.liked, self.turn = task.split("-"), 0
        return "offer"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Offer a food."""
        self.turn += 1
        is_liked = action in self.liked
        return "likes" if is_liked else "leaves", float(is_liked), self.turn == self.max_turns


class GuestsExchanged(Guests):
    """A guest likes two of six foods. Offer one at each of four turns; a liked one earns 1."""

    interchangeable = (FOODS,)


class Cups:
    """Three balls lie under three cups. Say where each colour lies when you are asked."""

    legal_actions = CUPS
    words = (*CUPS, *COLOURS, "found", "wrong", "end")
    max_turns, min_return, max_return = 3, 0.0, 3.0

    def members(self, split: str) -> list[str]:
        """Return four orders of the balls to train on, or the other two."""
        return ORDERS[:4] if split == "train" else ORDERS[4:]

    def reset(self, seed: int, task: str, episode: int) -> str:
        """Draw the order of the questions."""
        self.order, self.asked = task.split("-"), [*COLOURS]
        random.Random(f"{seed}-{episode}").shuffle(self.asked)
        return self.asked[0]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Look under a cup."""
        is_found = self.order[CUPS.index(action)] == self.asked.pop(0)
        now = self.asked[0] if self.asked else "end"
        return f"{'found' if is_found else 'wrong'} {now}", float(is_found), not self.asked


class CupsExchanged(Cups):
    """Three balls lie under three cups. Say where each colour lies when you are asked."""

    interchangeable = (CUPS, COLOURS)


TASKS = {"Guests": (Guests, GuestsExchanged), "Cups": (Cups, CupsExchanged)}


def main() -> None:
    """Train on the tasks, and print a line for each run."""
    parser = option_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/few_tasks"), metavar="DIR")
    parser.add_argument("--name", default="", help="name of the baseline to write; none by default")
    given = parser.parse_args()
    given.run_dir.mkdir(parents=True, exist_ok=True)
    rows = {}
    kinds = [kind for name in given.only for kind in TASKS[name]]
    for seed, kind in itertools.product(given.seeds, kinds):
        run = given.run_dir / f"{kind.__name__}_{seed}"
        file = run.with_suffix(".json")
        if not file.exists():
            file.write_text(json.dumps(_trained(kind, seed, run)))
        rows[run.name] = json.loads(file.read_text())
        shown = "  ".join(f"{name} {rows[run.name][name][0]:.2f}" for name in SETS)
        print(f"{run.name:<18} {shown}  (± {rows[run.name]['heldout'][1]:.2f})", flush=True)
    if given.name:
        write_baseline(given.name, {"runs": rows})


def _trained(kind: type, seed: int, run: Path) -> dict[str, Return]:
    """Train on a class in the directory `run`; return the returns of the last episode by set."""
    keys = [f"environment.name={__spec__.name}:{kind.__name__}", f"seed={seed}"]
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run)]
    subprocess.run([*command, *(f"--set={key}" for key in keys)], check=True)
    found = returns_of(run)
    return {name: found[name] for name in SETS}


if __name__ == "__main__":
    main()
