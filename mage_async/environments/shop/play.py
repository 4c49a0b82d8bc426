"""One visit to the shop: its pages, and a scripted customer."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.shop.goals import Goal, score
from mage_async.environments.shop.products import Product
from mage_async.environments.shop.search import Index

BUY, BACK, PREVIOUS, NEXT = (
    *("click[buy now]", "click[back to search]", "click[< prev]", "click[next >]"),
)
DESCRIPTION = "click[description]"
REWARD = 10.0
"""Reward of a perfect purchase; any other earns nothing, as in MAGE and LaMer."""
_PER_PAGE, _MOST_FOUND = 10, 50
_SEP = " [SEP] "


@dataclass(frozen=True, slots=True)
class Stock:
    """All products, and the search over them."""

    products: tuple[Product, ...]
    index: Index

    @classmethod
    def of(cls, products: tuple[Product, ...]) -> "Stock":
        """Index the products."""
        return cls(products, Index([each.text() for each in products]))


class Actions(Sequence[str]):
    """What may be done on a page: its links, and where there is a search field, any search.

    As a list it holds one search only, for the words of the goal, and is not `is_whole`.
    """

    def __init__(self, links: Sequence[str], search: str | None) -> None:
        self._links = (*((search,) if search else ()), *links)
        self.is_whole = search is None

    def __contains__(self, action: object) -> bool:
        return action in self._links or (not self.is_whole and query_of(str(action)) is not None)

    def __getitem__(self, index):
        return self._links[index]

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)


def query_of(action: str) -> str | None:
    """The words of a search; None where it is none."""
    inside = action.removeprefix("search[").removesuffix("]")
    is_search = action.startswith("search[") and action.endswith("]") and inside.strip()
    return inside.strip() if is_search else None


class ShopPlay:
    """One visit. The anchor is the page."""

    __slots__ = (
        *("_found", "_goal", "_is_done", "_page", "_stock", "_turns_left"),
        *("chance", "chosen", "item", "reads"),
    )

    def __init__(self, stock: Stock, goal: Goal, turns: int, chance: Chance) -> None:
        self._stock, self._goal, self._turns_left, self.chance = stock, goal, turns, chance
        self._found: list[int] | None = None
        self._page, self._is_done, self.reads = 0, False, False
        self.item: Product | None = None
        """The product being looked at."""
        self.chosen: dict[str, str] = {}
        """Its options that have been chosen."""

    @property
    def goal(self) -> Goal:
        """What the customer wants."""
        return self._goal

    @property
    def observation(self) -> str:
        """The customer's words, and the search page."""
        return f"Instruction: {self._goal.instruction()}{_SEP}Search"

    @property
    def anchor(self) -> str:
        """The page, in text."""
        if self.item is not None:
            return _SEP.join(self._item_page(self.item))
        return "Search" if self._found is None else _SEP.join(self._results())

    def legal_actions(self) -> Sequence[str]:
        """The links of the page, and any search on the search page."""
        if self._is_done:
            return ()
        if self.item is not None:
            return Actions((*self._option_links(self.item), DESCRIPTION, PREVIOUS, BACK, BUY), None)
        if self._found is None:
            return Actions((), f"search[{self._goal.product.kind}]")
        return Actions(self._result_links(self._found), None)

    def act(self, action: str) -> Outcome:
        """Follow a link or search; anything else leaves the page and uses up the turn."""
        assert not self._is_done, "the episode is done"
        self._turns_left -= 1
        if action not in self.legal_actions():
            return self._outcome(f"invalid{_SEP}{self.anchor}", 0.0, is_valid=False)
        if action == BUY and self.item is not None:
            self._is_done = True
            earned = score(self._goal, self.item, self.chosen)
            reward = REWARD if earned == 1.0 else 0.0
            return Outcome(f"bought{_SEP}Your score: {earned:.2f}", reward, True, True)
        self._follow(action)
        return self._outcome(self.anchor, 0.0, is_valid=True)

    def _follow(self, action: str) -> None:
        self.reads = action == DESCRIPTION
        query = query_of(action)
        if query is not None:
            self._found, self._page = self._stock.index.find(query, _MOST_FOUND), 0
        elif action == BACK:
            self._found, self.item = None, None
        elif self.item is not None:
            self._on_item(self.item, action)
        elif action in (PREVIOUS, NEXT):
            self._page += 1 if action == NEXT else -1
        else:
            self.item, self.chosen = self._named(action), {}

    def _on_item(self, item: Product, action: str) -> None:
        if action == PREVIOUS:
            self.item = None
            return
        for name, values in item.options.items():
            for value in values:
                if action == f"click[{value}]":
                    self.chosen[name] = value

    def _named(self, action: str) -> Product:
        return next(each for each in self._shown() if action == f"click[{each.name}]")

    def _shown(self) -> list[Product]:
        assert self._found is not None
        first = self._page * _PER_PAGE
        return [self._stock.products[each] for each in self._found[first : first + _PER_PAGE]]

    def _result_links(self, found: list[int]) -> tuple[str, ...]:
        links = [BACK, *(f"click[{each.name}]" for each in self._shown())]
        links += [PREVIOUS] if self._page else []
        links += [NEXT] if (self._page + 1) * _PER_PAGE < len(found) else []
        return tuple(links)

    def _option_links(self, item: Product) -> tuple[str, ...]:
        values = (value for values in item.options.values() for value in values)
        return tuple(dict.fromkeys(f"click[{value}]" for value in values))

    def _results(self) -> list[str]:
        found = self._found or []
        fields = ["Back to Search", f"Page {self._page + 1} (Total results: {len(found)})"]
        for each in self._shown():
            fields += [each.name, each.title, f"${each.price:.2f}"]
        return fields

    def _item_page(self, item: Product) -> list[str]:
        fields = ["Back to Search", "< Prev"]
        for name, values in item.options.items():
            fields += [
                name,
                *(f"{v} (chosen)" if self.chosen.get(name) == v else v for v in values),
            ]
        fields += [item.title, f"Price: ${item.price:.2f}", "Description", "Buy Now"]
        return [*fields, item.description] if self.reads else fields

    def _outcome(self, said: str, reward: float, *, is_valid: bool) -> Outcome:
        self._is_done = not self._turns_left
        said = " ".join(said.split())
        return Outcome(
            f"{said}{_SEP}over" if self._is_done else said, reward, is_valid, self._is_done
        )


@dataclass(slots=True)
class ShopScript:
    """Looks for what the customer said, chooses what fits, and buys; or follows any link."""

    source: random.Random
    care: float
    _bought: list[str] = field(default_factory=list)
    """Names of what was bought in earlier episodes."""

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, ShopPlay)
        legal = play.legal_actions()
        if self.source.random() >= self.care:
            return self.source.choice(legal)
        if play.item is not None:
            return self._on_item(play, play.item)
        if len(legal) == 1:  # the search page
            return f"search[{' '.join((*play.goal.attributes, play.goal.product.kind))}]"
        fresh = [
            each
            for each in legal
            if each not in (BACK, PREVIOUS, NEXT) and each not in self._bought
        ]
        return fresh[0] if fresh else self.source.choice(legal)

    def _on_item(self, play: ShopPlay, item: Product) -> str:
        for name, value in play.goal.options.items():
            if play.chosen.get(name) != value:
                action = f"click[{value}]"
                if action in play.legal_actions():
                    return action
        self._bought.append(f"click[{item.name}]")
        return BUY
