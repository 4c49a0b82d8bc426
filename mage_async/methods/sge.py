"""SGE (arXiv 2603.02045): a strategy in words before each action, drawn hotter than the action.

The transcript has the mechanism, a remark before an action (`trial.strategy`); this file has the
keys. Which temperatures the paper uses was not found. Left out: strategies of other trials of the
group in the prompt; those of the own trial stay in its history.
"""

from typing import ClassVar

from mage_async.methods.method import Method


class Sge(Method):
    """Keys alone; no hook is needed."""

    presets: ClassVar = {"sge": {"trial.strategy": "turn", "sampling.strategy_temperature": 1.5}}
