"""Two roles of one policy: an explorer and an exploiter, each a low-rank adapter of its own.

Both adapters are there in every forward, and each counts at the tokens of its own role alone: what
the small matrix of an adapter gives is multiplied by 1 or 0 by token. A token is computed by one
adapter and reads the keys and values of all before it, whoever computed them, so a context grows
over both roles without being computed again.

The exploiter reads keys of the explorer, so a loss of its tokens has a gradient on the explorer's
adapter too. That part is left out: each adapter follows the losses of its own tokens and no other,
as MetaCURE (arXiv 2006.08170) lets neither policy's loss reach what the two share.

Shapes: `T` tokens of a row, `N` sampled tokens, `D` hidden.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mage_async.learning.adapters import EXPLOIT, EXPLORE, ROLES, adapted_layers


@dataclass(slots=True)
class Routing:
    """Whose the tokens of the model's last forward are."""

    exploits: torch.Tensor | None = None
    """bool [T]; None: the explorer's, all of them"""

    def share(self, role: str, small: torch.Tensor) -> torch.Tensor:
        """An adapter's product [1, T, rank] at the tokens of its role, and 0 at others."""
        if self.exploits is None:
            return small if role == EXPLORE else torch.zeros_like(small)
        own = self.exploits if role == EXPLOIT else ~self.exploits
        return small * own[:, None].to(small.dtype)


def route(model: nn.Module) -> None:
    """Have each of a model's two adapters count at the tokens of its role alone, in place."""
    model.routing = Routing()
    for layer in adapted_layers(model).values():
        for role, down in layer.lora_A.items():
            down.register_forward_hook(partial(_shared, model.routing, role))


def has_roles(model: nn.Module) -> bool:
    """Whether a model's adapters are an explorer's and an exploiter's."""
    return isinstance(getattr(model, "routing", None), Routing)


def give_roles(model: nn.Module, exploits: torch.Tensor | None) -> None:
    """Say whose the tokens of the next forward are, where the model has roles; the same holds when
    checkpointed activations are computed again.

    Args:
        exploits: bool [T]; None: the explorer's, all of them.
    """
    if has_roles(model):
        model.routing.exploits = exploits


def backward(
    model: nn.Module, loss: torch.Tensor, hidden: torch.Tensor, exploits: torch.Tensor | None
) -> None:
    """Add a loss's gradient; of a model with roles, to each adapter that of its own tokens alone.

    Args:
        hidden: [N, D], from the model's last forward; what the loss is made of.
        exploits: bool [N]; None: the explorer's, all of them.
    """
    if not has_roles(model):
        loss.backward()
        return
    (gradient,) = torch.autograd.grad(loss, hidden)
    routing = Routing(exploits)
    for role in ROLES:
        own, weights = routing.share(role, gradient), _adapter(model, role)
        torch.autograd.backward(hidden, own, inputs=weights, retain_graph=role != ROLES[-1])


def _adapter(model: nn.Module, role: str) -> list[nn.Parameter]:
    layers = adapted_layers(model).values()
    return [part[role].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]


def _shared(
    routing: Routing, role: str, layer: nn.Module, given: object, small: torch.Tensor
) -> torch.Tensor:
    return routing.share(role, small)
