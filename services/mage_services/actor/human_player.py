"""A person plays a trial in the agent's place, and the agent plays the same task."""

from collections.abc import Awaitable, Callable
from functools import partial

from mage_async.completion import Completion, Prompt
from mage_async.environments.calls import Call
from mage_async.environments.mix.parts import part_of
from mage_async.errors import RunError
from mage_async.tasks.population import name_of, version_of
from mage_async.trajectory import Task, Trial
from mage_async.trials.duels.rival import RivalSide
from mage_async.trials.human_play import HumanPlay, HumanPrompt, human_play
from mage_services.actor.rollout import Stage, play_trial
from mage_services.environments.workers import Workers
from mage_services.weights.weight_files import WeightFiles

Ask = Callable[[HumanPrompt], str]
"""Returns what the person answers, having shown what may be; nothing else goes on meanwhile."""
Tell = Callable[[str], None]
"""Shows the person a text."""


async def play_by_person(
    play: HumanPlay,
    ask: Ask,
    complete: Callable[[Prompt], Awaitable[Completion]],
    workers: Workers,
    tell: Tell = print,
) -> list[float]:
    """Let a person play; the rewards of the episodes. Cancellation leaves nothing.

    Args:
        complete: draws what a version of the policy answers.
        workers: make the calls of a slow environment.
    """
    wanted = next(play)
    while True:
        try:
            if isinstance(wanted, Call):
                wanted = play.send(await workers.perform(wanted))
            elif isinstance(wanted, Prompt):
                wanted = play.send(await complete(wanted))
            else:
                tell(wanted.text)
                wanted = play.send(ask(wanted).strip() if wanted.is_question else "")
        except StopIteration as end:
            return end.value


async def play_person_and_agent(
    make: Callable[[], Stage],
    task: Task,
    weights: WeightFiles,
    ask: Ask | None = None,
    tell: Tell = print,
) -> tuple[list[float], Trial]:
    """The rewards of a person, who plays first where there is one to `ask`; and the agent's trial
    on the same task. Cancellation abandons both.

    Raises:
        RunError: against a version whose weights the run has not kept.
    """
    version, stage, rewards, meet = version_of(task.member), make(), list[float](), None
    environment, rules = stage.environment, stage.rules
    async with stage.engine as engine, stage.workers:
        if version is not None:
            if not (file := weights.file(version)).is_file():
                kept = ", ".join(map(name_of, weights.versions()))
                raise RunError(f"{file} is not there: the run has kept {kept}")
            await engine.hold(version, file)
            given = {"rules": rules, "chat": stage.chat, "name": "person", "version": version}
            meet = partial(RivalSide, environment, task, **given)
        if ask is not None:
            tell(part_of(environment, task.member).rules())
            play = human_play(environment, task, rules.num_episodes, meet)
            rewards = await play_by_person(play, ask, engine.complete, stage.workers, tell)
        return rewards, await play_trial(stage.begin(task, 0, "play"), engine, stage.workers)
