"""Load `reasoning-gym:DATASET`: an episode is one question of a dataset, scored by the dataset.

A task is an index of the dataset. `reset` and `step` are coroutines although they never wait:
plain methods would run in several threads, and some datasets draw from the global random state.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mage_async.environments.environment import HELDOUT_EVERY, check_whole
from mage_async.environments.loaders.loader import (
    IsolatedRandomState,
    NumberedTasks,
    episode_class,
    library,
)
from mage_async.environments.user_calls import as_config_error
from mage_async.errors import ConfigError


class Episode(NumberedTasks):
    """Ask one question of a dataset, and score the answer."""

    dataset: Any
    """Dataset of the library."""

    async def reset(self, seed: int, task: int) -> str:
        """Return the question of a task; `seed` is unused, because a task has one question."""
        self._random_state = IsolatedRandomState(task)
        with self._random_state:
            self._entry = self.dataset[task]
        return str(self._entry["question"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Score an answer, from 0 to 1, and end the episode."""
        with self._random_state:
            score = float(self.dataset.score_answer(action, self._entry))
        return f"Score: {score:.2f}", score, True


def load(
    dataset: str,
    /,
    *,
    size: int = 1280,
    seed: int = 0,
    rules: str = "Answer the question. An answer is scored from 0 to 1.",
    config: Mapping[str, Any] | None = None,
) -> type:
    """Return an environment class whose episodes are questions of a dataset.

    Args:
        dataset: Name of a dataset in reasoning-gym, such as `chain_sum`.
        size: Number of questions, in both splits together.
        seed: Seed of the dataset.
        rules: Rules in words, for the prompt.
        config: Configuration keys of the dataset, such as `min_terms`, without `size` and `seed`.

    Raises:
        ConfigError: there is no such dataset, an option is out of its range, the dataset's
            configuration is refused, or the library is missing.
    """
    name = f"reasoning-gym:{dataset}"
    library("reasoning_gym", "reasoning-gym")
    check_whole(name, "size", size, HELDOUT_EVERY, 10_000_000)  # at least one is held out
    check_whole(name, "seed", seed, 0, 2**31)
    own = dict(config or {})
    # A size in `config` would replace the checked one, and differ from the number of tasks.
    if doubled := sorted({"size", "seed"} & own.keys()):
        raise ConfigError(
            f"environment {name!r}: `config` has the key {doubled[0]!r}: give it as the option "
            f"`environment.options.{doubled[0]}` instead"
        )
    options = {"size": size, "seed": seed, **own}
    return episode_class(
        Episode,
        name,
        max_turns=1,
        dataset=_dataset(name, dataset, options),
        num_tasks=size,
        rules=rules,
        min_return=0.0,
        max_return=1.0,
        wins_above=0.99,  # only the full score is a win
    )


def _dataset(name: str, dataset: str, config: Mapping[str, Any]) -> Any:
    """Create a dataset of the library, after a check of its name and its configuration keys."""
    factory = library("reasoning_gym.factory", "reasoning-gym")
    if dataset not in factory.DATASETS:
        known = ", ".join(sorted(factory.DATASETS))
        raise ConfigError(
            f"environment {name!r}: reasoning-gym has no such dataset; it has {known}"
        )
    # The library registers a dataset as a pair: its class, and the dataclass of its configuration.
    keys = [field.name for field in fields(factory.DATASETS[dataset][1])]
    if unknown := sorted(set(config) - set(keys)):
        raise ConfigError(
            f"environment {name!r}: `config` has the unknown key {unknown[0]!r}; the dataset's "
            f"keys: {', '.join(keys)}"
        )
    with as_config_error(name), IsolatedRandomState(0):
        return factory.create_dataset(dataset, **config)
