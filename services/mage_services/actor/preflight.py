"""A look at a pretrained policy before a run's processes start, in a process of its own.

The supervisor imports no torch. The process that does loads the policy once, plays a few turns,
prints one line of JSON and ends, and its memory is free again before the run begins.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mage_async.config import config_file
from mage_async.config.policy_source import local_policy
from mage_async.config.schema import Config, Pretrained, Tiny
from mage_async.errors import DeterministicFailure, MageError
from mage_async.preflight.files import Contexts, check_files, check_outline
from mage_async.preflight.size import Size, check_size, tiny_size, with_deadlines
from mage_async.trials.duels.begin import Run
from mage_services.environments.workers import Workers
from mage_services.processes.hardware import check_gpu

MODULE = "mage_services.actor.preflight"


def look_at_policy(config: Config, num_actors: int, say: Callable[[str], None]) -> Config:
    """Refuse what cannot work, say what the policy answers, and raise deadlines it would not keep.

    Raises:
        ConfigError, PolicyError: the policy cannot be trained or served as configured.
        DeterministicFailure: the process that loads the policy found why not.
    """
    if isinstance(config.policy, Tiny):
        _check_size(config, tiny_size(config.policy), num_actors)
        return config
    assert isinstance(config.policy, Pretrained)
    directory = local_policy(config.policy.source)
    if directory is not None:  # what the files say needs no process
        _check(config, directory, num_actors)
    say("policy: loading it once, to play its first turns")
    seen = _played(config, num_actors)
    contexts = Contexts(**seen["contexts"])
    if contexts.longest > config.engine.max_tokens:
        say(
            f"policy: a trial may take up to {contexts.longest} tokens, more than "
            f"engine.max_tokens = {config.engine.max_tokens}: what outgrows that costs its group"
        )
    if "sentence" not in seen:
        return config
    turn_s = seen["turn_s"]
    say(f"policy: {seen['sentence']}")
    say(f"policy: a turn of {config.admission.trials_per_group} trials took {turn_s:.1f} s")
    config, notes = with_deadlines(config, turn_s=turn_s, num_turns=contexts.num_turns)
    for note in notes:
        say(f"policy: {note}")
    return config


def _check(config: Config, directory: Path, num_actors: int) -> Contexts:
    outline = check_outline(config, directory)
    _check_size(config, Size(outline.num_weights, outline.kv_token_bytes), num_actors)
    return check_files(config, directory)


def _check_size(config: Config, size: Size, num_actors: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    check_size(config, size, num_actors=num_actors, memory_bytes=memory)


def _played(config: Config, num_actors: int) -> dict:
    """What the process printed. Ctrl-C ends it, and this process."""
    environment = os.environ | {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(config.engine.threads),
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-m", MODULE, str(num_actors)],
            input=config_file.dump(config),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise DeterministicFailure(
            f"the policy could not be loaded to play its first turns: {reason}"
        )
    seen = json.loads(lines[-1])
    if "failed" in seen:
        raise DeterministicFailure(seen["failed"])
    return seen


def _look(config: Config, num_actors: int) -> dict:
    from mage_async.policy.prepare import source_directory
    from mage_async.preflight.first_turns import play_first_turns

    assert isinstance(config.policy, Pretrained), "a tiny policy is not looked at"
    if config.learner.device != "cpu":
        check_gpu(config, num_actors)
    directory = source_directory(config.policy.source)
    found: dict = {"contexts": asdict(_check(config, directory, num_actors))}
    with asyncio.Runner() as runner:
        workers = Workers.of(config.environment)

        def settle(run: Run) -> None:
            runner.run(_settle(run, workers))

        seen = play_first_turns(config, directory, time.monotonic, settle)
        runner.run(workers.close())
    if seen is not None:
        found |= {"sentence": seen.sentence(), "turn_s": seen.turn_s}
    return found


async def _settle(run: Run, workers: Workers) -> None:
    """Make the calls that a trial waits for."""
    while (call := run.next_call()) is not None:
        run.answer(await workers.perform(call))


def main() -> None:
    """Read a configuration from stdin, and print what was seen as the last line."""
    try:
        found = _look(config_file.loads(sys.stdin.read()), int(sys.argv[1]))
    except MageError as error:
        found = {"failed": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
