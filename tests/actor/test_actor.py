"""An actor plays what it is granted, and sends every trial until that is acknowledged."""

import asyncio
from itertools import count
from pathlib import Path

import msgspec
import pytest

from mage_async.completion import Prompt
from mage_async.protocol.messages import Hello, Unwanted
from mage_async.trajectory import Task
from mage_services.actor import actor
from mage_services.transport.access_control import AccessControl
from tests.helpers.actor_site import (
    FOREVER_S,
    MEMBER,
    TRIALS,
    Run,
    Site,
    acknowledge,
    grant,
    groups_being_played,
    publication,
    slow,
    welcome,
)
from tests.helpers.scripted_engine import (
    Answer,
)


def test_every_trial_of_a_granted_group_arrives(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(4, epoch=2, num_trials=3))
        results = await site.results(3)
        assert {(result.grant, result.epoch) for result in results} == {(4, 2)}
        assert {result.trial.index for result in results} == {0, 1, 2}
        assert {result.trial.task for result in results} == {Task("rps", MEMBER, 5, 0)}
        assert [len(result.trial.turns) for result in results] == [12] * 3
        assert site.engine.statistics().num_contexts == 0

    run(main)


def test_groups_are_played_side_by_side(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0), grant(1))
        assert {result.grant for result in await site.results(2)} == {1}

    run(main, pace=slow(0))


def test_a_trial_that_the_learner_holds_is_not_played_again(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, epoch=1, num_trials=3, held=(0, 2)))
        (result,) = await site.results(1)
        assert result.trial.index == 1
        site.say(grant(1))
        assert {result.grant for result in await site.results(2)} == {1}

    run(main)


def test_a_trial_that_was_sent_is_not_played_again_before_it_is_acknowledged(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, num_trials=3))
        first, *_ = await site.results(3)
        site.say(acknowledge(first), grant(0, epoch=1, num_trials=3))
        (again,) = await site.results(1)
        assert (again.epoch, again.trial.index) == (1, first.trial.index)
        site.say(grant(1))
        assert {result.grant for result in await site.results(2)} == {1}

    run(main)


def test_both_seats_of_a_play_arrive_as_one_result(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, epoch=1, member="policy", num_trials=6, held=(2, 3)))
        results = await site.results(2)
        assert {result.trial.index for result in results} == {0, 4}
        for result in results:
            one, other = result.trials()
            assert other.index == one.index + 1
            assert (one.task, other.task) == (Task("rps", "policy", 5), Task("rps", "policy", 5, 1))
            assert [len(trial.turns) for trial in (one, other)] == [12, 12]
        site.say(acknowledge(results[0]), welcome())
        (again,) = await site.results(1)
        turns = [[trial.turns for trial in each.trials()] for each in (again, results[1])]
        assert turns[0] == turns[1]
        assert site.engine.statistics().num_contexts == 0

    run(main)


def test_what_is_not_acknowledged_is_sent_again_to_a_learner_that_welcomes_anew(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, num_trials=3))
        first, *others = await site.results(3)
        site.say(acknowledge(first), welcome())
        again = await site.results(2)
        assert [(r.grant, r.epoch, r.trial.index) for r in again] == [
            (r.grant, r.epoch, r.trial.index) for r in others
        ]

    run(main)


def test_what_is_acknowledged_is_forgotten(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0))
        site.say(*map(acknowledge, await site.results(2)), welcome(), grant(1))
        assert {result.grant for result in await site.results(2)} == {1}

    run(main)


def test_no_prompt_is_drawn_before_weights_as_new_as_the_grant_are_loaded(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, version=2), grant(1))
        assert {result.grant for result in await site.results(2)} == {1}
        site.say(publication(1), grant(2))
        assert {result.grant for result in await site.results(2)} == {2}
        site.say(publication(2))
        results = await site.results(2)
        runs = [run for result in results for run in result.trial.segments[0].versions]
        assert {result.grant for result in results} == {0}
        assert {(run.policy, run.kv) for run in runs} == {(2, 2)}

    run(main)


def test_weights_that_come_in_the_middle_of_a_trial_draw_the_rest_of_it(run: Run) -> None:
    async def main(site: Site) -> None:
        sites.append(site)
        site.say(grant(0, num_trials=1))
        (result,) = await site.results(1)
        policies = [run.policy for run in result.trial.segments[0].versions]
        assert policies == [0, 1]

    def publish_at_the_fifth_turn(prompt: Prompt, turn: int) -> Answer:
        if turn == 4:
            sites[0].say(publication(1))
        return Answer([1], 0.0)

    sites: list[Site] = []
    run(main, answers=publish_at_the_fifth_turn, pace=lambda trial: 0.001)


def test_a_group_granted_again_to_its_own_actor_is_played_anew(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0), grant(1))
        await site.results(2)
        site.say(welcome(), grant(0, epoch=1))
        heard = await site.results(2)
        assert {(result.grant, result.epoch) for result in heard} == {(1, 0)}  # sent again
        assert groups_being_played() == {"group 0"}

    run(main, pace=slow(0))


def test_an_actor_says_what_it_draws_with_after_each_load_and_to_a_learner_that_is_new(
    run: Run,
) -> None:
    async def main(site: Site) -> None:
        assert await site.loaded() == 0
        site.say(publication(1), publication(2), welcome(2))
        assert [await site.loaded() for _ in range(3)] == [1, 2, 2]

    run(main)


def test_an_actor_that_is_loading_weights_is_known_to_a_restarted_learner_and_keeps_its_groups(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "HEARTBEAT_S", 0.02)

    async def main(site: Site) -> None:
        assert await site.loaded() == 0
        site.say(grant(0), grant(1))
        await site.results(TRIALS)
        is_loading, may_load = asyncio.Event(), asyncio.Event()
        load = site.engine.load

        async def load_slowly(version: int, path: Path) -> None:
            is_loading.set()
            await may_load.wait()
            await load(version, path)

        monkeypatch.setattr(site.engine, "load", load_slowly)
        site.say(publication(1))
        await is_loading.wait()
        site.learner.access = AccessControl("test", "test")  # the learner restarts
        _, hello = await site.learner.receive()
        assert isinstance(hello, Hello)
        site.say(msgspec.structs.replace(welcome(1), keeps=((0, 0),)), grant(0))
        may_load.set()
        assert [await site.loaded(), await site.loaded()] == [1, 1]
        assert groups_being_played() == {"group 0"}

    run(main, pace=slow(0))


def test_an_unwanted_trial_is_forgotten(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0))
        first, second = await site.results(2)
        index = first.trial.index
        site.say(Unwanted(grant=0, epoch=0, trial=index, reason="never granted"), welcome())
        (again,) = await site.results(1)
        assert again.trial.index == second.trial.index
        assert await site.goodbye() == "the run is complete"

    run(main)


def test_heartbeats_tell_what_the_engine_did_and_where_the_time_went(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0))
        await site.results(2)
        while (beat := await site.beat()).counters["num_completions"] < 24:
            assert beat.name == "actor-0"
        states = {"no grant", "no fresh weights", "engine", "trials", "environment", "other"}
        assert set(beat.blocked_s) == states
        assert beat.blocked_s["engine"] >= 0.012  # 12 turns, one after the other
        age_s = asyncio.get_running_loop().time() - site.began
        assert sum(beat.blocked_s.values()) <= age_s + 1e-6
        assert beat.blocked_s["trials"] > 0.0
        assert beat.blocked_s["environment"] == 0.0  # the game makes no calls

    monkeypatch.setattr(actor, "HEARTBEAT_S", 0.005)
    run(main, pace=lambda trial: 0.001)


def test_heartbeats_tell_how_many_turns_unfinished_groups_have_had(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(3, epoch=1))
        while (beat := await site.beat()).turns != ((3, 1, 5),):
            assert sum(num_turns for *_, num_turns in beat.turns) < 5

    turns = count()
    monkeypatch.setattr(actor, "HEARTBEAT_S", 0.005)
    run(main, pace=lambda trial: 0.0 if next(turns) < 5 else FOREVER_S)
