"""Check that trials of random conversations hold what the engine drew, each token trained on once.

    python -m bench.system.captured_tokens --name captured_tokens       10,000 conversations

A conversation is a trial of two episodes with a tiny model and the embedded engine. A client calls
the policy over HTTP, as a user's program does, in up to six steps an episode, by OpenAI's chat
completions, OpenAI's responses, Anthropic's messages, or all three in turns. It goes on, calls
tools and sends their results, demands regular expressions and JSON schemas, uses `n` and stop
texts, repeats calls, makes two calls at once behind one answer, begins sub-conversations, forges
answers of the policy, writes the text of special tokens, and leaves before its answer
(`tests/helpers/random_clients.py`). Half of the answers are streamed. The four forms of memory
(`MEMORIES`) take turns.

Every token that the engine drew is compared with the trial's in id, log-prob and restriction, and
every token of the learner's training sequences with the drawn ones; all tokens before it have to be
equal too.

The exit status is 1 if a token differs, is not trained on or twice, if a turn is one that the
engine did not draw, an answer is lost or reads otherwise for its client, or a call behind an answer
of the policy does not continue its tokens.
"""

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.assembly import trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.inference.chat_files import load_chat
from mage_async.learning.packing import training_sequences
from mage_async.policy.initial_policy import prepare_policy
from mage_async.trajectory import Group, Task
from mage_services.actor.rollout import Stage, play_trial
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.environments.call_runner import CallRunner
from tests.helpers.agent_site import Drawn
from tests.helpers.random_clients import SETTINGS, Found, Seen, Step, clients, steps_of

MEMORIES = (
    ("trial.memory=history",),
    ("trial.memory=history_and_reflection",),
    ("trial.memory=none",),
    ("trial.memory=notes", "trial.room=600"),  # too little room for many conversations
)
"""Settings of each form of memory between the episodes of a trial."""


EPISODES = 2
"""Episodes of a trial."""


async def play(
    folder: Path, configs: list[Config], numbers: range, seed: int, at_once: int
) -> tuple[Found, Seen]:
    """Play the conversations of some numbers, and check each one behind its end."""
    found, seen = Found(), defaultdict[int, Seen](Seen)
    chat, free_places = load_chat(folder), asyncio.Semaphore(at_once)

    def steps(task: int, episode: int) -> list[Step]:
        return steps_of(Random(f"{seed} {task} {episode}"))

    environment = clients(steps, seen, num_tasks=max(8, numbers.stop))
    trial_configs = [trial_config_of(each, environment, chat, EPISODES) for each in configs]

    async def converse(number: int, embedded: EmbeddedEngine, workers: CallRunner) -> None:
        engine, which = Drawn(embedded), number % len(configs)
        async with free_places:
            stage = Stage(environment, trial_configs[which], chat, embedded, workers)
            run = stage.begin(Task("own", str(number), number), 0, f"{number}.0")
            trial = await play_trial(run, engine, workers)
        sequences = training_sequences([Group(0, 0, (trial,))], configs[which], "cpu", version=0)
        found.check(trial, engine.completions, sequences, seen[number], chat)

    async with (
        EmbeddedEngine(folder, configs[0].engine) as embedded,
        CallRunner(EnvironmentConfig(step_deadline_s=600.0)) as workers,
        asyncio.TaskGroup() as tasks,
    ):
        for number in numbers:
            tasks.create_task(converse(number, embedded, workers))
    return found, sum_of(seen)


def sum_of(seen: dict[int, Seen]) -> Seen:
    """Add up what the clients of all trials have seen."""
    total = Seen()
    for each in seen.values():
        total.calls += each.calls
        total.refused += each.refused
        total.num_answers += each.num_answers
        total.num_behind += each.num_behind
        total.num_gone += each.num_gone
    return total


def figures_of(found: Found, seen: Seen) -> dict[str, Any]:
    """Return the counts under the names of the baseline."""
    return {
        "conversations": found.num_trials,
        "calls": dict(sorted(seen.calls.items())),
        "calls_left_by_their_client": seen.num_gone,
        "answers": seen.num_answers,
        "answers_behind_an_answer": seen.num_behind,
        "refused": dict(seen.refused),
        "turns": found.num_turns,
        "turns_of_notes_and_reflections": found.num_notes,
        "sequences": found.num_segments,
        "tokens_compared": found.num_tokens,
        "tokens_without_an_alternative": found.num_forced,
        "tokens_nobody_read": found.num_unread,
        "faults": found.faults(),
    }


def main() -> None:
    """Measure, print and judge."""
    parser = option_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=10_000, help="(10000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (0)")
    parser.add_argument("--at-once", type=int, default=64, help="at the same time (64)")
    parser.add_argument("--seed", type=int, default=0, help="of all conversations (0)")
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(given.first, given.first + given.conversations)
    configs = [config_file.load(config_file.find(None), [*SETTINGS, *each]) for each in MEMORIES]
    began, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        prepare_policy(configs[0], policy, lambda progress: None)
        found, seen = asyncio.run(play(policy, configs, numbers, given.seed, given.at_once))
    figures = figures_of(found, seen)
    for key, value in figures.items():
        print(f"{key:32} {value}")
    seconds = {
        "wall_s": round(time.perf_counter() - began, 1),
        "processor_s": round(time.process_time() - used, 1),
    }
    print(seconds)
    if given.name:
        write_baseline(given.name, figures | seconds)
    missed = [f"{name}: {number}" for name, number in found.faults().items() if number]
    print(f"missed: {'; '.join(missed)}" if missed else "no token differs")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
