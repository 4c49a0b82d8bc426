"""A shop with a search engine, after WebShop: find what a customer describes, choose, buy.

The goal is the same in all episodes, so a purchase that did not fit rules a product out.
"""

import random
from functools import partial

from mage_async.environments.environment import Chance, Environment, Facts, Split
from mage_async.environments.options import check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.environments.shop.goals import goal_of
from mage_async.environments.shop.play import REWARD, ShopPlay, ShopScript, Stock
from mage_async.environments.shop.products import make_products, read_products
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_HELDOUT_SHARE = 4  # one product in so many
_RULES = """You are in a web shop, and buy what the customer asks for.
On the search page write search[words]. Elsewhere follow a link: click[number of a product],
click[value of an option], click[next >], click[< prev], click[description], click[back to search],
click[buy now]. Fields of a page are separated by [SEP].
A purchase with the right kind, attributes, options and price earns {reward:g}, any other nothing.
An episode ends with a purchase, or after {turns} turns. The customer wants the same in all
episodes."""


class Shop(Environment):
    """The shop; what the customer wants is the task variant (`member`), named after its product.

    Args:
        products: path of WebShop's `items_shuffle_1000.json`; empty for a made-up catalogue.
        size: products of the made-up catalogue.
        turns: most turns of an episode.

    Raises:
        ConfigError: an option is out of its range, or the file cannot be used.
    """

    def __init__(self, products: str = "", size: int = 400, turns: int = 12) -> None:
        check_whole("shop", "size", size, 40, 100_000)
        check_whole("shop", "turns", turns, 1, 1000)
        self._stock = Stock.of(read_products(products) if products else make_products(size))
        self._turns = turns
        self._by_name = {each.name: each for each in self._stock.products}
        names = list(self._by_name)
        random.Random("shop/split").shuffle(names)
        num_heldout = len(names) // _HELDOUT_SHARE
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": tuple(names[num_heldout:]),
            "heldout": tuple(names[:num_heldout]),
        }
        kinds = sorted({each.kind for each in self._stock.products})
        self.facts = Facts(
            name="shop",
            num_seats=1,
            max_turns=turns,
            min_return=0.0,
            max_return=REWARD,
            units=1,
            has_chance=False,
            words=(f"search[{kinds[0]}]", "click[buy now]", "invalid", "over", "bought"),
            has_open_text=True,
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Numbers of the products that goals are made from; split by product, before any draw."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """The product's category."""
        self._check(member)
        return self._by_name[member].category

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES.format(reward=REWARD, turns=self._turns)

    def begin(self, task: Task, episode: int) -> ShopPlay:
        """Open the search page."""
        self._check(task.member)
        goal = goal_of(self._by_name[task.member])
        return ShopPlay(self._stock, goal, self._turns, Chance(task.seed, episode))

    def script(self, source: random.Random) -> ShopScript:
        """Its care is drawn for the trial."""
        return ShopScript(source, source.choice((0.3, 0.7, 1.0)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Goals of another category."""
        family = self.family(member)
        return tuple(each for each in self._splits[split] if self.family(each) != family)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns in 200 trials, per episode: `random` follows any link, `customer` searches for
        what was said and buys the first product it has not bought before.
        """
        players = {"random": 0.0, "customer": 1.0}
        return {
            name: scripted_returns(self, split, num_episodes, partial(ShopScript, care=care))
            for name, care in players.items()
        }

    def _check(self, member: str) -> None:
        if member not in self._by_name:
            example = next(iter(self._by_name))
            raise EnvironmentFault(f"shop: no product is called {member!r}, as is e.g. {example!r}")
