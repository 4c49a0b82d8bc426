"""Check the verdicts of `mage adapt` on players whose behaviour is known, a thousand times each.

    python -m bench.learning.adapt_players [--certificates 1000] [--http 2]

`mage adapt` writes a certificate: a verdict whether a model adapts, from the returns of tasks and
their controls. Seven players of `tests/helpers/known_players.py`, for each of which the right
verdict is known, play its game of signed boxes. As functions they play for many certificates of the
default size and of a quarter of it; behind a local HTTP endpoint the command itself measures them,
for a few. Each line has the share of right verdicts, and of those that the player adapts. Wanted:
at the default size (three games of 128 tasks) at
least 99 of 100 verdicts are right; at a quarter of it, at most 1 % of the certificates of players
that do not adapt say that they do.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.results.certificate import TaskReturns, certificate
from mage_services.cli.main import main as mage
from tests.helpers.chat_server import ChatServer
from tests.helpers.known_players import PLAYERS, THINGS, SignedBoxes, reply_of

# Value of `--games` of `mage adapt`: three times the same game, with other codes.
GAMES = ",".join(
    f"tests.helpers.known_players:{name}" for name in ("SignedBoxes", "MoreBoxes", "OtherBoxes")
)
EPISODES, TASKS = 3, 128
"""Episodes of a trial, and tasks of each of the three games, by default."""
STATEMENTS = 4
"""Certificates of a measurement: those of the three games, and this one of all together."""
SIZES = {"default": 3 * TASKS, "a quarter": 3 * TASKS // 4}
"""Tasks of a certificate."""


def main() -> int:
    """Print the table, and return 1 if a bound is missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--certificates", type=int, default=1000)
    parser.add_argument("--http", type=int, default=2, help="certificates a player and size")
    given = parser.parse_args()
    source = random.Random(0)
    rows: list[dict[str, Any]] = []
    print(f"{'player':24}{'tasks':>7}  {'right':>7}{'adapts':>8}  verdicts; then through HTTP")
    for player, (_, right) in PLAYERS.items():
        for size in SIZES.values():
            found = Counter(
                certificate(
                    [_task(player, source) for _ in range(size)], statements=STATEMENTS
                ).verdict
                for _ in range(given.certificates)
            )
            through = [_through_http(player, size, seed) for seed in range(given.http)]
            row = {
                "player": player,
                "right": right,
                "tasks": size,
                "verdicts": dict(found),
                "share_right": found[right] / given.certificates,
                "share_adapts": found["adapts"] / given.certificates,
                "http": through,
            }
            rows.append(row)
            print(
                f"{player:24}{size:7,}  {row['share_right']:7.1%}{row['share_adapts']:8.1%}  "
                f"{dict(found)}; {[each['verdict'] for each in through]}",
                flush=True,
            )
    write_baseline("adapt_players", {"certificates": given.certificates, "rows": rows})
    return _verdict(rows)


def _verdict(rows: list[dict[str, Any]]) -> int:
    """Print whether the bounds are met; return the exit status."""
    whole = [row["share_right"] for row in rows if row["tasks"] == SIZES["default"]]
    wrong = [
        row["share_adapts"]
        for row in rows
        if row["tasks"] != SIZES["default"] and row["right"] != "adapts"
    ]
    misnamed = [
        (row["player"], row["tasks"], each["verdict"])
        for row in rows
        for each in row["http"]
        if each["verdict"] != row["right"]
        and (row["tasks"] == SIZES["default"] or each["verdict"] == "adapts")
    ]
    is_met = min(whole) >= 0.99 and max(wrong) <= 0.01 and not misnamed
    print(
        f"default size: at least {min(whole):.1%} right (wanted 99 %); a quarter: at most "
        f"{max(wrong):.1%} wrongly certified (wanted 1 %); through HTTP misnamed: "
        f"{misnamed or 'none'}: {'met' if is_met else 'MISSED'}"
    )
    return 0 if is_met else 1


def _task(player: str, source: random.Random) -> TaskReturns:
    """Play one task with all its controls, as `mage adapt` does.

    The controls are episodes without history, episodes as independent trials, the last episode
    after the history of another task (`noise`), and another task after this history (`swapped`).
    """
    choose = PLAYERS[player][0]
    member = source.getrandbits(40)
    box, other = SignedBoxes(), SignedBoxes()
    box.reset(0, member)
    other.reset(0, source.getrandbits(40))

    def episode(hidden: SignedBoxes, told: list[dict[str, str]]) -> float:
        """Play an episode after the episodes in `told`, and append what it told."""
        told.append({})
        right = 0
        for thing, code, sign in zip(THINGS, hidden.code, hidden.signs, strict=True):
            right += choose(thing, sign, told, source) == code
            told[-1][thing] = code
        return right / len(THINGS)

    history: list[dict[str, str]] = []
    own = [episode(box, history) for _ in range(EPISODES)]
    # `blind` and `retry`: without history these players answer alike in both.
    alone = [[episode(box, []) for _ in range(EPISODES)] for _ in range(2)]
    others: list[dict[str, str]] = []
    for _ in range(EPISODES - 1):
        episode(other, others)
    return TaskReturns(
        "signed boxes",
        str(member),
        own,
        *alone,
        noise=episode(box, others),
        swapped=episode(other, history[: EPISODES - 1]),
    )


def _through_http(player: str, size: int, seed: int) -> dict[str, Any]:
    """Measure a player behind a local HTTP endpoint with `mage adapt`."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        ChatServer(reply_of(player, seed)).in_thread() as url,
        (Path(folder) / "log").open("w") as log,
    ):
        own_stdout, sys.stdout = sys.stdout, log
        own_stderr, sys.stderr = sys.stderr, log
        try:
            model = ["--model", f"openai:{url}#{player}", "--games", GAMES]
            status = mage(["adapt", *model, "--trials", str(size // 3), "--out", folder])
        finally:
            sys.stdout, sys.stderr = own_stdout, own_stderr
        assert status == 0, (Path(folder) / "log").read_text()
        document = json.loads((Path(folder) / "certificate.json").read_text())
    names = ("verdict", "sentence", "differences")
    wall_s = round(time.monotonic() - began, 1)
    return {name: document[name] for name in names} | {"wall_s": wall_s}


if __name__ == "__main__":
    sys.exit(main())
