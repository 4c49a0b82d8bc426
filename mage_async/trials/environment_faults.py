"""What an environment does wrong, in a sentence that names it: its code is other people's."""

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager

from mage_async.environments.environment import Outcome, fault_of_text
from mage_async.environments.hosted.info import MAX_INFO_CHARS
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task


@contextmanager
def environment_speaking(task: Task, turn: str = "") -> Iterator[None]:
    """Environments are other people's code: whatever they raise is their fault, named, and costs
    one group.

    Args:
        turn: the episode and turn, where they are known.
    """
    try:
        yield
    except Exception as error:  # the border to foreign code
        where = place_of(task) + turn
        raise EnvironmentFault(f"{where}: raised {type(error).__name__}: {error}") from error


def place_of(task: Task) -> str:
    """The beginning of a sentence about a task."""
    return f"{task.environment} against {task.member!r}, seed {task.seed}"


def fault_of(outcome: Outcome) -> str | None:
    """Why an outcome can be neither said nor trained on; None: it can."""
    reward: object = outcome.reward
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return f"must return a finite reward, got {reward!r:.60}"
    if len(outcome.info) > MAX_INFO_CHARS:
        return f"gave {len(outcome.info):,} characters of info: at most {MAX_INFO_CHARS:,} fit"
    return fault_of_text(outcome.observation)
