"""Kill SGLang while an actor plays trials, again and again, and account for every trial.

    python -m bench.engine.sglang_kills --kills 20     a minute a kill

It needs an environment with SGLang (`tests/sglang`). Trials of the quickstart are played by
`play_trial`, always 16 concurrently. SIGKILL hits the engine's process and its scheduler
alternately, at random moments. The engine starts again (half a minute on a CPU), and the trials go
on. Before every third kill, new weights are published. The last line is the verdict; the exit
status is 1 if a trial is lost, or has tokens of weights that were not published.

    finished, dropped   trials that ended, or were dropped for a recorded reason
    lost                trials that did neither
    recovery_s          seconds from a kill to the first completion of the next process
"""

import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config, Tiny
from mage_async.errors import TrialFault
from mage_async.inference.chat_files import load_chat
from mage_async.policy.load import build_tiny
from mage_async.tasks.task_stream import evaluation_tasks
from mage_async.trajectory import Task, Trial
from mage_services.actor.rollout import Stage, play_trial
from mage_services.engines.engine import make_engine
from mage_services.engines.sglang.engine import SglangEngine
from mage_services.processes.process import ticks

AT_ONCE = 16
"""Number of trials that are played concurrently."""
PATIENCE_S = 900.0
"""Longest wait from a kill to the next completion; a longer one counts as a hang."""
# A turn waits for the engine's restart, and a silent engine counts as dead after a minute.
SETTINGS = (
    "engine.kind=sglang",
    "engine.cache_rule=refresh_at_episode",
    "engine.turn_deadline_s=900",
    "supervision.silence_s=60",
)


class Game:
    """Play trials all the time, and count how they end."""

    def __init__(self, config: Config, policy: Path, engine: SglangEngine) -> None:
        environment, chat = environment_of(config), load_chat(policy)
        rules = trial_config_of(config, environment, chat, config.trial.episodes)
        self._stage = Stage(environment, rules, chat, engine)
        self._tasks = evaluation_tasks(environment, "train", 64, 0)
        self.num_begun, self.finished, self.dropped = 0, list[Trial](), list[str]()
        self.is_over = False

    async def play(self) -> None:
        """Play one trial after the other until `is_over`. Cancellation loses the present one."""
        while not self.is_over:
            task: Task = self._tasks[self.num_begun % len(self._tasks)]
            run = self._stage.begin(task, 0, f"{self.num_begun}.0.0")
            self.num_begun += 1
            try:
                self.finished.append(await play_trial(run, self._stage.engine, self._stage.workers))
            except TrialFault as error:
                self.dropped.append(str(error))


class Publisher:
    """Publish new weights, which differ a little from the previous ones."""

    def __init__(self, policy: Path, engine: SglangEngine) -> None:
        self._folder, self._engine = policy.parent, engine
        self._tensors = load_file(policy / "model.safetensors")
        self.version = 0

    async def publish(self) -> None:
        """Publish the next version, and load it into the engine."""
        self.version += 1
        self._tensors = {
            name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in self._tensors.items()
        }
        file = self._folder / f"v{self.version}.safetensors"
        save_file(self._tensors, file)
        await self._engine.load(self.version, file)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds, which has no event to wait for."""
    async with asyncio.timeout(PATIENCE_S):
        async for _ in ticks(0.02):
            if is_so():
                return


async def until_completions(engine: SglangEngine, count: int) -> None:
    """Wait until `count` more turns were sampled."""
    wanted = engine.statistics().num_completions + count
    await until(lambda: engine.statistics().num_completions >= wanted)


async def until_recovered(engine: SglangEngine, dead: int) -> None:
    """Wait until a successor of the process with id `dead` has sampled a turn."""
    await until(lambda: engine.pid not in (dead, None))
    await until_completions(engine, 1)


def victim(engine: SglangEngine, number: int) -> int:
    """Return the id of the process to kill: the engine's, or its scheduler's, the child with most
    CPU time."""
    assert engine.pid is not None
    children = psutil.Process(engine.pid).children(recursive=True)
    if number % 2 == 0 or not children:
        return engine.pid
    return max(children, key=lambda child: sum(child.cpu_times()[:2])).pid  # user and system


async def attack(config: Config, policy: Path, kills: int, minutes: float) -> dict[str, object]:
    """Play trials, kill SGLang, and return the figures."""
    source, recovery_s = random.Random(0), list[float]()
    engine = make_engine(config, policy, "actor-0")
    assert isinstance(engine, SglangEngine)
    game, publisher = Game(config, policy, engine), Publisher(policy, engine)
    async with engine, asyncio.TaskGroup() as tasks:
        for number in range(AT_ONCE):
            tasks.create_task(game.play(), name=f"player {number}")
        await until_completions(engine, 1)
        last = time.monotonic() + 60 * minutes
        for number in range(kills):
            if time.monotonic() > last:
                break
            if number % 3 == 2:
                await publisher.publish()
            await until_completions(engine, source.randrange(1, 200))
            dead, began = engine.pid, time.monotonic()
            os.kill(victim(engine, number), signal.SIGKILL)
            await until_recovered(engine, dead or 0)
            recovery_s.append(time.monotonic() - began)
            print(f"kill {number + 1}: {recovery_s[-1]:.1f} s, {len(game.finished)} finished")
            sys.stdout.flush()
        game.is_over = True
    runs = [run for trial in game.finished for part in trial.segments for run in part.versions]
    return {
        "kills": len(recovery_s),
        "restarts": engine.num_restarts,
        "begun": game.num_begun,
        "finished": len(game.finished),
        "dropped": len(game.dropped),
        "lost": game.num_begun - len(game.finished) - len(game.dropped),
        "wrong_versions": sum(not 0 <= run.kv <= run.policy <= publisher.version for run in runs),
        "extension_faults": engine.statistics().num_extension_faults,
        "recovery_s": {
            "median": statistics.median(recovery_s),
            "max": max(recovery_s),
        },
    }


def main() -> None:
    """Run the attack, print the verdict, and write the baseline."""
    parser = option_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="no kill after these")
    given = parser.parse_args()
    config = config_file.load(config_file.find(None), list(SETTINGS))
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        build_tiny(Tiny(), environment_of(config).facts.words, config.seed, policy)
        figures = asyncio.run(attack(config, policy, given.kills, given.minutes))
    for name, value in figures.items():
        print(f"{name:18} {value}")
    write_baseline("sglang_kills", figures)
    is_well = not figures["lost"] and not figures["wrong_versions"]
    print("every trial finished or was dropped with a reason" if is_well else "TRIALS WERE LOST")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
