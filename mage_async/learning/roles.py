"""Two roles of one policy, each a low-rank adapter of its own.

Both adapters take part in every forward, but each acts on the tokens of its own role only: the
output of its down-projection is multiplied by 1 or 0 for each token. A token reads the keys and
values of all earlier tokens, whichever adapter computed them, so the KV cache of a context stays
valid when the role changes.

The second role's tokens attend to tokens of the first role, so their loss also has a gradient with
respect to the first role's adapter. `backward` leaves that part out: each adapter gets the gradient
of its own tokens only, so no loss of one role changes the other.

Shapes: `T` tokens of a row, `N` sampled tokens, `D` hidden.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mage_async.learning.adapters import adapted_layers


@dataclass(slots=True)
class Routing:
    """The role of each token in the model's latest forward."""

    is_second_role: torch.Tensor | None = None
    """bool [T]: True for tokens of the second role; None: all tokens are the first role's."""

    def masked(self, role: int, values: torch.Tensor) -> torch.Tensor:
        """Set the values of the other role's tokens to 0: [..., T, any]."""
        if self.is_second_role is None:
            return values if role == 0 else torch.zeros_like(values)
        is_role = self.is_second_role if role == 1 else ~self.is_second_role
        return values * is_role[:, None].to(values.dtype)


def route(model: nn.Module) -> None:
    """Make each of the model's two adapters act on the tokens of its role only, in place."""
    routing = Routing()
    model.routing = routing  # type: ignore[assignment]  # torch declares tensors and modules only
    for layer in adapted_layers(model).values():
        for role, down in enumerate(layer.lora_A.values()):
            down.register_forward_hook(partial(_mask_output, routing, role))


def has_roles(model: nn.Module) -> bool:
    """Return whether the model has one adapter for each of two roles."""
    return isinstance(getattr(model, "routing", None), Routing)


def give_roles(model: nn.Module, is_second_role: torch.Tensor | None) -> None:
    """Set the roles of the next forward's tokens; a model without roles is left alone.

    The roles stay set for activation checkpointing, which repeats the forward in the backward pass.

    Args:
        is_second_role: bool [T]; None: all tokens are the first role's.
    """
    routing = getattr(model, "routing", None)
    if isinstance(routing, Routing):
        routing.is_second_role = is_second_role


def backward(
    model: nn.Module, loss: torch.Tensor, hidden: torch.Tensor, is_second_role: torch.Tensor | None
) -> None:
    """Run the backward pass; with roles, give each adapter the gradient of its own tokens only.

    Args:
        hidden: [N, D], from the model's latest forward; the loss must be a function of it.
        is_second_role: bool [N]; None: all tokens are the first role's.
    """
    if not has_roles(model):
        loss.backward()
        return
    (gradient,) = torch.autograd.grad(loss, hidden)
    routing = Routing(is_second_role)
    # A role without a token gets no gradient, not one of zeros, so that the optimizer leaves its
    # adapter as it is.
    roles = _present_roles(is_second_role)
    for role in roles:
        role_gradient, weights = routing.masked(role, gradient), _adapter(model, role)
        # The pass of the last role frees the graph.
        is_last = role == roles[-1]
        torch.autograd.backward(hidden, role_gradient, inputs=weights, retain_graph=not is_last)


def _present_roles(is_second_role: torch.Tensor | None) -> list[int]:
    """Return the roles that have a token: 0, 1, or both."""
    if is_second_role is None:
        return [0]
    return [role for role in (0, 1) if bool((is_second_role == bool(role)).any())]


def _adapter(model: nn.Module, role: int) -> list[torch.Tensor]:
    """Return the weights of a role's adapter in all layers."""
    layers = adapted_layers(model).values()
    return [
        list(part.values())[role].weight
        for layer in layers
        for part in (layer.lora_A, layer.lora_B)
    ]


def _mask_output(
    routing: Routing, role: int, layer: nn.Module, args: object, out: torch.Tensor
) -> torch.Tensor:
    """Forward hook of a down-projection: set its output to 0 at the other role's tokens."""
    return routing.masked(role, out)
