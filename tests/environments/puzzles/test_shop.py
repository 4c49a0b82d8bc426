"""The shop: its pages, its score, its search, and WebShop's own files."""

import json
from pathlib import Path

import pytest

from mage_async.environments.games.shop import (
    Goal,
    Index,
    Product,
    Shop,
    ShopPlay,
    goal_of,
    make_products,
    read_products,
    score,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

BAG = Product(
    "B1",
    "Alder tote bag, foldable",
    "bags",
    "tote bag",
    ("foldable", "portable"),
    {"color": ("black", "red")},
    20.0,
    "A tote bag.",
)
GOAL = Goal(BAG, ("foldable",), {"color": "red"}, 30.0)


def begin(member: str, turns: int = 12) -> ShopPlay:
    return Shop(turns=turns).begin(Task("shop", member, 0), 0)


def test_the_right_product_with_the_right_options_is_a_perfect_purchase() -> None:
    environment = Shop()
    for member in environment.members("heldout")[:20]:
        play = environment.begin(Task("shop", member, 0), 0)
        goal = play.goal
        assert play.observation.startswith(f"Instruction: Find me {goal.attributes[0]}")
        play.act(f"search[{goal.product.title}]")
        assert f"click[{member}]" in play.legal_actions()
        play.act(f"click[{member}]")
        for value in goal.options.values():
            play.act(f"click[{value}]")
        outcome = play.act("click[buy now]")
        assert (outcome.reward, outcome.is_done) == (10.0, True)
        assert outcome.observation == "bought [SEP] Your score: 1.00"


@pytest.mark.parametrize(
    ("bought", "chosen", "expected"),
    [
        (BAG, {"color": "red"}, 1.0),
        (BAG, {"color": "black"}, 2 / 3),
        (BAG, {}, 2 / 3),
        (Product("B2", "X", "lamps", "desk lamp", (), {}, 99.0, "foldable"), {}, 0.1 / 3),
    ],
)
def test_a_score_is_the_share_of_what_is_right(bought: Product, chosen: dict, expected) -> None:
    assert score(GOAL, bought, chosen) == pytest.approx(expected)


def test_every_goal_can_be_met_by_the_product_it_was_made_from() -> None:
    for product in make_products(200):
        goal = goal_of(product)
        assert score(goal, product, goal.options) == 1.0


def test_pages_lead_where_their_links_say() -> None:
    play = begin("B00017")
    assert "click[buy now]" not in play.legal_actions()
    first = play.act("search[bag]").observation
    assert first.startswith("Back to Search [SEP] Page 1 (Total results: ")
    second = play.act("click[next >]").observation
    assert second != first
    assert play.act("click[< prev]").observation == first
    product = next(each for each in play.legal_actions() if each.startswith("click[B"))
    assert "Buy Now" in play.act(product).observation
    assert play.act("click[description]").observation.count(" that is ") == 1
    assert play.act("click[< prev]").observation == first
    assert play.act("click[back to search]").observation == "Search"


@pytest.mark.parametrize("action", ["search[]", "search[ ]", "click[buy now]", "buy", "search[x"])
def test_what_the_page_does_not_offer_is_invalid(action: str) -> None:
    play = begin("B00017", turns=2)
    outcome = play.act(action)
    assert (outcome.is_valid, outcome.reward) == (False, 0.0)
    assert outcome.observation == "invalid [SEP] Search"
    assert play.act(action).observation.endswith(" [SEP] over")


def test_the_text_that_has_the_rarer_words_is_found_first() -> None:
    index = Index(["red bag", "red red lamp", "blue bag that is foldable", "green chair"])
    assert index.find("foldable bag", 10) == [2, 0]
    assert index.find("red", 10) == [1, 0]
    assert index.find("Red BAG", 1) == [0]
    assert index.find("sofa", 10) == []


def test_a_customer_who_remembers_buys_something_else() -> None:
    values = Shop().references("heldout", 3)
    assert values["random"][0] < 1.0
    assert values["customer"][0] > 2.0


def test_goals_of_the_splits_are_made_from_different_products() -> None:
    environment = Shop()
    assert not set(environment.members("train")) & set(environment.members("heldout"))


ITEM = {
    "asin": "B07",
    "name": "Linen Shirt",
    "category": "fashion",
    "query": "mens shirts",
    "product_category": "Clothing › Men",
    "small_description": ["machine wash"],
    "full_description": "A shirt.",
    "pricing": "$12.50$24.99",
    "customization_options": {"Size": [{"value": "Small / Tall"}, {"value": "Large"}], "Fit": None},
}


def test_webshops_own_files_are_read(tmp_path: Path) -> None:
    items = [ITEM | {"asin": f"B{number}"} for number in range(9)]
    more = {f"B{number}": {"attributes": ["machine wash"]} for number in range(8)}
    file = tmp_path / "items_shuffle_1000.json"
    file.write_text(json.dumps(items))
    (tmp_path / "items_ins_v2_1000.json").write_text(json.dumps(more))
    products = read_products(str(file))
    assert [each.name for each in products] == [f"B{number}" for number in range(8)]
    assert products[0].options == {"size": ("small | tall", "large")}
    assert products[0].price == 12.5
    environment = Shop(products=str(file))
    play = environment.begin(Task("shop", "B3", 0), 0)
    assert "machine wash mens shirts with size: " in play.observation


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shop: `products` must be the path of a file, got 5"):
        Shop(products=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"shop: cannot read `products`: .*nowhere"):
        Shop(products=str(tmp_path / "nowhere.json"))
    file = tmp_path / "items_shuffle_1000.json"
    file.write_text('[{"asin": "B1"}]')
    with pytest.raises(ConfigError, match="is not in the format of WebShop's"):
        Shop(products=str(file))
    file.write_text(json.dumps([ITEM]))
    with pytest.raises(ConfigError, match="has 0 products with attributes, at least 8 are needed"):
        Shop(products=str(file))
