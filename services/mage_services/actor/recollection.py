"""What evaluated trials are told of the graph memory: the strategies that a version remembered.

The learner writes a line a version before it announces the version, so whoever evaluates reads what
belongs to the weights.
"""

from collections.abc import Callable

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.graph_memory.listing import scores_in
from mage_async.graph_memory.memory import GraphMemory
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_async.trajectory import Guidance, Task

Recall = Callable[[Task], Guidance | None]


def told_nothing(task: Task) -> None:
    """Of no earlier task."""


def recall_of(run: RunDirectory, config: Config, version: int) -> Recall:
    """What the trials of an evaluation of a version are told."""
    lines = [line for line in read_lines(run.memory) if line["version"] == version]
    if not lines:
        return told_nothing
    memory = GraphMemory(config, environment_of(config))
    return lambda task: memory.best(task, scores_in(lines[-1], memory.query(task)), version)
