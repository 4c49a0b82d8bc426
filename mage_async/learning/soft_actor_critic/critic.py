"""Two Q heads on the policy's last hidden state, and their slow copies.

A head reads the state that predicts an action's token, so it has seen what the policy has seen. It
gives a value to every action of the environment at once.

Shapes: `N` states, `D` hidden, `A` actions.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 2


class Critic(nn.Module):
    """The heads, their targets and their optimizer, all in float32.

    Args:
        hidden_size: D.
        num_actions: A.
        seed: draws the first weights, so that a replay begins with the same heads.
    """

    def __init__(
        self, hidden_size: int, num_actions: int, *, seed: int, device: torch.device
    ) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.heads = nn.ModuleList(
            _head(hidden_size, num_actions, source).to(device) for _ in range(HEADS)
        )
        self.slow = copy.deepcopy(self.heads).requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), weight_decay=0.0)

    def values(self, hidden: Tensor) -> Tensor:
        """Q of every action by each head: float32 [heads, N, A]."""
        return torch.stack([head(hidden.float()) for head in self.heads])

    @torch.no_grad()
    def target_values(self, hidden: Tensor) -> Tensor:
        """The smaller Q of the target heads: float32 [N, A]."""
        return torch.stack([head(hidden.float()) for head in self.slow]).amin(0)

    def update(self, rate: float, target_rate: float) -> None:
        """Take a step along the gradients that there are, and let the targets follow."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.heads.parameters(), strict=True):
                slow.lerp_(fast, target_rate)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"weights": self.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])


def _head(hidden_size: int, num_actions: int, source: torch.Generator) -> nn.Sequential:
    """An MLP whose values begin at 0."""
    inner = nn.utils.skip_init(nn.Linear, hidden_size, hidden_size)
    outer = nn.utils.skip_init(nn.Linear, hidden_size, num_actions)
    with torch.no_grad():
        inner.weight.normal_(0.0, hidden_size**-0.5, generator=source)
        for zero in (inner.bias, outer.weight, outer.bias):
            zero.zero_()
    return nn.Sequential(inner, nn.SiLU(), outer)
