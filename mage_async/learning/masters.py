"""float32 masters behind a model that computes in 16 bits.

In bfloat16 an update below 1/256 of a weight is rounded away, and at rates of 1e-6 nearly all are.
The optimizer therefore changes a float32 copy of each trained weight, its master, and the copy is
rounded into the model after every update. A pass leaves its gradient in the model's type; the
gradients of passes add up in float32, at the masters.

FSDP2's `MixedPrecisionPolicy` computes the same with the copies the other way round: it keeps
float32 and rounds before every forward. Here the model is what is published and compared with the
engine, bit by bit, and nothing but the optimizer knows of masters; it works under activation
checkpointing, adapters and `hidden_states`, which calls no root module.
"""

from typing import Any

import torch
from torch import nn

from mage_async.errors import RunError

KEY = "masters"


class Masters:
    """What the optimizer changes: masters where a trained weight has 16 bits, else the weight.

    Args:
        is_on: make masters; without, every trained weight is its own.
    """

    def __init__(self, model: nn.Module, *, is_on: bool) -> None:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._pairs = [(each, _master(each)) for each in weights if is_on and each.itemsize == 2]
        masters = dict(self._pairs)
        self.trained = [masters.get(weight, weight) for weight in weights]
        for weight, _ in self._pairs:
            weight.register_post_accumulate_grad_hook(lambda each: _hand_on(each, masters[each]))

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the model."""
        for weight, master in self._pairs:
            weight.copy_(master)

    def tensors(self) -> list[torch.Tensor]:
        """The masters that are not the model's own weights."""
        return [master.data for _, master in self._pairs]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: nothing where there are no masters."""
        return {KEY: self.tensors()} if self._pairs else {}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave.

        Raises:
            RunError: the checkpoint has masters and this run has none, or the other way round.
        """
        kept = state.get(KEY, [])
        if len(kept) != len(self._pairs):
            raise RunError(
                f"the checkpoint has {len(kept)} float32 masters, the model {len(self._pairs)}: "
                "leave learner.float32_masters as it was"
            )
        for (_, master), values in zip(self._pairs, kept, strict=True):
            master.copy_(values)


def _master(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(torch.float32))


@torch.no_grad()
def _hand_on(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Add a pass's gradient to the master's."""
    assert weight.grad is not None, "this is called when a gradient has been accumulated"
    gradient, weight.grad = weight.grad.to(torch.float32), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
