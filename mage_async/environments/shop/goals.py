"""What a customer wants, and how near a purchase comes to it: WebShop's score."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from mage_async.environments.shop.products import Product
from mage_async.environments.shop.search import words_of

_STEP = 10  # prices are bounded by a multiple of ten dollars


@dataclass(frozen=True, slots=True)
class Goal:
    """A product in the customer's words."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    most: float
    """The price must be lower."""

    def instruction(self) -> str:
        """What the customer says."""
        product = self.product
        options = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        wanted = f"{', '.join(self.attributes)} {product.kind}"
        with_options = f" with {options}" if options else ""
        return f"Find me {wanted}{with_options}, and price lower than {self.most:.2f} dollars"


def goal_of(product: Product) -> Goal:
    """The one goal of a product, drawn from its name."""
    source = random.Random(f"goal/{product.name}")
    num = min(len(product.attributes), source.randint(1, 3))
    attributes = tuple(sorted(source.sample(product.attributes, num)))
    options = {name: source.choice(values) for name, values in product.options.items()}
    most = (product.price // _STEP + source.randint(1, 3)) * _STEP
    return Goal(product, attributes, options, most)


def score(goal: Goal, bought: Product, chosen: Mapping[str, str]) -> float:
    """From 0 to 1: type × share of attributes, options and price that are right.

    WebShop compares nouns of the titles by spaCy; here it is all their words.
    """
    text = " ".join((bought.title, bought.description, *bought.attributes)).lower()
    right = sum(each.lower() in text for each in goal.attributes)
    right += sum(chosen.get(name) == value for name, value in goal.options.items())
    right += bought.price < goal.most
    return _type(goal.product, bought) * right / (len(goal.attributes) + len(goal.options) + 1)


def _type(wanted: Product, bought: Product) -> float:
    mine, theirs = set(words_of(wanted.title)), set(words_of(bought.title))
    shared = len(mine & theirs) / max(1, len(mine))
    if wanted.kind == bought.kind or (wanted.category == bought.category and shared > 0.2):
        return 1.0
    return 0.1 if shared < 0.1 else 0.5
