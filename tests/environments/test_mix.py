"""A mix: every group plays one part, by that part's own rules."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Play
from mage_async.environments.mix import Mix, component_of, label_of
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.tasks.task_stream import FINAL_SEED, TaskStream, evaluation_tasks, swapped
from mage_async.trajectory import Task

PARTS: list[dict[str, Any]] = [
    {"name": "boxes", "share": 2},
    {"name": "boxes", "label": "five", "options": {"boxes": 5}},
    {"name": "scout", "share": 0},
]
MIX = catalogue.load("mix", parts=PARTS)
assert isinstance(MIX, Mix)


def said(play: Play, actions: tuple[str, ...]) -> list[str]:
    return [play.observation, *(play.act(action).observation for action in actions)]


def test_a_task_is_played_as_its_part_plays_it_alone() -> None:
    actions = ("left", "right", "left", "left", "right")
    whole = MIX.begin(Task("mix", "five/left-left-left-right-right", 3), 1)
    alone = catalogue.load("boxes", boxes=5).begin(
        Task("boxes", "left-left-left-right-right", 3), 1
    )
    assert said(whole, actions) == said(alone, actions)


def test_members_families_and_swaps_carry_the_label() -> None:
    assert MIX.members("heldout")[:2] == (
        "boxes/left-left-left-left",
        "boxes/left-left-right-right",
    )
    assert MIX.swaps("boxes/left-left-left-left", "heldout") == ("boxes/right-right-right-right",)
    assert MIX.family("scout/red-red-red") == "scout/code"
    assert [part.label for part in MIX.parts] == ["boxes", "five", "scout"]
    assert component_of(MIX, "five/left-left-left-right-right").facts.max_turns == 5
    assert label_of(catalogue.load("rps"), "lose-paper") is None


def test_groups_are_shared_out_as_the_shares_say_and_none_goes_to_a_share_of_zero() -> None:
    stream = TaskStream(MIX, 4)
    tasks = [stream.task(number) for number in range(30)]
    for deck in range(10):
        labels = Counter(label_of(MIX, task.member) for task in tasks[3 * deck : 3 * deck + 3])
        assert labels == {"boxes": 2, "five": 1}
    assert tasks == [TaskStream(MIX, 4).task(number) for number in range(30)]


def test_each_part_has_the_tasks_that_it_has_alone() -> None:
    five = TaskStream(catalogue.load("boxes", boxes=5), 4)
    tasks = [TaskStream(MIX, 4).task(number) for number in range(30)]
    own = [task for task in tasks if label_of(MIX, task.member) == "five"]
    assert [replace(task, environment="boxes", member=task.member[5:]) for task in own] == [
        five.task(number) for number in range(10)
    ]
    mixed = evaluation_tasks(MIX, "heldout", 7, FINAL_SEED)
    scout = evaluation_tasks(catalogue.load("scout"), "heldout", 2, FINAL_SEED)
    assert [label_of(MIX, task.member) for task in mixed] == [
        *[part.label for part in MIX.parts] * 2,
        "boxes",
    ]
    assert mixed[2] == replace(scout[0], environment="mix", member=f"scout/{scout[0].member}")


def test_the_swapped_task_is_of_the_same_part() -> None:
    for task in evaluation_tasks(MIX, "heldout", 9, FINAL_SEED):
        other = swapped(task, MIX, "heldout")
        assert other.member != task.member
        assert label_of(MIX, other.member) == label_of(MIX, task.member)


def test_references_are_means_of_what_every_part_knows() -> None:
    values = [part.environment.references("train", 2) for part in MIX.parts]
    random = [each["random"][0] for each in values]
    found = MIX.references("train", 2)
    assert set(found) == {"random", "without_memory"}
    assert found["random"] == pytest.approx((sum(random) / 3,) * 2)


def test_facts_hold_for_every_part_and_bounds_are_per_unit() -> None:
    facts = MIX.facts
    assert (facts.max_turns, facts.units, facts.max_return, facts.min_return) == (5, 1, 1.0, -2.0)
    assert {"left", "gold", "scout"} <= set(facts.words)
    assert len(facts.words) == len(set(facts.words))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([{"name": "boxes"}, {"name": "boxes"}], "two parts are called 'boxes': give one a"),
        ([{"name": "boxes", "share": 0}], "no part has a `share` above 0"),
        ([{"name": "boxes", "share": 0.5}], "`share` must be a whole number from 0, got 0.5"),
        ([{"name": "boxes", "boxes": 5}], "a part has no key `boxes`; there are name, label"),
        (["boxes"], "a part must be a table with the `name` it plays, got 'boxes'"),
        ([{"name": "mix", "options": {"parts": PARTS}}], "a mix cannot be a part of another"),
        ([{"name": "boxes", "label": "a/b"}], "a `label` must be one word without a slash"),
        ([{"name": "boxes", "options": 5}], "`options` of a part must be a table, got 5"),
        (5, "`parts` must be a list of tables, got 5"),
    ],
)
def test_what_is_no_mix_is_refused(parts: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        catalogue.load("mix", parts=parts)


def test_a_member_of_no_part_is_a_fault() -> None:
    assert isinstance(MIX, Mix)
    with pytest.raises(EnvironmentFault, match="'lose' must begin with one of boxes, five, scout"):
        MIX.begin(Task("mix", "lose", 0), 0)
