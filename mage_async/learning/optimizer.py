"""AdamW, its moments in the type of the weights or in 8 bits; float32 masters of 16-bit weights.

In bfloat16 an update below 1/256 of a weight is rounded away, and at rates of 1e-6 nearly all are.
The optimizer therefore changes a float32 copy of each trained weight, its master, and the copy is
rounded into the model after every update. A pass leaves its gradient in the model's type; the
gradients of passes add up in float32, at the masters.

FSDP2's `MixedPrecisionPolicy` computes the same with the copies the other way round: it keeps
float32 and rounds before every forward. Here the model is what is published and compared with the
engine, bit by bit, and nothing but the optimizer knows of masters; it works under activation
checkpointing, adapters and `hidden_states`, which calls no root module.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mage_async.config.schema import Learner
from mage_async.config.sections.learner import check_installed
from mage_async.errors import RunError

KEY = "masters"


def optimizer_of(
    trained: Sequence[torch.Tensor], rules: Learner, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that the rules ask for, on the device of the weights.

    Raises:
        ConfigError: the library of 8-bit moments is not installed.
    """
    if rules.optimizer_state == "8bit":
        return _in_8_bits(trained, rules, device)
    is_fused = True if device.type == "cuda" else None  # never run on a GPU
    return torch.optim.AdamW(trained, lr=rules.learning_rate, fused=is_fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next update have a rate; torchao keeps it in a tensor, which it compiles for."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _in_8_bits(
    trained: Sequence[torch.Tensor], rules: Learner, device: torch.device
) -> torch.optim.Optimizer:
    """torchao's: blocks of 256 moments share a scale (Dettmers et al. 2021, arXiv 2110.02861);
    tensors of fewer than 4,096 weights, or of broken blocks, keep theirs whole.
    """
    check_installed(rules)
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(trained, lr=rules.learning_rate)
    if device.type == "cpu":  # compiled, an update would need a C++ compiler
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


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
