"""What a batch says of its engine's work: reuse by episode, and how versions are known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.lib import reference_pages
from mage_async.environments import catalogue
from mage_async.policy_version import VersionRun
from mage_async.results.metrics import (
    batch_metrics,
    check_names,
    injections_by_source,
)
from mage_async.tasks.league import name_of
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn

BOXES = catalogue.load("boxes")
"""An environment whose unit is an episode."""


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == reference_pages.metrics(), "python -m bench.lib.reference_pages metrics > it"


def turn(episode: int, start: int, num_reused: int) -> Turn:
    return Turn(Kind.ACT, episode, 0, 0, start, start + 2, 1.0, True, "rock", "", num_reused)


def trial(*versions: VersionRun) -> Trial:
    """Two episodes of two turns in a context of 20 tokens; each turn draws 2."""
    turns = (turn(0, 2, 0), turn(0, 6, 3), turn(1, 10, 8), turn(1, 15, 12))
    is_sampled = np.zeros(20, bool)
    for each in turns:
        is_sampled[each.start : each.stop] = True
    tokens, logprobs = np.zeros(20, np.int32), np.zeros(20, np.float32)
    segment = Segment(tokens, is_sampled, logprobs, versions)
    task = Task("rps", "cycle-0", 0)
    return Trial(task, 0, 2, (segment,), turns, num_prompt_tokens=33, num_reused_tokens=23)


def metrics(*trials: Trial) -> dict[str, object]:
    found = batch_metrics([Group(0, 0, trials)], BOXES, elapsed_s=1.0, num_episodes=3)
    check_names(found)
    return found


def test_reuse_is_said_of_every_episode_as_a_share_and_in_tokens_of_a_trial() -> None:
    found = metrics(trial(VersionRun(2, 0, 0)), trial(VersionRun(2, 0, 0)))
    assert found["prefix_hit_rate"] == pytest.approx(23 / 33)
    assert found["prefix_hit_rate_episode_1"] == pytest.approx(3 / 8)
    assert found["prefix_hit_rate_episode_2"] == pytest.approx(20 / 25)
    assert (found["reused_prompt_tokens_episode_1"], found["reused_prompt_tokens_episode_2"]) == (
        3.0,
        20.0,
    )


def test_an_episode_that_a_curriculum_has_not_reached_repeats_the_last_one() -> None:
    longer = replace(trial(VersionRun(2, 0, 0)), num_episodes=3)
    longer = replace(longer, turns=(*longer.turns, replace(turn(2, 17, 0), reward=9.0)))
    found = metrics(trial(VersionRun(2, 0, 0)), longer)
    assert found["return_by_episode"] == [2.0, 2.0, 5.5]


def test_tokens_are_shared_out_by_how_their_version_is_known() -> None:
    cut = trial(VersionRun(2, 0, 0), VersionRun(7, 1, 0, "segment"))  # one token of the second turn
    found = metrics(trial(VersionRun(2, 0, 0)), cut)
    assert found["exact_version_share"] == pytest.approx(11 / 16)
    assert found["segment_version_share"] == pytest.approx(5 / 16)
    assert found["reply_version_share"] == 0


def test_trials_that_were_played_again_are_counted_once() -> None:
    plain = trial(VersionRun(2, 0, 0))
    found = metrics(plain, replace(plain, num_retries=1), replace(plain, num_retries=3))
    assert found["retried_trials"] == 2


def test_injections_are_counted_by_the_side_that_wrote_them() -> None:
    plain = trial(VersionRun(2, 0, 0))
    written = replace(plain, num_injections=3)
    rivals = replace(written, task=replace(plain.task, member=name_of(4)))
    found = metrics(plain, written, written, rivals)
    assert found["injections_by_environment"] == 6
    assert found["injections_by_opponent"] == 3
    assert injections_by_source([found, found], "rps") == {"rps": 12, "rps, opponent": 6}
    assert not set(metrics(plain)) & {"injections_by_environment", "injections_by_opponent"}
