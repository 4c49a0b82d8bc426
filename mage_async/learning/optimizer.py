"""Make AdamW, its decays, its schedules of learning rate and entropy bonus, and float32 masters.

In bfloat16 an update below 1/256 of a weight is rounded away, and at learning rates of 1e-6 nearly
all are. The optimizer therefore updates a float32 copy of each trained weight, its master, which is
rounded into the model after every update. A micro-batch's gradient has the model's dtype; the
gradients of several micro-batches are added in float32, at the masters.

FSDP2's `MixedPrecisionPolicy` computes the same by keeping float32 weights and rounding them before
every forward. Here the model itself holds the rounded weights, which are published and compared bit
by bit with the engine's, and only the optimizer reads the masters. That also works with activation
checkpointing, adapters and `hidden_states`, which does not call the root module.

An update whose gradient is not finite is skipped (`step_if_finite`), in training and in a warm
start. In training it is counted (`skipped_updates`) and reported by the doctor (`not_finite`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mage_async.config.schema import Learner, check_installed
from mage_async.errors import RunError

MASTERS_KEY = "masters"
"""Key of the masters in the state of a checkpoint."""
BETA1 = 0.9
"""AdamW's decay of the first moment."""


def optimizer_of(
    trained: Sequence[torch.Tensor], learner: Learner, device: torch.device
) -> torch.optim.Optimizer:
    """Make the configured optimizer for weights on a device; `set_decays` sets its decays.

    Raises:
        ConfigError: torchao, which has 8-bit moments, is not installed.
    """
    if learner.optimizer_state == "8bit":
        return _in_8_bits(trained, learner, device)
    # None lets torch choose. The fused step of CUDA has never been run here.
    is_fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(trained, lr=learner.learning_rate, fused=is_fused)


def entropy_coefficient(learner: Learner, version: int) -> float:
    """Return the coefficient of the entropy bonus in a step; it changes linearly over the run."""
    return learner.entropy + (learner.final_entropy - learner.entropy) * _progress(learner, version)


def learning_rate(learner: Learner, version: int) -> float:
    """Return the learning rate of a step: linear warm-up, then linear from start to end.

    The correction `vcpo` lowers it further (`Vcpo.variance_controls`).
    """
    start, end = learner.learning_rate, learner.final_learning_rate
    warm = min(1.0, (version + 1) / max(1, learner.warmup_steps))
    return warm * (start + (end - start) * _progress(learner, version))


def _progress(learner: Learner, version: int) -> float:
    """Return the share of the run that is done: 0 in the first step, 1 after the last."""
    # If the share were 1 in the last step, a learning rate that falls to 0 would be 0 there, and
    # the step would change nothing.
    return min(1.0, version / max(1, learner.steps))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; torchao keeps it in a tensor, for its compiled step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def set_decays(optimizer: torch.optim.Optimizer, beta2: float, weight_decay: float) -> None:
    """Set the decays of both moments, and the weight decay, which applies to every weight, norms
    and biases too.

    Args:
        beta2: Decay of the second moment; that of the first is `BETA1`.
    """
    for group in optimizer.param_groups:
        group["betas"] = (BETA1, beta2)
        group["weight_decay"] = weight_decay


def step_if_finite(
    optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor], largest: float
) -> torch.Tensor:
    """Clip the gradient of weights to a norm of `largest`, take an optimizer step, and return the
    norm before clipping, over all ranks: [].

    Weights and optimizer stay as they are if the norm is infinite or NaN: one such step would make
    all weights NaN, and the run would be lost.
    """
    norm = get_total_norm([each.grad for each in weights if each.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if norm.isfinite():  # on ranks too: the norm is the same on all of them
        clip_grads_with_norm_(weights, largest, norm)
        optimizer.step()
    return norm


def _in_8_bits(
    trained: Sequence[torch.Tensor], learner: Learner, device: torch.device
) -> torch.optim.Optimizer:
    """Make torchao's AdamW with 8-bit moments (Dettmers et al. 2021, arXiv 2110.02861).

    Blocks of 256 moments share a scale. A tensor with fewer than 4,096 weights, or whose size is no
    multiple of 256, keeps full moments.
    """
    check_installed(learner)
    from torchao.optim import AdamW8bit

    optimizer: Any = AdamW8bit(trained, lr=learner.learning_rate)
    if device.type == "cpu":  # torchao compiles its step, which needs a C++ compiler on a CPU
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    made: torch.optim.Optimizer = optimizer
    return made


class Masters:
    """Keep a float32 copy, the master, of each trained weight of 16 bits. The optimizer updates the
    master instead of the weight; other weights it updates directly.

    Args:
        is_on: make masters; otherwise the optimizer updates all weights directly.
    """

    def __init__(self, model: nn.Module, *, is_on: bool) -> None:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        halves = [each for each in weights if is_on and each.itemsize == 2]
        self._pairs = [(each, nn.Parameter(each.detach().float())) for each in halves]
        """Each weight of 16 bits with its master; empty without masters."""
        masters = dict(self._pairs)
        self.trained = [masters.get(weight, weight) for weight in weights]
        """The tensors that the optimizer updates, in the order of the model's weights."""
        # After every backward pass, the gradient of such a weight goes to its master.
        for weight, _ in self._pairs:
            weight.register_post_accumulate_grad_hook(
                lambda each: _move_gradient(each, masters[each])
            )

    @torch.no_grad()
    def write(self) -> None:
        """Copy the masters into the model, rounded."""
        for weight, master in self._pairs:
            weight.copy_(master)

    def tensors(self) -> list[torch.Tensor]:
        """Return the masters, without the weights that have none."""
        return [master.data for _, master in self._pairs]

    def state(self) -> dict[str, Any]:
        """Return the masters for a checkpoint; an empty state without masters."""
        return {MASTERS_KEY: self.tensors()} if self._pairs else {}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned.

        Raises:
            RunError: either the checkpoint or this run has masters, but not both.
        """
        kept = state.get(MASTERS_KEY, [])
        if len(kept) != len(self._pairs):
            raise RunError(
                f"the checkpoint has {len(kept)} float32 masters, the model {len(self._pairs)}: "
                "leave learner.float32_masters as it was"
            )
        for (_, master), values in zip(self._pairs, kept, strict=True):
            master.copy_(values)


@torch.no_grad()
def _move_gradient(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Add a weight's gradient to its master's, and free it."""
    assert weight.grad is not None, "the hook runs after a gradient has been accumulated"
    gradient, weight.grad = weight.grad.to(torch.float32), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
