"""Groups in which the policy plays both seats: their trials come in pairs, and each is trained on.

The trial of an even index has the task's seat, the next one is the same play from the other seat.
"""

from mage_async.tasks.population import ITSELF
from mage_async.trajectory import Task


def num_seats(member: str) -> int:
    """How many seats of a group's trials are the policy's: 2 where its member is the policy."""
    return 2 if member == ITSELF else 1


def plays(task: Task, num_trials: int) -> range:
    """Indices of the trials that begin a play each, where a group has so many trials."""
    return range(0, num_trials, num_seats(task.member))


def task_of(task: Task, index: int) -> Task:
    """The task of a group as one of its trials has it."""
    return task.across() if index % num_seats(task.member) else task
