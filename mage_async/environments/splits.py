"""Divide the task variants of a shipped game into two splits, trained on and held out.

A user's class divides its own tasks (`members` in `user_class.py`), and so do the loaders
(`NumberedTasks` in `loaders/loader.py`). Two splits of any environment that share a name are
refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from mage_async.environments.environment import Split
from mage_async.errors import ConfigError

HELDOUT_EVERY = 4
"""Number of task variants, or of tasks of another library, of which one is held out."""
V = TypeVar("V")
"""Type of what a game hides, such as a code or an opponent."""
Splits = Mapping[Split, Mapping[str, V]]
"""For each split, its task variants by name."""


def hold_out(variants: Mapping[str, V]) -> Splits[V]:
    """Divide task variants into the two splits; the first quarter is held out."""
    items = list(variants.items())
    num_heldout = len(items) // HELDOUT_EVERY
    return {"train": dict(items[num_heldout:]), "heldout": dict(items[:num_heldout])}


def split_by(variants: Mapping[str, V], is_heldout: Callable[[V], object]) -> Splits[V]:
    """Divide task variants into the two splits by a predicate."""
    heldout = {name: hidden for name, hidden in variants.items() if is_heldout(hidden)}
    train = {name: hidden for name, hidden in variants.items() if name not in heldout}
    return {"train": train, "heldout": heldout}


def named(names: Iterable[str]) -> dict[str, str]:
    """Return task variants that are nothing but their name, from which a game derives the rest."""
    return {name: name for name in names}


def numbered(noun: str, count: int) -> Splits[str]:
    """Return the splits of variants that are generated from their name, such as `maze-0`."""
    return hold_out(named(f"{noun}-{number}" for number in range(count)))


def check_disjoint(name: str, train: Sequence[str], heldout: Sequence[str]) -> None:
    """Check that the two splits of an environment share no task variant.

    Raises:
        ConfigError: they do; with the name of one.
    """
    if shared := set(train) & set(heldout):
        raise ConfigError(
            f"{name}: {min(shared)!r} cannot be trained on and held out: let `members(split)` "
            "return other names for each split"
        )
