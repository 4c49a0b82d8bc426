"""Play Shop: a web shop with a search engine, after WebShop (arXiv 2207.01206).

Rules: search, follow links, choose options and buy. A purchase with the right kind, attributes,
options and price earns 10, any other nothing. The fitting product is hidden; the customer wants the
same in all episodes, so a wrong purchase rules a product out. The shipped catalogue is synthetic,
because WebShop's data has to be downloaded by hand. Returns on it are not comparable with those on
WebShop. To play on WebShop's catalogue, give the path of `items_shuffle_1000.json`, with
`items_ins_v2_1000.json` in the same folder.
"""

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from mage_async.environments.environment import Chance, Outcome, Split, check_whole, hold_out
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

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
"""Kinds of products of the synthetic catalogue, by category."""
_ATTRIBUTES = (
    *("lightweight", "waterproof", "machine washable", "long lasting", "easy to clean", "foldable"),
    *("non slip", "eco friendly", "heavy duty", "easy to assemble", "stain resistant", "portable"),
)
_COLOURS = ("black", "white", "navy blue", "forest green", "red", "light gray")
_SIZES = ("small", "medium", "large", "x-large")
_MAKERS = ("Alder", "Brightway", "Corvo", "Dunmore", "Elmtree", "Fenwick", "Gable", "Holt")

BUY, BACK, PREVIOUS, NEXT = (
    *("click[buy now]", "click[back to search]", "click[< prev]", "click[next >]"),
)
DESCRIPTION = "click[description]"
REWARD = 10.0
"""Reward of a perfect purchase; any other earns nothing, as in MAGE and LaMer."""
_PER_PAGE, _MOST_FOUND = 10, 50
"""Number of results on a page, and largest number of results of a search."""
_SEP = " [SEP] "
"""Text between the fields of a page."""
_RULES = """You are in a web shop, and buy what the customer asks for.
On the search page write search[words]. Elsewhere follow a link: click[number of a product],
click[value of an option], click[next >], click[< prev], click[description], click[back to search],
click[buy now]. Fields of a page are separated by [SEP].
A purchase with the right kind, attributes, options and price earns {reward:g}, any other nothing.
An episode ends with a purchase, or after {turns} turns. The customer wants the same in all
episodes."""


@dataclass(frozen=True, slots=True)
class Product:
    """Describe a product of the shop, as its page shows it."""

    name: str
    """Identifier of the product in the shop, such as `B00017`."""
    title: str
    category: str
    kind: str
    """Words by which one would search for the product."""
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    description: str

    def text(self) -> str:
        """Return the text that the search engine indexes."""
        options = chain.from_iterable(self.options.values())
        return " ".join((self.title, self.kind, self.description, *self.attributes, *options))


@dataclass(frozen=True, slots=True)
class Goal:
    """Describe a product as the customer wants it."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_limit: float
    """The price must be below this number of dollars."""

    def instruction(self) -> str:
        """Return the customer's instruction."""
        product = self.product
        options = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        described = f"{', '.join(self.attributes)} {product.kind}"
        if options:
            described += f" with {options}"
        return f"Find me {described}, and price lower than {self.price_limit:.2f} dollars"


_K1, _B = 0.9, 0.4
"""Parameters of BM25 in WebShop's engine."""


def words_of(text: str) -> list[str]:
    """Return the lower-case words of letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Index:
    """Search texts by BM25 (Robertson and Zaragoza 2009, section 3)."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words_of(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(1, len(lengths))
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        """For each word, the numbers of the texts that contain it, with its weight in each text."""
        frequencies = Counter(word for count in counts for word in count)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = _K1 * (1 - _B + _B * length / mean)
            for word, times in count.items():
                rarity = (len(texts) - frequencies[word] + 0.5) / (frequencies[word] + 0.5)
                weight = math.log1p(rarity) * times * (_K1 + 1) / (times + norm)
                self._weights[word].append((number, weight))

    def find(self, query: str, most: int) -> list[int]:
        """Return the numbers of the best matches, best first, ties in order."""
        scores: dict[int, float] = defaultdict(float)
        for word in words_of(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        return sorted(scores, key=lambda number: (-scores[number], number))[:most]


class Searches(tuple[str, ...]):
    """Represent the legal actions of the search page: every search, of which only one is listed."""

    is_whole = False
    """False: more actions are legal than are listed (`Play.legal_actions`)."""

    def __contains__(self, action: object) -> bool:
        return query_of(str(action)) is not None


def query_of(action: str) -> str | None:
    """Return the words of a search; None if the action is no search."""
    inside = action.removeprefix("search[").removesuffix("]")
    is_search = action.startswith("search[") and action.endswith("]") and inside.strip()
    return inside.strip() if is_search else None


class ShopPlay(SoloPlay):
    """Play one visit to the shop. The anchor, which is equal for equal states, is the page."""

    def __init__(
        self, products: Sequence[Product], index: Index, goal: Goal, turns: int, chance: Chance
    ) -> None:
        self._products, self._index, self._turns_left = products, index, turns
        self.goal, self.chance = goal, chance
        self.observation = f"Instruction: {goal.instruction()}{_SEP}Search"
        self._found: list[Product] | None = None
        """Results of the last search; None on the search page."""
        self._page = 0
        """Number of the shown page of these results, from 0."""
        self._reads_description = False
        """Whether the product's page shows its description."""
        self.item: Product | None = None
        """Product whose page is open; None on other pages."""
        self.chosen: dict[str, str] = {}
        """Options chosen on that page, by name."""

    @property
    def anchor(self) -> str:
        """The page as text."""
        if self.item is not None:
            return _SEP.join(self._item_page(self.item))
        if self._found is None:
            return "Search"
        total = len(self._found)
        fields = ["Back to Search", f"Page {self._page + 1} (Total results: {total})"]
        for each in self._shown(self._found):
            fields += [each.name, each.title, f"${each.price:.2f}"]
        return _SEP.join(fields)

    def actions(self) -> Sequence[str]:
        """Return the links of the page, or any search on the search page."""
        if self.item is not None:
            values = chain.from_iterable(self.item.options.values())
            options = dict.fromkeys(f"click[{value}]" for value in values)
            return (*options, DESCRIPTION, PREVIOUS, BACK, BUY)
        if self._found is None:
            return Searches([f"search[{self.goal.product.kind}]"])
        links = [BACK, *(f"click[{each.name}]" for each in self._shown(self._found))]
        links += [PREVIOUS] if self._page else []
        links += [NEXT] if (self._page + 1) * _PER_PAGE < len(self._found) else []
        return links

    def apply(self, action: str) -> Outcome:
        """Follow a link or search; an invalid action changes nothing, but uses up a turn."""
        self._turns_left -= 1
        is_valid = action in self.actions()
        if is_valid and action == BUY and self.item is not None:
            earned = score(self.goal, self.item, self.chosen)
            reward = REWARD if earned == 1.0 else 0.0
            return Outcome(f"bought{_SEP}Your score: {earned:.2f}", reward, True, True)
        if is_valid:
            self._follow(action)
        fields = [self.anchor] if is_valid else ["invalid", self.anchor]
        is_over = not self._turns_left
        observation = _SEP.join([*fields, "over"] if is_over else fields)
        return Outcome(" ".join(observation.split()), 0.0, is_valid, is_over)

    def _follow(self, action: str) -> None:
        """Follow a link or search."""
        self._reads_description = action == DESCRIPTION
        query = query_of(action)
        if query is not None:
            numbers = self._index.find(query, _MOST_FOUND)
            self._found, self._page = [self._products[number] for number in numbers], 0
        elif action == BACK:
            self._found, self.item = None, None
        elif self.item is not None and action == PREVIOUS:
            self.item = None
        elif self.item is not None:
            value, options = action.removeprefix("click[").removesuffix("]"), self.item.options
            self.chosen |= {name: value for name, values in options.items() if value in values}
        elif action in (PREVIOUS, NEXT):
            self._page += 1 if action == NEXT else -1
        else:  # all other links of a page of results are products
            linked = {f"click[{each.name}]": each for each in self._shown(self._found or [])}
            self.item, self.chosen = linked[action], {}

    def _shown(self, found: list[Product]) -> list[Product]:
        """Return the results on the current page."""
        return found[self._page * _PER_PAGE : (self._page + 1) * _PER_PAGE]

    def _item_page(self, item: Product) -> list[str]:
        """Return the fields of a product's page."""
        fields = ["Back to Search", "< Prev"]
        for name, values in item.options.items():
            fields += [
                name,
                *(f"{v} (chosen)" if self.chosen.get(name) == v else v for v in values),
            ]
        fields += [item.title, f"Price: ${item.price:.2f}", "Description", "Buy Now"]
        return [*fields, item.description] if self._reads_description else fields


@dataclass(slots=True)
class ShopScript(TrialScript[ShopPlay]):
    """Search for the instruction, choose the options that fit, and buy; or follow any link."""

    care: float
    """Probability of acting on the instruction rather than following any link."""
    _bought: list[str] = field(default_factory=list)
    """Links of the products bought so far in the trial."""

    def action(self, play: ShopPlay) -> str:
        """Return the next action."""
        legal = play.legal_actions()
        if self.source.random() >= self.care:
            return self.source.choice(legal)
        if play.item is not None:
            return self._on_item(play, play.item)
        if isinstance(legal, Searches):
            return f"search[{' '.join((*play.goal.attributes, play.goal.product.kind))}]"
        fresh = [each for each in legal if each not in (BACK, PREVIOUS, NEXT, *self._bought)]
        return fresh[0] if fresh else self.source.choice(legal)

    def _on_item(self, play: ShopPlay, item: Product) -> str:
        """Return the next action on a product's page: an option that fits, or the purchase."""
        for name, value in play.goal.options.items():
            action = f"click[{value}]"
            if play.chosen.get(name) != value and action in play.legal_actions():
                return action
        self._bought.append(f"click[{item.name}]")
        return BUY


class Shop(Game[Product]):
    """Play Shop; the task variant is the customer's goal, named after its product.

    Args:
        products: Path of WebShop's `items_shuffle_1000.json`; "" for a synthetic catalogue.
        size: Number of products of the synthetic catalogue.
        turns: Largest number of turns in an episode.

    Raises:
        ConfigError: an option is out of its range, or the file cannot be used.
    """

    def __init__(self, products: str = "", size: int = 400, turns: int = 12) -> None:
        check_whole("shop", "size", size, 40, 100_000)
        check_whole("shop", "turns", turns, 1, 1000)
        if not isinstance(products, str):
            raise ConfigError(f"shop: `products` must be the path of a file, got {products!r}")
        self._products = read_products(products) if products else make_products(size)
        self._index = Index([each.text() for each in self._products])
        self._turns = turns
        shuffled = list(self._products)
        random.Random("shop/split").shuffle(shuffled)
        first_kind = min(each.kind for each in self._products)
        # The text is open, so these are examples; the first has to be an action (`Facts.words`).
        words = (f"search[{first_kind}]", "click[buy now]", "invalid", "over", "bought")
        facts = facts_of("shop", turns, words, (0.0, REWARD), has_open_text=True)
        super().__init__(facts, hold_out({each.name: each for each in shuffled}), "product")

    def family(self, member: str) -> str:
        """Return the product's category."""
        return self.variant(member).category

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES.format(reward=REWARD, turns=self._turns)

    def begin(self, task: Task, episode: int) -> ShopPlay:
        """Open the search page."""
        goal, chance = goal_of(self.variant(task.member)), Chance(task.seed, episode)
        return ShopPlay(self._products, self._index, goal, self._turns, chance)

    def script(self, source: random.Random) -> ShopScript:
        """Return a script whose care is drawn for the trial."""
        return ShopScript(source, source.choice((0.3, 0.7, 1.0)))

    def overlap(self, one: Product, other: Product) -> int:
        """Return 1 if the products are of the same category, else 0: `swapped` takes a goal of
        another category.
        """
        return int(one.category == other.category)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return mean returns over 200 trials, per episode: `random` follows any link, `customer`
        searches for the instruction and buys the first product that it has not bought before.
        """
        return self.measured(
            split,
            num_episodes,
            random=partial(ShopScript, care=0.0),
            customer=partial(ShopScript, care=1.0),
        )


# The functions below generate products from a seed, or read them from WebShop's files.


def make_products(num_products: int) -> tuple[Product, ...]:
    """Return a catalogue in which products of a kind differ in attributes, options and price."""
    source = random.Random("shop/0")
    return tuple(_make_product(source, number) for number in range(num_products))


def _make_product(source: random.Random, number: int) -> Product:
    """Draw a product."""
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
    """Return the products of WebShop's file that have a distinct name and known attributes.

    Raises:
        ConfigError: there is no such file, or it is not in WebShop's format.
    """
    file = Path(path).expanduser()
    try:
        items = json.loads(file.read_text(encoding="utf-8"))
        attributes_file = file.with_name(file.name.replace("items_shuffle", "items_ins_v2"))
        has_attributes = attributes_file.is_file()
        known = json.loads(attributes_file.read_text(encoding="utf-8")) if has_attributes else {}
        found = {item["asin"]: _read_product(item, known.get(item["asin"], {})) for item in items}
    except OSError as error:
        raise ConfigError(f"shop: cannot read `products`: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"shop: {file} is not in the format of WebShop's items_shuffle_1000.json: {error!r}"
        ) from None
    products = tuple(each for each in found.values() if each.attributes)
    if len(products) < 8:
        raise ConfigError(
            f"shop: {file} has {len(products)} products with attributes, at least 8 are needed; "
            f"is {attributes_file.name} in the same folder?"
        )
    return products


def _read_product(item: dict[str, Any], more: dict[str, Any]) -> Product:
    """Return a product of WebShop's file; `more` is its entry in the file of attributes."""
    # The values are written as WebShop's pages show them: "2 ft / 3 ft" is "2 ft | 3 ft".
    options = {
        name.lower(): tuple(
            " ".join(each["value"].replace("/", " | ").lower().split()) for each in values
        )
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
    """Return the lowest price in a text; 100 if there is none, as WebShop does."""
    prices = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", text)]
    return min(prices, default=100.0)


# The functions below make goals, and compute their score.


_STEP = 10
"""Number of dollars of which every price limit of a goal is a multiple."""


def goal_of(product: Product) -> Goal:
    """Return the one goal of a product; the product's name is the seed."""
    source = random.Random(f"goal/{product.name}")
    num_attributes = min(len(product.attributes), source.randint(1, 3))
    attributes = tuple(sorted(source.sample(product.attributes, num_attributes)))
    options = {name: source.choice(values) for name, values in product.options.items()}
    price_limit = (product.price // _STEP + source.randint(1, 3)) * _STEP
    return Goal(product, attributes, options, price_limit)


def score(goal: Goal, bought: Product, chosen: Mapping[str, str]) -> float:
    """Return WebShop's score from 0 to 1: type × share of attributes, options and price that are
    right.

    WebShop compares the nouns of the titles, which it finds by spaCy; here all words of the titles
    are compared.
    """
    text = " ".join((bought.title, bought.description, *bought.attributes)).lower()
    right = sum(each.lower() in text for each in goal.attributes)
    right += sum(chosen.get(name) == value for name, value in goal.options.items())
    right += bought.price < goal.price_limit
    return (
        _type_score(goal.product, bought) * right / (len(goal.attributes) + len(goal.options) + 1)
    )


def _type_score(wanted: Product, bought: Product) -> float:
    """Return the share of the score for the right type: 1, 0.5 or 0.1."""
    mine, theirs = set(words_of(wanted.title)), set(words_of(bought.title))
    shared = len(mine & theirs) / max(1, len(mine))
    if wanted.kind == bought.kind or (wanted.category == bought.category and shared > 0.2):
        return 1.0
    return 0.1 if shared < 0.1 else 0.5
