"""Does a pretrained model learn to learn through a plain program with its own loop?

    python -m bench.learning.plain_agent --model DIR [--seeds 0 1 2]   about a core-hour for a seed

`run` below is a program as a user has one: it sends messages to an address and returns a reward. It
knows nothing of trials. Four doors of ten words hide one coin, and the program may open two doors
in an episode; a trial is three episodes with the same doors. The doors and the place of the coin
are those of a task's number, and a quarter of all tasks is held out. The training sets nothing but
the program and the model: `mage train --agent bench.learning.plain_agent:run --set
policy.source=DIR`.

A player without memory earns 0.375 in each episode: 1/4 + 1/4 · 1/2. One that opens no wrong door
twice and goes back to the right one earns 0.375, 0.875 and 1.

For each seed the program prints the held-out return of the last episode before and after training,
and that of two controls: `blind` plays each episode without memory of the earlier ones, and
`swapped` meets another task in the last episode. A seed has learned if the last episode is above
both controls and above its start, each by more than the two 95 % intervals together. A run in
`--run-dir` that has ended is not made again, and one that was interrupted is resumed.
"""

import json
import os
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from bench.lib.baseline import ROOT, write_baseline
from bench.lib.last_episode import documents, is_above, returns_of
from bench.lib.options import option_parser
from mage_async.results.intervals import interval

DOORS = ("oak", "iron", "glass", "stone", "paper", "brick", "silver", "straw", "copper", "leather")
SETS = ("start", "heldout", "heldout_blind", "heldout_swapped")
"""Sets of trials whose last episodes are compared; "start": held-out tasks before training."""


def complete(
    messages: list[dict[str, str]], doors: list[str], base_url: str, api_key: str
) -> dict[str, str]:
    """Return the model's answer, which is one of the doors."""
    body = {"model": "policy", "messages": messages, "regex": "|".join(doors), "max_tokens": 4}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    url = f"{base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        message: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return message


def run(task: int, episode: int, base_url: str, api_key: str) -> float:
    """Open two of four doors, and return 1 or 0.5 if the coin is behind the first or second."""
    rng = random.Random(task)
    doors = rng.sample(DOORS, 4)
    coin = rng.choice(doors)
    text = (
        f"There are four doors: {', '.join(doors)}. A coin lies behind one of them. Which door do "
        "you open?"
    )
    messages = [{"role": "user", "content": text}]
    for reward in (1.0, 0.5):
        messages.append(complete(messages, doors, base_url, api_key))
        if messages[-1]["content"] == coin:
            return reward
        messages.append({"role": "user", "content": "Nothing there. Which door do you open now?"})
    return 0.0


def main() -> None:
    """Train with each seed, and print a line for each."""
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="a pretrained model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/plain_agent"), metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--only-report", action="store_true", help="of the runs that have ended")
    parser.add_argument("--name", default="", help="of the baseline; without it none is written")
    given = parser.parse_args()
    rows: dict[int, dict[str, Any]] = {}
    for seed in given.seeds:
        folder = given.run_dir / str(seed)
        if not given.only_report and not (folder / "evaluation.json").exists():
            train(folder, [f"policy.source={given.model}", f"seed={seed}", *given.set])
        if (folder / "evaluation.json").exists():
            rows[seed] = row = result_of(folder)
            print(f"seed {seed}: {row_text(row)}", flush=True)
    if len(rows) > 1:
        for control in SETS:
            if control != "heldout":
                gains = [row["heldout"][0] - row[control][0] for row in rows.values()]
                mean, half = interval(gains)
                print(f"above {control}: {mean:+.3f} ± {half:.3f}, {len(gains)} seeds")
    if given.name:
        write_baseline(given.name, {"set": given.set, "seeds": rows})
    sys.exit(0 if rows and all(row["has_learned"] for row in rows.values()) else 1)


def train(folder: Path, settings: list[str]) -> None:
    """Run `mage train` to its end, or resume the run in the folder."""
    command = [sys.executable, "-m", "mage_services.cli.main", "train", "--run-dir", str(folder)]
    if folder.exists():
        command.append("--resume")
    else:
        command += ["--agent", "bench.learning.plain_agent:run"]
        command += [f"--set={each}" for each in settings]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)


def result_of(folder: Path) -> dict[str, Any]:
    """Return the last episode's return with its interval, by set, and whether the run learned."""
    returns = returns_of(folder)
    row: dict[str, Any] = {name: returns[name] for name in SETS}
    others = [row[name] for name in SETS if name != "heldout"]
    summary = json.loads((folder / "summary.json").read_text())
    return row | {
        "has_learned": is_above(row["heldout"], others),
        "steps": len(documents(folder / "metrics.jsonl")),
        "wall_s": summary["wall_s"],
    }


def row_text(row: dict[str, Any]) -> str:
    """Return the line that is printed for a seed."""
    returns = "  ".join(f"{name} {row[name][0]:+.3f} ±{row[name][1]:.3f}" for name in SETS)
    verdict = "learned" if row["has_learned"] else "not learned"
    return f"{row['steps']} steps in {row['wall_s']:.0f} s: {returns}: {verdict}"


if __name__ == "__main__":
    main()
