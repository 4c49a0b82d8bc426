"""An actor between a learner in memory and an engine without a model; the test is the learner.

Longer than most: every test speaks the learner's part through the same site.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from mage_async.assembly import WORDS
from mage_async.completion import Prompt, Sampling
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment
from mage_async.errors import ContextFull, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.protocol.messages import (
    MAX_REASON_CHARS,
    Acknowledge,
    Goodbye,
    GroupDrop,
    GroupGrant,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    TrialResult,
    Unwanted,
    Welcome,
)
from mage_async.trajectory import Task
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.prompts import prompts_for
from mage_async.trials.trial_rules import TrialRules
from mage_services.actor import actor as actor_module
from mage_services.actor.actor import Actor
from mage_services.actor.rollout import Stage
from tests.helpers.memory_channels import MemoryLearnerChannel
from tests.helpers.scripted_engine import (
    Answer,
    Answers,
    Pace,
    ScriptedEngine,
    UniformWords,
    at_once,
)

PATIENCE_S = 30.0
"""For a loaded machine; nothing here takes a tenth of a second on an idle one."""
TRIALS = 2
FOREVER_S = 3600.0

MISCHIEF = """
from mage_async.environments.rps.game import Rps


class Mischief(Rps):
    def begin(self, task, episode):
        if task.seed == 13 and episode == 1:
            raise ZeroDivisionError("the dealer is drunk" + "!" * 5000)
        return super().begin(task, episode)
"""


MEMBER = load("rps").members("train")[0]


def grant(number: int, **changed: object) -> GroupGrant:
    """A group of a trial or two; it has all the time it needs."""
    plain = GroupGrant(
        grant=number,
        epoch=0,
        environment="rps",
        member=MEMBER,
        seat=0,
        seed=5,
        num_trials=TRIALS,
        num_episodes=3,
        version=0,
        deadline_s=FOREVER_S,
    )
    return msgspec.structs.replace(plain, **changed)


def welcome(version: int = 0) -> Welcome:
    return Welcome(version=version, weights_path="no-weights")


def publication(version: int) -> Publication:
    return Publication(version=version, path="no-weights", digest="none")


def acknowledge(result: TrialResult) -> Acknowledge:
    return Acknowledge(
        grant=result.grant, epoch=result.epoch, trial=result.trial.index, is_duplicate=False
    )


def slow(*grants: int) -> Pace:
    """Trials of these groups never end."""
    return lambda trial: FOREVER_S if int(trial.split(".")[0]) in grants else 0.0


class Site:
    """An actor that has been welcomed with version 0, and the learner's end of its channel."""

    def __init__(
        self, environment: Environment, chat: ChatFormat, pace: Pace, answers: Answers | None
    ) -> None:
        self.began = asyncio.get_running_loop().time()
        parser = ActionParser("both")
        moves = ("rock", "paper", "scissors")
        self.engine = ScriptedEngine(answers or UniformWords(chat, parser, moves), pace, version=0)
        words = prompts_for(environment, 3, rules=False)
        sampling = Sampling(max_tokens=8192)
        rules = TrialRules(3, sampling, 1, parser, words, keeps_history=True, reflects=False)
        self.learner = MemoryLearnerChannel()
        hello = Hello(role="actor", name="actor-0", build="test", config_digest="test", credits=8)
        self._peer = self.learner.connect(hello)
        stage = Stage(environment, rules, chat, self.engine)
        self.actor = asyncio.ensure_future(Actor(self._peer, stage, "actor-0").run(welcome()))

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.learner.send(self._peer.peer, message)

    async def hear(self) -> Message:
        """The actor's next message but heartbeats and what it has loaded."""
        while True:
            _, message = await self.learner.receive()
            if not isinstance(message, Heartbeat | Hello | Loaded):
                return message

    async def beat(self) -> Heartbeat:
        """The actor's next heartbeat."""
        while True:
            _, message = await self.learner.receive()
            if isinstance(message, Heartbeat):
                return message

    async def loaded(self) -> int:
        """The version that the actor says it has loaded next."""
        while True:
            _, message = await self.learner.receive()
            if isinstance(message, Loaded):
                return message.version

    async def results(self, count: int) -> list[TrialResult]:
        """The next messages, all of them results."""
        heard = [await self.hear() for _ in range(count)]
        results = [message for message in heard if isinstance(message, TrialResult)]
        assert len(results) == count, heard
        return results

    async def goodbye(self) -> str:
        """End the actor; what its `run` returned."""
        self.say(Goodbye(reason="the run is complete"))
        return await self.actor


Run = Callable[..., None]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory = tmp_path_factory.mktemp("policy")
    save_tokenizer(build_tokenizer([*load("rps").facts.words, *WORDS]), directory)
    return load_chat(directory)


@pytest.fixture
def run(chat: ChatFormat) -> Run:
    """Run a test beside an actor, and end the actor."""

    def begin(
        main: Callable[[Site], Awaitable[None]],
        *,
        environment: str = "rps",
        pace: Pace = at_once,
        answers: Answers | None = None,
    ) -> None:
        async def whole() -> None:
            site = Site(load(environment), chat, pace, answers)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await main(site)
            finally:
                site.actor.cancel()
                await asyncio.wait([site.actor])

        asyncio.run(whole())

    return begin


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


def test_an_environment_that_raises_costs_its_group_and_not_the_actor(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, seed=13, epoch=1))
        drop = await site.hear()
        assert isinstance(drop, GroupDrop)
        assert (drop.grant, drop.epoch) == (0, 1)
        assert drop.reason.startswith(
            f"rps against {MEMBER!r}, seed 13: raised ZeroDivisionError: the dealer is drunk!"
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


def groups_being_played() -> set[str]:
    return {t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("group ")}


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


def test_heartbeats_tell_what_the_engine_did_and_where_the_time_went(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0))
        await site.results(2)
        while (beat := await site.beat()).counters["num_completions"] < 24:
            assert beat.name == "actor-0"
        states = {"no grant", "no fresh weights", "engine", "environment"}
        assert set(beat.blocked_s) == states
        assert beat.blocked_s["engine"] >= 0.012  # 12 turns, one after the other
        age_s = asyncio.get_running_loop().time() - site.began
        assert sum(beat.blocked_s.values()) <= age_s + 1e-6

    monkeypatch.setattr(actor_module, "HEARTBEAT_S", 0.005)
    run(main, pace=lambda trial: 0.001)
