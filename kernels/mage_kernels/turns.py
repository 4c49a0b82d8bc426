"""How turns lie in a batch: their trials, discounts, keys of comparison and tokens.

Made once per batch on the host, where the packing is made; everything after it stays on the device.

Shapes: `N` turns, `K` keys, `T` tokens.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

COPIES, SAME_EPISODE, NEXT_EPISODE = 0, 1, 2
"""What a turn's return is: that of the next acting turn (a reflection's), or its reward plus that
return, discounted within the episode or across to the next.
"""


def dense_keys(keys: Iterable[Hashable]) -> Tensor:
    """Number any keys, as `("rps", opponent, seat)`, from 0 by first appearance: int64 `[N]`."""
    keys = list(keys)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor(list(map(numbers.__getitem__, keys)), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """int64 `[N]` each, unless said otherwise."""

    step: Tensor
    """int8: COPIES, SAME_EPISODE or NEXT_EPISODE"""
    trial_stops: Tensor
    """One past the last turn of each turn's trial."""
    keys: Tensor
    members: Tensor
    """Turns in order of their key."""
    key_starts: Tensor
    """`[K + 1]`: key k's turns are `members[key_starts[k]:key_starts[k + 1]]`."""
    starts: Tensor
    stops: Tensor
    num_tokens: int

    @classmethod
    def of(
        cls,
        *,
        trials: Tensor,
        episodes: Tensor,
        is_reflection: Tensor,
        keys: Tensor,
        starts: Tensor,
        stops: Tensor,
        num_tokens: int,
    ) -> "TurnLayout":
        """From what is known of each turn, in order of play, trial after trial.

        Args:
            trials: int64 `[N]`: equal for the turns of one trial, which are contiguous.
            episodes: int64 `[N]`: the episode of each turn.
            is_reflection: bool `[N]`.
            keys: int64 `[N]` from 0 (see `dense_keys`): turns of equal key are compared.
            starts, stops: int64 `[N]`: the tokens of each turn, ascending and disjoint.
            num_tokens: `T`.
        """
        edges = torch.stack([starts, stops], 1).flatten()
        if len(edges) and not (
            edges[0] >= 0 and edges.diff().min() >= 0 and edges[-1] <= num_tokens
        ):
            raise ValueError(f"turns must be ascending, disjoint stretches of {num_tokens} tokens")
        lengths = torch.unique_consecutive(trials, return_counts=True)[1]
        return cls(
            step=_steps(episodes, is_reflection),
            trial_stops=lengths.cumsum(0).repeat_interleave(lengths),
            **_comparison(keys),
            starts=starts.contiguous(),
            stops=stops.contiguous(),
            num_tokens=num_tokens,
        )

    def with_keys(self, keys: Tensor) -> "TurnLayout":
        """The same turns, compared by other keys: GiGPO compares them twice."""
        return replace(self, **_comparison(keys))

    def to(self, device: torch.device | str) -> "TurnLayout":
        """The same on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "num_tokens"}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


def _comparison(keys: Tensor) -> dict[str, Tensor]:
    """Which turns are compared, from dense keys."""
    if len(keys) and keys.min() < 0:
        raise ValueError(f"keys must count from 0, got {int(keys.min())}: see dense_keys")
    return {
        "keys": keys.contiguous(),
        "members": keys.argsort(stable=True),
        "key_starts": torch.nn.functional.pad(torch.bincount(keys).cumsum(0), (1, 0)),
    }


def _steps(episodes: Tensor, is_reflection: Tensor) -> Tensor:
    """How each turn's return follows from the next acting one's; at a trial's end that is 0."""
    acting = (~is_reflection).nonzero().squeeze(1)
    following = episodes[acting].roll(-1)
    step = torch.full_like(episodes, COPIES, dtype=torch.int8)
    is_same = following == episodes[acting]
    step[acting] = torch.where(is_same, SAME_EPISODE, NEXT_EPISODE).to(torch.int8)
    return step
