"""Tables of returns and of shares by episode."""

import pytest

from mage_async.pages.charts import MINUS, percent
from mage_async.pages.tables import (
    MOST_MEMBERS,
    MOST_SHOWN,
    Table,
    _wins_table,
    episode_table,
    family_tables,
    harder_tables,
)
from mage_async.results.summary import EpisodeRow


def test_every_episode_of_the_longest_row_has_a_head() -> None:
    table = episode_table("set", [EpisodeRow("long", [1.0, 2.0]), EpisodeRow("short", [1.0])])
    assert table.heads == ["set", "episode 1", "episode 2"]


def test_returns_of_harder_tasks_have_a_sign() -> None:
    score = {
        "return_by_episode": [-0.25, 0.5],
        "ci95_by_episode": [0.1, 0.1],
        "won_by_episode": [0.0, 1.0],
    }
    (row,) = harder_tables({"rungs": [{"label": "4 doors", "score": score}]})["table"].rows
    assert [cell.text for cell in row.cells] == [f"{MINUS}0.250", "+0.500"]


def test_rounding_leaves_no_share_of_draws() -> None:
    heldout = {"won_by_episode": [0.9, 0.5], "lost_by_episode": [0.1, 0.25]}
    table = _wins_table(heldout | {"won_within": [0.9, 0.95]}, None)
    assert table is not None
    assert [cell.text for cell in table.rows[1].cells] == [percent(0.0), percent(0.25)]


@pytest.mark.parametrize(
    ("heldout", "blind", "is_shown"),
    [(0.999, 1.0, False), (0.0, 0.0, False), (0.999, 0.9, True), (0.6, 0.6, True)],
)
def test_wins_that_tell_no_good_play_from_bad_are_not_shown(
    heldout: float, blind: float, is_shown: bool
) -> None:
    played = {
        "won_by_episode": [heldout] * 2,
        "lost_by_episode": [0.0] * 2,
        "won_within": [1.0] * 2,
    }
    assert bool(_wins_table(played, played | {"won_by_episode": [blind] * 2})) == is_shown


def test_of_many_members_those_with_the_lowest_and_the_highest_returns_are_listed() -> None:
    returns = {f"task {number}": [0.0, float(number % 256)] for number in range(300, 44, -1)}
    scores = {"heldout": {"by_family": {}, "by_member": returns}}
    (found,) = family_tables(scores, 256.0)
    members = found["members"]
    assert isinstance(members, Table)
    last = [[row.cells[-1].text for row in found[key].rows] for key in ("members", "others")]
    assert list(map(len, last)) == [MOST_SHOWN, MOST_MEMBERS - MOST_SHOWN]
    for each in last:
        assert each == sorted(each, key=lambda text: float(text.replace(MINUS, "-")))
    assert [(each[0], each[-1]) for each in last] == [("0", "+255"), ("+10", "+245")]
    assert found["num_members"] == 256
    few = dict(list(returns.items())[:3])
    (found,) = family_tables({"train": {"by_family": {}, "by_member": few}}, 256.0)
    assert isinstance(found["members"], Table)
    assert [row.label for row in found["members"].rows] == list(few)
    assert not found["others"].rows
