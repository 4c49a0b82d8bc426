"""Which combinations a sweep is made of."""

import random
from collections import Counter
from math import log

import pytest

from mage_async.errors import ConfigError
from mage_async.results.sweep import Axis, Range, axis_of, combination, drawn, grid, sweep_cells


def test_a_grid_is_every_value_with_every_other() -> None:
    axes = [axis_of("learner.learning_rate=3e-3,1e-3"), axis_of("credit.kind=sum,last")]
    found = grid(axes)
    assert [each.label for each in sorted(found)] == [
        "learner.learning_rate=1e-3, credit.kind=last",
        "learner.learning_rate=1e-3, credit.kind=sum",
        "learner.learning_rate=3e-3, credit.kind=last",
        "learner.learning_rate=3e-3, credit.kind=sum",
    ]
    assert {each.method for each in found} == {"credit.kind=sum", "credit.kind=last"}
    assert {each.place for each in found} == {1e-3, 3e-3}
    cells = sweep_cells(found, [0, 1, 1])
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4
    assert cells[0].assignments()[0] == "seed=0"
    assert cells[0].name() == "learner.learning_rate=3e-3,credit.kind=sum-seed0"


def test_values_that_are_no_numbers_stand_in_the_order_given() -> None:
    found = grid([axis_of("environment.options.sizes=[3, 4],[5]")])
    assert [each.place for each in found] == [0.0, 1.0]
    assert [each.place_name for each in found] == ["[3, 4]", "[5]"]
    folders = [each.folder for each in found]
    assert len(set(folders)) == 2
    assert not any(set(folder) & set('/[] "') for folder in folders)


def test_lists_tables_and_quoted_texts_are_values_of_their_own() -> None:
    given = ("[[1],[2, 3]]", "[[4]]", '["a,]"]', '"b,["', '{a = "}", b = [1, 2]}', "c")
    assert axis_of(f"key={','.join(given)}").choices == given


@pytest.mark.parametrize(
    "values",
    [("models/a", "../models/b"), ("../models/b", "models/a"), ("runs/../x",), ('"a..b"', "c")],
)
def test_two_dots_in_a_path_or_in_quotes_are_no_range(values: tuple[str, ...]) -> None:
    assert axis_of(f"policy.source={','.join(values)}").choices == values


def test_the_bounds_of_a_range_may_begin_with_a_point() -> None:
    expected = Range(0.001, 0.5, is_log=True, is_whole=False)
    assert axis_of("a=.001...5:log").choices == expected


def test_draws_are_within_their_range_and_the_same_again() -> None:
    axes = [axis_of("a=1e-4..1e-1:log"), axis_of("b=2..9"), axis_of("c=x,y")]
    found = drawn(axes, 40, seed=3)
    assert found[:10] == drawn(axes, 10, seed=3)
    assert found != drawn(axes, 40, seed=4)
    assert len(set(found)) == 40
    rates = sorted(each.place for each in found)
    assert 1e-4 <= rates[0] < 1e-3 < 1e-2 < rates[-1] <= 1e-1
    assert {int(each.columns["b"]) for each in found} <= set(range(2, 10))
    below = drawn([axis_of("b=-3..3")], 40, seed=3)
    assert {int(each.columns["b"]) for each in below} == set(range(-3, 4))
    assert len(drawn([axis_of("c=x,y")], 10, seed=0)) == 2


@pytest.mark.parametrize(
    "given",
    ["0.9..0.99999", "1000.5..1001.5", "-1e-9..-9e-10", "0.1..0.1000000001:log"],
)
def test_numbers_of_a_narrow_range_differ_and_stay_within_its_bounds(given: str) -> None:
    choices, source = axis_of(f"a={given}").choices, random.Random(0)
    assert isinstance(choices, Range)
    found = {choices.draw(source) for _ in range(200)}
    assert len(found) > 150
    assert all(choices.low <= float(each) <= choices.high for each in found)
    ends = choices.text(choices.low), choices.text(choices.high)
    assert tuple(map(float, ends)) == (choices.low, choices.high)


@pytest.mark.parametrize(
    ("given", "numbers", "texts"),
    [
        ("1e-4..1e-1:log", [1e-4, 0.0123456, 0.1], ["0.0001", "0.01235", "0.1"]),
        ("-1..1.5", [-1, 0, 1 / 3, 1.5], ["-1", "0", "0.3333", "1.5"]),
        ("1.0..1.0000000000000002", [1.0, 1.0 + 2e-16], ["1", "1.0000000000000002"]),
    ],
)
def test_a_number_has_four_digits_unless_the_range_needs_more(
    given: str, numbers: list[float], texts: list[str]
) -> None:
    choices = axis_of(f"a={given}").choices
    assert isinstance(choices, Range)
    assert [choices.text(each) for each in numbers] == texts


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ("1..3", [1 / 3] * 3),
        ("1..3:log", [log(x + 0.5) / log(7) - log(x - 0.5) / log(7) for x in (1, 2, 3)]),
    ],
)
def test_the_ends_of_a_range_of_whole_numbers_have_their_share(
    given: str, shares: list[float]
) -> None:
    choices, source = axis_of(f"a={given}").choices, random.Random(0)
    assert isinstance(choices, Range)
    counts = Counter(choices.draw(source) for _ in range(10_000))
    assert [counts[each] / 10_000 for each in "123"] == pytest.approx(shares, abs=0.02)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learner.learning_rate", "takes KEY=V1,V2"),
        ("=1,2", "takes KEY=V1,V2"),
        ("a=", "takes KEY=V1,V2"),
        *((f"a={given}", "takes KEY=V1,V2") for given in ("1,,2", ",1", "1,", "1, ,2")),
        *(
            (f"a={given}", "takes KEY=V1,V2")
            for given in ("{b=1,2", "[1,2", "1],2", '"a', 'a",b', "[[1],[2]")
        ),
        ("a=1,1", "a value is given twice"),
        ("a=1e-3,0.001", "a value is given twice"),
        ("a=2..1", "must rise"),
        ("a=0..1:log", "must rise and above 0"),
        ("a=low..high", "needs two numbers; put a text that holds `..` in double quotes"),
        ("a=1..inf", "must be finite"),
        ("a=-inf..1", "must be finite"),
    ],
)
def test_what_is_no_axis_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        axis_of(text)


def test_a_range_has_no_grid() -> None:
    with pytest.raises(ConfigError, match="add --random N or --search N"):
        grid([axis_of("a=1..2")])


def test_two_settings_never_share_a_folder() -> None:
    spelled_alike = [
        combination([Axis("a", (value,))], [value]) for value in ("b c", "b_c", "b/c", "x" * 200)
    ]
    assert len({each.folder for each in spelled_alike}) == 4
    assert max(len(each.folder) for each in spelled_alike) < 130
