"""Products of a shop: made up from a seed, or read from WebShop's own files.

WebShop's data cannot be fetched by a program, so the shipped catalogue is synthetic: numbers on it
are not WebShop's numbers. To play on WebShop's, give the path of `items_shuffle_1000.json` (with
`items_ins_v2_1000.json` beside it).
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mage_async.errors import ConfigError

_KINDS = {
    "bags": ("backpack", "tote bag", "duffel bag"),
    "chairs": ("office chair", "dining chair", "rocking chair"),
    "shoes": ("running shoes", "hiking boots", "sandals"),
    "shirts": ("t-shirt", "polo shirt", "hoodie"),
    "lamps": ("desk lamp", "floor lamp", "night light"),
    "snacks": ("trail mix", "protein bar", "dried mango"),
    "phones": ("phone case", "phone charger", "headphones"),
    "kitchen": ("frying pan", "water bottle", "knife set"),
}
_ATTRIBUTES = (
    *("lightweight", "waterproof", "machine washable", "long lasting", "easy to clean", "foldable"),
    *("non slip", "eco friendly", "heavy duty", "easy to assemble", "stain resistant", "portable"),
)
_COLOURS = ("black", "white", "navy blue", "forest green", "red", "light gray")
_SIZES = ("small", "medium", "large", "x-large")
_MAKERS = ("Alder", "Brightway", "Corvo", "Dunmore", "Elmtree", "Fenwick", "Gable", "Holt")


@dataclass(frozen=True, slots=True)
class Product:
    """What a shop sells."""

    name: str
    """The shop's number for it."""
    title: str
    category: str
    kind: str
    """What one would search for."""
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    description: str

    def text(self) -> str:
        """All that a search looks at."""
        values = (value for values in self.options.values() for value in values)
        return " ".join((self.title, self.kind, self.description, *self.attributes, *values))


def make_products(num_products: int, seed: int = 0) -> tuple[Product, ...]:
    """A catalogue in which products of a kind differ in attributes, options and price."""
    source = random.Random(f"shop/{seed}")
    return tuple(_make(source, number) for number in range(num_products))


def _make(source: random.Random, number: int) -> Product:
    category = source.choice(tuple(_KINDS))
    kind = source.choice(_KINDS[category])
    attributes = tuple(sorted(source.sample(_ATTRIBUTES, source.randint(2, 4))))
    options = {"color": tuple(sorted(source.sample(_COLOURS, source.randint(2, 4))))}
    if source.random() < 0.6:
        options["size"] = _SIZES[: source.randint(2, 4)]
    title = f"{source.choice(_MAKERS)} {kind}, {', '.join(attributes[:2])}"
    price = source.randint(5, 120) + source.choice((0.0, 0.49, 0.99))
    description = f"A {kind} that is {' and '.join(attributes)}."
    return Product(f"B{number:05d}", title, category, kind, attributes, options, price, description)


def read_products(path: str) -> tuple[Product, ...]:
    """The products of WebShop's file that have a name of their own and known attributes.

    Raises:
        ConfigError: there is no such file, or it is not in WebShop's format.
    """
    file = Path(path).expanduser()
    try:
        items = json.loads(file.read_text(encoding="utf-8"))
        beside = file.with_name(file.name.replace("items_shuffle", "items_ins_v2"))
        known = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        found = {item["asin"]: _read(item, known.get(item["asin"], {})) for item in items}
    except OSError as error:
        raise ConfigError(f"shop: cannot read `products`: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"shop: {file} is not in the format of WebShop's items_shuffle_1000.json: {error!r}"
        ) from None
    products = tuple(each for each in found.values() if each.attributes)
    if len(products) < 8:
        raise ConfigError(
            f"shop: {file} has {len(products)} products with attributes, 8 are the least; "
            f"is {beside.name} beside it?"
        )
    return products


def _read(item: dict[str, Any], more: dict[str, Any]) -> Product:
    options = {
        name.lower(): tuple(each["value"].strip().replace("/", " | ").lower() for each in values)
        for name, values in (item.get("customization_options") or {}).items()
        if values
    }
    points = item.get("small_description") or []
    description = " ".join((item.get("full_description") or "", *points))
    return Product(
        item["asin"],
        item["name"],
        item.get("product_category") or item["category"],
        item.get("query") or item["category"],
        tuple(more.get("attributes") or ()),
        options,
        _price(item.get("pricing") or ""),
        " ".join(description.split()),
    )


def _price(text: str) -> float:
    """The lowest of the prices named; 100 where there is none, as WebShop has it."""
    prices = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", text)]
    return min(prices, default=100.0)
