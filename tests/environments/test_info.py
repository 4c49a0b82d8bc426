"""What an environment says beside its observations: bounded text, whatever it was."""

import json
import time
from collections import UserDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.environments.user_calls import MAX_INFO_CHARS, info_text

texts = st.text(st.characters(), max_size=9)
data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(texts | st.integers(), data))
def test_any_info_is_a_json_object_of_bounded_size(info: dict[Any, Any]) -> None:
    text = info_text(info)
    assert len(text) <= MAX_INFO_CHARS
    assert bool(text) == bool(info)
    assert not info or isinstance(json.loads(text), dict)


def test_plain_data_is_kept_as_it_is() -> None:
    info = {"score": 0.5, "moves": ["left", 2, None, True], "by": {"seat": -1}, 3: "é"}
    assert json.loads(info_text(info)) == {
        "score": 0.5,
        "moves": ["left", 2, None, True],
        "by": {"seat": -1},
        "3": "é",
    }


class Hostile:
    """Looking at it is a mistake."""

    def __repr__(self) -> str:
        raise AssertionError

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (Hostile(), "<Hostile>"),
        ({Hostile()}, ["<Hostile>"]),
        ({Hostile(): 1}, {"<Hostile>": 1}),
        (float("nan"), "nan"),
        (2**70, "a whole number of 71 bits"),
        (b"x" * 10**7, "<bytes>"),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (np.zeros((100, 100)), "float64 [100, 100]"),
        (np.array([None, 1], object), [None, 1]),
        ("\ud800", "?"),
        ("x" * 2000, "x" * 1000 + "… 1,000 more"),
        (list(range(100)), [*range(64), "… 36 more"]),
        (dict.fromkeys(range(64), 0), {str(number): 0 for number in range(64)}),
        (
            dict.fromkeys(range(100), 0),
            {str(number): 0 for number in range(64)} | {"…": "36 more"},
        ),
    ],
)
def test_what_json_does_not_know_is_named(value: object, kept: object) -> None:
    assert json.loads(info_text({"value": value})) == {"value": kept}


def test_what_does_not_fit_is_left_out_and_said() -> None:
    long = {f"part {number}": "x" * 1000 for number in range(9)}
    found = json.loads(info_text(long))
    assert found["part 2"] == "x" * 1000
    assert found["part 3"] == "left out: 1,012 characters"
    assert len(json.loads(info_text({str(n): n for n in range(1000)}))) == 65
    assert json.loads(info_text(UserDict(deep=[[[[[[[[1]]]]]]]]))) == {"deep": [[[[[[["…"]]]]]]]}


def test_a_large_info_costs_little() -> None:
    circle: list[Any] = [0]
    circle.append(circle)
    wide = {n: [list(range(64))] * 10**5 for n in range(64)}
    info = {"wide": wide, "circle": circle, "long": "x" * 10**8}
    began = time.process_time()
    assert len(info_text(info)) < MAX_INFO_CHARS
    assert time.process_time() - began < 1.0
