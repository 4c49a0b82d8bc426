"""Tables of returns and of shares by episode."""

from mage_async.pages.charts import MINUS, percent
from mage_async.pages.tables import _win_rows, episode_table, harder_tables
from mage_async.results.return_rows import EpisodeRow


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
    rows = _win_rows(heldout | {"won_within": [0.9, 0.95]}, None)
    assert [percent(share) for share in rows[1].values] == [percent(0.0), percent(0.25)]
