"""What costs an actor one group, and what ends it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from mage_async.completion import Prompt
from mage_async.errors import ContextFull, RunError
from mage_async.protocol.messages import MAX_REASON_CHARS, GroupDrop, TrialResult
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.actor_site import MEMBER, Run, Site, grant, groups_being_played, slow, welcome
from tests.helpers.scripted_engine import Answer

MISCHIEF = """
from mage_async.environments.games.rps import Rps


class Mischief(Rps):
    def begin(self, task, episode):
        if task.seed == 13 and episode == 1:
            raise ZeroDivisionError("the dealer is drunk" + "!" * 5000)
        return super().begin(task, episode)
"""


def test_an_environment_that_raises_costs_its_group_and_not_the_actor(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, seed=13, epoch=1))
        drop = await site.hear()
        assert isinstance(drop, GroupDrop)
        assert (drop.grant, drop.epoch) == (0, 1)
        assert drop.reason.startswith(
            f"rps, task {MEMBER}, seed 13, episode 2: begin() raised ZeroDivisionError: the dealer"
        )
        assert len(drop.reason) == MAX_REASON_CHARS
        site.say(grant(1))
        assert {result.grant for result in await site.results(2)} == {1}
        assert site.engine.statistics().num_contexts == 0

    (tmp_path / "mischief.py").write_text(MISCHIEF)
    monkeypatch.syspath_prepend(tmp_path)
    run(main, environment="mischief:Mischief")


def test_defect_5_a_trial_that_outgrows_the_engine_costs_its_group_and_not_the_run(
    run: Run, chat: ChatFormat
) -> None:
    def outgrown(prompt: Prompt, turn: int) -> Answer:
        if prompt.context.startswith("0."):
            raise ContextFull("a prompt of 9,000 tokens does not fit")
        return Answer(chat.encode(" rock"), -1.0)

    async def main(site: Site) -> None:
        site.say(grant(0), grant(1))
        heard = [await site.hear() for _ in range(3)]
        (drop,) = (message for message in heard if isinstance(message, GroupDrop))
        assert (drop.grant, drop.reason) == (0, "a prompt of 9,000 tokens does not fit")
        assert {m.grant for m in heard if isinstance(m, TrialResult)} == {1}

    run(main, answers=outgrown)


def test_a_trial_that_no_message_may_hold_costs_its_group_and_not_the_actor(
    run: Run, chat: ChatFormat
) -> None:
    def endless(prompt: Prompt, turn: int) -> Answer:
        is_long = prompt.context.startswith("0.0.1.") and turn == 2
        return Answer(chat.encode(" rock" * (7000 if is_long else 1)), -1.0)

    async def main(site: Site) -> None:
        site.say(grant(0), grant(1))
        heard = [await site.hear() for _ in range(4)]
        (drop,) = (message for message in heard if isinstance(message, GroupDrop))
        assert (drop.grant, drop.epoch) == (0, 0)
        assert drop.reason == "trial 1 cannot be sent: turn 2 has over 32768 characters of text"
        sent = {(m.grant, m.trial.index) for m in heard if isinstance(m, TrialResult)}
        assert sent == {(0, 0), (1, 0), (1, 1)}
        site.say(welcome(), grant(2))
        again = {(m.grant, m.trial.index) for m in await site.results(5)}
        assert again == {*sent, (2, 0), (2, 1)}  # the other is not sent again

    run(main, answers=endless)


def test_an_actor_drops_the_groups_that_it_may_not_keep(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0), grant(1, epoch=2), grant(2))
        await site.results(2)  # so all have begun
        site.say(msgspec.structs.replace(welcome(), keeps=((1, 2),)))
        again = await site.results(2)  # what was not acknowledged
        assert {result.grant for result in again} == {2}
        site.say(grant(3))
        assert {result.grant for result in await site.results(2)} == {3}
        assert groups_being_played() - {"group 3"} == {"group 1"}

    run(main, pace=slow(0, 1))


def test_goodbye_ends_the_actor_and_all_it_plays(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0), grant(1, version=7), grant(2))
        await site.results(2)  # so the other two have begun
        assert await site.goodbye() == "the run is complete"
        assert site.engine.statistics().num_contexts == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main, pace=slow(0))


def test_a_cancelled_actor_abandons_its_trials_and_sends_nothing_of_them(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0), grant(2))
        await site.results(2)
        site.actor.cancel()
        await asyncio.wait([site.actor])
        assert site.actor.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main, pace=slow(0))


def test_an_engine_that_fails_ends_the_actor(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0))
        await asyncio.wait([site.actor])
        with pytest.raises(ExceptionGroup) as caught:
            site.actor.result()
        assert caught.group_contains(RuntimeError, match="the model is broken")

    def broken(prompt: Prompt, turn: int) -> Answer:
        raise RuntimeError("the model is broken")

    run(main, answers=broken)


def test_a_message_that_is_not_for_actors_ends_the_actor(run: Run) -> None:
    async def main(site: Site) -> None:
        site.say(GroupDrop(grant=0, epoch=0, reason=""))
        await asyncio.wait([site.actor])
        with pytest.raises(ExceptionGroup) as caught:
            site.actor.result()
        assert caught.group_contains(RunError, match="an actor cannot take GroupDrop")

    run(main)
