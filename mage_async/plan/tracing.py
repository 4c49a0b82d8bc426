"""What a step holds and computes, seen from below every operation of torch.

Tensors that depend on weights are FakeTensors, which have shapes and no values; indices are real,
because shapes depend on them. Where a step would read a fake value, it is given the one that needs
most: every row has a gradient.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, products: int) -> int:
    """Operations of `products` matrix products of [S, N, L, D] and [S, K, L', D], causal or not."""
    *rows, size = query.shape
    return 2 * products * math.prod(rows) * key.shape[2] * size


ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, *_, **__: _attention(query, key, 2)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda _, query, key, *__, **___: _attention(query, key, 5)
    ),
}
"""Operations of attention on a CPU, which torch's table of operations leaves out."""


@dataclass(slots=True)
class _Held:
    """A storage that lives."""

    part: str
    size: int


class Trace(TorchDispatchMode):
    """Bytes of all living tensors by part, and operations, while the mode is on.

    Args:
        vocabulary: what has a side of this length, and is nothing else, is of the head.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.flops = 0
        self.peak: Counter[str] = Counter()
        """Bytes by part, at the moment when they were most together."""
        self._vocabulary = vocabulary
        self._live: Counter[str] = Counter()
        self._total = self._most = 0
        self._held: weakref.WeakKeyDictionary[torch.UntypedStorage, _Held] = (
            weakref.WeakKeyDictionary()
        )

    def count(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """From here on, these tensors belong to a part."""
        for tensor in tensors:
            held = self._held[tensor.untyped_storage()]
            self._live[held.part] -= held.size
            self._live[part] += held.size
            held.part = part

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and look at what it made."""
        if args and isinstance(args[0], FakeTensor):
            if func is aten.nonzero.default:
                return torch.arange(args[0].numel())[:, None]
            if func is aten._local_scalar_dense.default:
                return 1.0
        out = func(*args, **(kwargs or {}))
        self.flops += _operations(func._overloadpacket, args, kwargs or {}, out)
        for each in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._see(each)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._held:
            return
        part = "head" if self._vocabulary in tensor.shape else "activations"
        self._held[storage] = held = _Held(part, storage.nbytes())
        weakref.finalize(storage, self._free, held)
        self._live[part] += held.size
        self._total += held.size
        if self._total > self._most:
            self._most, self.peak = self._total, self._live.copy()

    def _free(self, held: _Held) -> None:
        self._live[held.part] -= held.size
        self._total -= held.size


def _operations(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if packet in ATTENTION:
        return ATTENTION[packet](*args)
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0
