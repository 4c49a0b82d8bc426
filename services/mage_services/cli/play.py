"""A person plays a run's environment, or watches its agent: what `mage play` becomes."""

import argparse
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import uvloop

from mage_async.assembly import environment_of, rules_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.environments.environment import Environment
from mage_async.errors import MageError, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.play import add_options
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.population import name_of, version_of
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duel_run import RivalSide
from mage_async.trials.human_play import HumanPlay, human_play, shown
from mage_services.actor.rollout import Stage, play_trial
from mage_services.cli.evaluate import newest
from mage_services.engines.choice import make_engine
from mage_services.weights.weight_transport import WeightFiles

Ask = Callable[[str], str]


def main() -> None:
    """Play one trial, and print what came out."""
    parser = argparse.ArgumentParser(description="Play a run's environment.")
    parser.add_argument("run_dir", type=Path)
    add_options(parser)
    given = parser.parse_args()
    run = RunDirectory(given.run_dir.resolve())
    try:
        _main(run, given)
    except* MageError as group:
        sys.exit(f"mage play: {group.exceptions[0]}")
    except* (KeyboardInterrupt, EOFError):
        sys.exit("\nmage play: left in the middle of a trial")


def _main(run: RunDirectory, given: argparse.Namespace) -> None:
    config = config_file.load_recorded(run.config)
    environment = environment_of(config)
    task = drawn_task(environment, given.member, given.seed)
    policy, version = newest(run)
    chat = load_chat(policy, thinking=config.transcript.thinking)
    rules = rules_of(config, environment, chat, given.episodes or config.trial.episodes)

    def make() -> Stage:
        return Stage(environment, rules, chat, make_engine(config, policy, "play"))

    ask = None if given.watch else heard
    ours, trial = uvloop.run(played(make, task, WeightFiles(run.weights), ask))
    print(f"\nthe agent (version {version}) on the same task, against {task.member}:")
    is_duel = version_of(task.member) is not None
    print(spoken(trial, chat) if given.watch and is_duel else told(trial))
    if ours:
        print(beside(ours, trial.episode_rewards()))


def drawn_task(environment: Environment, member: str | None, seed: int | None) -> Task:
    """A held-out task, or the one asked for; a seed decides what was not."""
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    source = random.Random(seed)
    chosen = member or source.choice(environment.members("heldout"))
    return Task(environment.facts.name, chosen, seed, source.choice(environment.seats()))


def heard(prompt: str) -> str:
    """As `input`. Ctrl-C leaves at once, where an event loop would wait for the line's end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, before)


async def at_the_table(
    play: HumanPlay, ask: Ask, complete: Callable[[Prompt], Awaitable[Completion]]
) -> list[float]:
    """Let a person play; the rewards of the episodes. Cancellation leaves nothing.

    Args:
        ask: shows a prompt and returns the line that was typed, as `input` does; nothing else goes
            on meanwhile.
        complete: draws what a version of the policy answers.
    """
    wanted = next(play)
    while True:
        try:
            if isinstance(wanted, Prompt):
                wanted = play.send(await complete(wanted))
            else:
                print(wanted.text)
                choices = wanted.choices
                wanted = play.send(ask(f"[{shown(choices)}] > ").strip() if choices else "")
        except StopIteration as end:
            return end.value


def told(trial: Trial) -> str:
    """What the agent did, an episode a line."""
    rewards = trial.episode_rewards()
    lines = []
    for episode in range(trial.num_played()):
        turns = [turn for turn in trial.turns if turn.episode == episode]
        acts = " ".join(turn.action or "?" for turn in turns if turn.kind is Kind.ACT)
        remarks = [f"   “{turn.action}”" for turn in turns if turn.kind is not Kind.ACT]
        lines += [f"episode {episode + 1}: {acts}   ({rewards[episode]:+g})", *remarks]
    return "\n".join(lines)


def beside(ours: list[float], theirs: list[float]) -> str:
    """The rewards of a person and of the agent, an episode a column."""
    rows = (("you", ours), ("agent", theirs))
    return "\n".join(
        f"{who:<6}" + "".join(f"{reward:>8.2f}" for reward in rewards) for who, rewards in rows
    )


async def played(
    make: Callable[[], Stage], task: Task, weights: WeightFiles, ask: Ask | None = None
) -> tuple[list[float], Trial]:
    """The rewards of a person, who plays first where there is one to `ask`; and the agent's trial
    on the same task. Cancellation abandons both.

    Raises:
        RunError: against a version whose weights the run has not kept.
    """
    version, stage, ours, meet = version_of(task.member), make(), list[float](), None
    environment, rules = stage.environment, stage.rules
    async with stage.engine as engine:
        if version is not None:
            if not (file := weights.file(version)).is_file():
                kept = ", ".join(map(name_of, weights.versions()))
                raise RunError(f"{file} is not there: the run has kept {kept}")
            await engine.hold(version, file)
            given = {"rules": rules, "chat": stage.chat, "name": "person", "version": version}
            meet = partial(RivalSide, environment, task, **given)
        if ask is not None:
            print(environment.rules())
            play = human_play(environment, task, rules.num_episodes, meet)
            ours = await at_the_table(play, ask, engine.complete)
        return ours, await play_trial(stage.begin(task, 0, "play"), engine)


def spoken(trial: Trial, chat: ChatFormat) -> str:
    """Every word that the agent was told or said, the opponent's moves among them."""
    said = [chat.decode(segment.tokens.tolist()) for segment in trial.segments]
    rewards = " ".join(f"{reward:+g}" for reward in trial.episode_rewards())
    return "\n".join((*said, f"rewards: {rewards}"))


if __name__ == "__main__":
    main()
