"""Which kind of trial a task asks for, by its member."""

from mage_async.environments.environment import Environment
from mage_async.tasks.population import version_of
from mage_async.tasks.seats import num_seats
from mage_async.trajectory import Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels.rival import DuelRun
from mage_async.trials.duels.two_memories import TwoMemoriesRun
from mage_async.trials.trial_rules import TrialRules
from mage_async.trials.trial_run import TrialRun

Run = TrialRun | DuelRun | TwoMemoriesRun


def begin_trial(
    environment: Environment,
    task: Task,
    index: int,
    rules: TrialRules,
    chat: ChatFormat,
    *,
    name: str,
    swap: Task | None = None,
) -> Run:
    """A trial about to be played; a duel where its member is a version of the policy, or the policy
    in both seats.
    """
    version = version_of(task.member)
    if num_seats(task.member) == 1 and version is None:
        return TrialRun(environment, task, index, rules, chat, name=name, swap=swap)
    if version is None or rules.rivals_remember:
        return TwoMemoriesRun(environment, task, index, rules, chat, name=name, version=version)
    return DuelRun(environment, task, index, rules, chat, name=name, version=version)


def trials_of(run: Run, duration_s: float = 0.0) -> tuple[Trial, ...]:
    """The trials of a run that is over, in order of index: one, or one of each seat."""
    across = run.trial_across(duration_s) if isinstance(run, TwoMemoriesRun) else None
    return (run.trial(duration_s), *(() if across is None else (across,)))


def settle(run: Run) -> None:
    """Make the calls that a run waits for, one after another, where nothing else goes on.

    Raises:
        EnvironmentFault: as `Call.now`.
    """
    while (call := run.next_call()) is not None:
        run.answer(call.now())
