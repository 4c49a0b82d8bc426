"""What hostile peers cost an honest one.

    python -m bench.chaos.peers [--sustained]          4 minutes

A learner's channel on TCP with keys answers one honest actor, in a process of its own, that sends
trials of 2,048 tokens with 16 credits as fast as they are acknowledged. Windows without and with an
attack alternate. What is compared is the work that an attack makes for the learner, and not the
processor that it burns, which is another machine's where it matters: so the learner and the honest
actor share one processor, the attacker has the others, and it keeps them as busy where it does not
attack: it makes its messages and sends none (what a busy processor costs the one beside it is the
row `no attacker`, whose windows leave them idle). Where other programs run too, begin
it with `nice -n -15`. The flooding ones have a known key, a new one a window: the one before is
barred. Measured are the honest actor's trials a second in an attack's window over the mean of the
windows before and after it, the median of the rounds, and what the learner's channel took from the
attackers. A round in which the machine's own host kept a fiftieth of its processors for others is
left out of that (where all are, all count, and there is no pass). Before the rounds each attack is
made without the honest actor: the time of the learner's processor that it takes then bounds what it
can cost others, and hardly depends on what else the machine does.

All attacks are made in windows of 2.4 s, which hold the whole cost of a flood that is then barred
for a minute. `--sustained` makes the flood of sound messages in windows of 20 s, in which it goes
on trying: that figure, and not the first window's, is the one judged. Either run keeps the other's
figures in the baseline.

The last line is the verdict, and the exit status 1 where a judged attack costs 5 % or more, the
honest actor is refused, a peer without a known key gets a message in, or a flood is not refused in
every window (as where other programs leave the attackers no processor).
"""

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.chaos.attacked_learner import FIRST_PROCESSOR, AttackedLearner, Window, begin
from bench.chaos.attackers import FLOOD, NOBODY, SILENT, WAYS
from bench.lib.baseline import FOLDER, machine, provenance, write_baseline
from bench.lib.options import option_parser
from mage_async.policy_version import VersionRun
from mage_async.protocol.messages import Hello, TrialResult
from mage_async.trajectory import Segment, Task, Trial
from mage_services.transport.authentication import actor_keys, learner_keys, make_keys
from mage_services.transport.learner_channel import LearnerChannel
from mage_services.transport.peer_channel import PeerChannel

NUM_TOKENS, CREDITS = 2048, 16
MOST_STOLEN = 0.02
"""Share of a window's processors that the host may keep: a round with more is left out."""
LEAST_RATIO = 0.95
HELLO = Hello(role="actor", name="honest", build="b", config_digest="c", credits=CREDITS)


def example(index: int) -> TrialResult:
    """A trial of one segment."""
    source = np.random.default_rng(0)
    segment = Segment(
        source.integers(0, 50_000, NUM_TOKENS, dtype=np.int32),
        np.ones(NUM_TOKENS, bool),
        -source.random(NUM_TOKENS, dtype=np.float32),
        (VersionRun(0, 0, 0),),
    )
    return TrialResult(1, 0, Trial(Task("rps", "cycle-1", 5), index, 1, (segment,), ()))


async def be_honest(address: str, keys: Path) -> None:
    """Send trials for as long as they are acknowledged."""
    result = example(0)
    with PeerChannel(address, HELLO, keys=actor_keys(keys)) as channel:
        for _ in range(CREDITS):
            await channel.send(result)
        while True:
            await channel.receive()
            await channel.send(result)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which attacks, how often, in windows of which length."""

    name: str
    """In the baseline."""
    kinds: tuple[str, ...]
    judged: frozenset[str]
    """Those kinds that must not cost 5 %."""
    window_s: float
    num_alone: int
    num_rounds: int

    def num_attacks(self) -> int:
        """Attacks of all kinds, without and with an honest actor."""
        return (self.num_alone + self.num_rounds) * len(self.kinds)


ATTACKS = tuple(kind for kind in WAYS if kind not in (SILENT, NOBODY))
FIRST = Plan("first_window", (*ATTACKS, NOBODY), frozenset(ATTACKS) - {FLOOD}, 2.4, 3, 5)
SUSTAINED = Plan("sustained", (FLOOD, NOBODY), frozenset([FLOOD]), 20.0, 1, 4)


def prepare(folder: Path, num_attacks: int) -> Path:
    """Keys of the learner, of an honest actor, of each attack, and of a stranger."""
    keys = folder / "keys"
    make_keys(keys)
    make_keys(folder / "stranger")
    for number in range(num_attacks):
        own = folder / f"attack{number}"
        make_keys(own)
        shutil.copy2(own / "actor.key", keys / f"attack{number}.key")
        shutil.copy2(keys / "learner.key", own / "learner.key")
        (own / "learner.key_secret").unlink()
    return keys


async def measure(folder: Path, plan: Plan) -> dict[str, Any]:
    """All attacks in turn; figures by attack."""
    os.sched_setaffinity(0, [FIRST_PROCESSOR])
    keys = learner_keys(prepare(folder, plan.num_attacks()))
    with LearnerChannel("tcp://127.0.0.1:0", build="b", config_digest="c", keys=keys) as channel:
        learner = AttackedLearner(channel, folder, plan.window_s)
        serving = asyncio.create_task(learner.serve())
        await learner.hear_of_attackers()
        attacks = enumerate(plan.kinds * (plan.num_alone + plan.num_rounds))
        first = islice(attacks, plan.num_alone * len(plan.kinds))
        alone = [await learner.attacked(kind, number) for number, kind in first]
        honest = begin(
            [FIRST_PROCESSOR],
            "bench.chaos.peers",
            "--honest",
            channel.address,
            str(folder / "keys"),
        )
        await learner.has_begun.wait()
        await learner.attacked(SILENT, 0)  # warm
        quiets, attacked = [await learner.attacked(SILENT, 0)], []
        for number, kind in attacks:
            attacked.append(await learner.attacked(kind, number))
            quiets.append(await learner.attacked(SILENT, number))
        statistics_ = channel.statistics()
        serving.cancel()
        for process in (honest, learner.attackers):
            process.kill()
            process.wait()
    rounds = list(zip(quiets, attacked, quiets[1:], strict=False))
    return {
        "attacks": {
            kind: figures_of(alone[at :: len(plan.kinds)], rounds[at :: len(plan.kinds)])
            for at, kind in enumerate(plan.kinds)
        },
        "honest_is_served": any(peer.startswith("honest/") for peer in statistics_.peers),
        "turned_away": statistics_.num_turned_away,
        "malformed": sum(faults.count for faults in statistics_.faults.values()),
        "notes": channel.take_notes(),
    }


def figures_of(alone: list[Window], rounds: list[tuple[Window, Window, Window]]) -> dict[str, Any]:
    """Figures of one kind of attack.

    Args:
        alone: windows without an honest actor.
        rounds: windows before, in and after an attack.
    """
    kept = [one for one in rounds if max(window.stolen for window in one) <= MOST_STOLEN]
    windows = [[window.trials_per_s for window in one] for one in kept or rounds]
    ratios = [2 * attacked / (before + after) for before, attacked, after in windows]
    return {
        "busy_alone": [window.busy for window in alone],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "trials_per_s": windows,
        "left_out": len(rounds) - len(kept),
        "rounds": [[asdict(window) for window in one] for one in rounds],
        "messages_in": sum(window.num_messages for _, window, _ in rounds),
        "refused": sum(window.num_refused for _, window, _ in rounds),
        "rounds_refused": sum(window.num_refused > 0 for _, window, _ in rounds),
    }


def conclude(figures: dict[str, Any], plan: Plan) -> bool:
    """Print the table, write the figures; whether every attack was kept out."""
    print(
        f"{'attack':<20} learner's time  quiet/s attacked/s  ratio  least … most   "
        "messages in, peers refused"
    )
    is_good = figures["honest_is_served"]
    for kind, row in figures["attacks"].items():
        quiet, attacked, _ = (statistics.median(w) for w in zip(*row["trials_per_s"], strict=True))
        spread = f"{min(row['ratios']):.3f} … {max(row['ratios']):.3f}"
        busy = statistics.median(row["busy_alone"])
        print(
            f"{kind:<20} {busy:>14.1%}  {quiet:>7,.0f} {attacked:>10,.0f}  {row['ratio']:.3f}  "
            f"{spread}  {row['messages_in']:,}, {row['refused']}"
        )
        is_good &= row["left_out"] < plan.num_rounds
        is_good &= row["ratio"] > LEAST_RATIO or kind not in plan.judged
        is_good &= not (kind in ("no keys", "wrong keys") and row["messages_in"])
        is_good &= kind not in ("garbage", FLOOD) or row["rounds_refused"] == plan.num_rounds
    num_left_out = sum(row["left_out"] for row in figures["attacks"].values())
    num_rounds = plan.num_rounds * len(plan.kinds)
    print(
        f"turned away {figures['turned_away']:,}, malformed {figures['malformed']:,}; left out, as "
        f"the machine's host kept its processors: {num_left_out} of {num_rounds}"
    )
    sizes = {"window_s": plan.window_s, "credits": CREDITS, "num_tokens": NUM_TOKENS}
    write_baseline("peers", others_figures(plan) | {plan.name: sizes | figures | of_what()})
    worst = min(figures["attacks"][kind]["ratio"] for kind in plan.judged)
    kept = "kept out" if is_good else "NOT kept out"
    print(f"{kept}: the honest actor keeps {worst:.1%} at worst, in windows of {plan.window_s:g} s")
    return is_good


def others_figures(plan: Plan) -> dict[str, Any]:
    """What the baseline holds of the other plan."""
    file = FOLDER / f"peers_{machine()}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    names = {FIRST.name, SUSTAINED.name} - {plan.name}
    return {name: known[name] for name in names & known.keys()}


def of_what() -> dict[str, Any]:
    """The code that made these figures: the two plans may have been measured on different code."""
    made = provenance()
    return {key: made[key] for key in ("git", "git_is_clean")}


def main() -> None:
    """Measure, or be one of the processes that it starts."""
    parser = option_parser(__doc__)
    parser.add_argument("--honest", nargs=2, metavar=("ADDRESS", "KEYS"))
    parser.add_argument("--sustained", action="store_true", help="the flood, 20 s at a time")
    given = parser.parse_args()
    plan = SUSTAINED if given.sustained else FIRST
    if given.honest:
        uvloop.run(be_honest(given.honest[0], Path(given.honest[1])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            figures = uvloop.run(measure(Path(folder), plan))
        sys.exit(not conclude(figures, plan))


if __name__ == "__main__":
    main()
