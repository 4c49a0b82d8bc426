"""Attention over packed sequences: one row, no padding outside of attention."""

from mage_async.learning.attention.packed import (
    NAME,
    Boundaries,
    lacks_grouped_kernel,
    packed_attention,
)

__all__ = ["NAME", "Boundaries", "lacks_grouped_kernel", "packed_attention"]
