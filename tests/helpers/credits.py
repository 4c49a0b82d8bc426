"""Credits with given discounts, for tests that compare several of them."""

from typing import Any

from mage_async.config.components import CREDITS as REGISTRY
from mage_async.credit.returns import Credit, Returns

CREDITS: dict[str, type[Credit]] = {name: REGISTRY.load(name) for name in REGISTRY}


def credit_of(kind: type[Credit], **keys: Any) -> Credit:
    """A credit with those of the given keys that it has."""
    return kind(**{key: value for key, value in keys.items() if key in kind.__struct_fields__})


def credited(kind: type[Credit], rewards: Any, **discounts: float) -> Returns:
    """The returns of one trial."""
    return credit_of(kind, **discounts).returns(rewards)
