"""What a step says of actors and actions that go wrong."""

import numpy as np
import pytest

from mage_async.assembly import cut_length
from mage_async.config import config_file
from mage_async.policy_version import VersionRun
from mage_async.results.metrics import idle_share, over_bound_by_actor, truncated_share
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn


def turn(length: int, *, is_valid: bool, kind: Kind = Kind.ACT) -> Turn:
    return Turn(kind, 0, 0, 0, 2, 2 + length, 0.0, is_valid, "rock")


def group(grant: int, *turns: Turn, versions: tuple[VersionRun, ...] = ()) -> Group:
    """One trial of ten tokens, all but the first two sampled."""
    is_sampled = np.arange(10) >= 2
    tokens, logprobs = np.zeros(10, np.int32), np.zeros(10, np.float32)
    segment = Segment(tokens, is_sampled, logprobs, versions)
    return Group(grant, 0, (Trial(Task("rps", "copy-rock", 0), 0, 1, (segment,), turns),))


def test_an_action_is_truncated_where_it_is_as_long_as_allowed_and_invalid() -> None:
    long, short = turn(8, is_valid=False), turn(3, is_valid=False)
    whole, remark = turn(8, is_valid=True), turn(8, is_valid=False, kind=Kind.REFLECT)
    assert truncated_share([group(0, long, short, whole, remark)], 8) == pytest.approx(1 / 3)
    assert truncated_share([group(0, long)], None) == 0.0


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        (["environment.name=rps"], None),
        (["environment.name=rps", "transcript.forced_tags=open"], 8),
        (["environment.name=tests.environments.boxes:Boxes", "transcript.max_action_tokens=8"], 8),
        (["environment.name=agent:command", "environment.options.command=true {task}"], 128),
    ],
)
def test_only_the_transcripts_own_closing_tag_keeps_actions_from_being_cut_off(
    keys: list[str], length: int | None
) -> None:
    given = ["policy.source=models/mine", *keys]
    assert cut_length(config_file.load(config_file.find(None), given)) == length


def test_tokens_over_the_bound_are_told_by_the_actor_that_finished_the_group() -> None:
    fresh = group(1, versions=(VersionRun(2, 7, 7),))
    half = group(2, versions=(VersionRun(2, 4, 4), VersionRun(6, 6, 4)))  # 4 old, 4 young
    unknown = group(3, versions=(VersionRun(2, 0, 0),))
    actors = {1: "actor-0", 2: "actor-1"}
    found = over_bound_by_actor([fresh, half, unknown], actors, version=7, bound=2)
    assert found == {"actor-1": pytest.approx(4 / 24)}
    assert over_bound_by_actor([fresh, half], actors, version=7, bound=3) == {}


def test_idle_is_what_actors_wait_since_they_were_last_heard() -> None:
    before = {"a": {"engine": 5.0, "no grant": 1.0}, "b": {"engine": 9.0}}
    now = {"a": {"engine": 6.0, "no grant": 3.0, "no fresh weights": 1.0}, "b": {"engine": 9.0}}
    assert idle_share(before, now) == pytest.approx(3 / 4)
    assert idle_share(now, now) is None


def test_an_actor_that_was_started_again_is_not_counted_for_a_step() -> None:
    before = {"a": {"engine": 50.0}, "b": {"engine": 1.0}}
    now = {"a": {"engine": 1.0, "no grant": 3.0}, "b": {"engine": 1.0, "no grant": 1.0}}
    assert idle_share(before, now) == 1.0
