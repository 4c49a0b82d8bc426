"""An actor with its real engine plays groups against a version of the policy."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import replay
from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.games.kuhn import FACING, OPEN
from mage_async.errors import PolicyError, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.initial_policy import prepare_policy
from mage_async.protocol.codec import decode
from mage_async.protocol.journal_records import (
    Commit,
    Granted,
    Published,
    first_segment_header,
)
from mage_async.protocol.messages import (
    Goodbye,
    GroupGrant,
    Hello,
    Loaded,
    Message,
    Publication,
    Rival,
    TrialResult,
    Welcome,
)
from mage_async.protocol.trial_arrays import Frame
from mage_async.tasks.league import League, name_of
from mage_async.tasks.task_stream import MatchedTasks
from mage_async.trajectory import Task, Trial, trial_as_dict
from mage_async.trials.human_play import whole_text
from mage_services.actor.actor import Actor
from mage_services.actor.play_session import play_person_and_agent
from mage_services.actor.rollout import Stage
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.learner import check_rivals
from mage_services.weights.weight_store import UNKNOWN_PEERS, WeightFiles, WeightStore
from tests.helpers.coordinator_site import coordinator_config, result
from tests.helpers.memory_channels import MemoryJournal, MemoryLearnerChannel

NUM_TRIALS = 4
CHANGES = (
    "warm_start.steps=0",
    "population.rivals=0.5",
    "population.every=2",
    "population.kept=2",
    "admission.groups_per_step=2",
    f"admission.trials_per_group={NUM_TRIALS}",
)


@pytest.fixture(scope="module")
def config() -> Config:
    return config_file.load(config_file.find("kuhn"), list(CHANGES))


@pytest.fixture(scope="module")
def policy(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "policy"
    prepare_policy(config, folder, lambda progress: None)
    save_file(changed(folder, seed=0), folder / "model.safetensors", {"format": "pt"})
    return folder


def changed(policy: Path, seed: int) -> dict[str, torch.Tensor]:
    """Other weights, which speak almost only in the words of the four actions."""
    source = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=source)
        for name, tensor in load_file(policy / "model.safetensors").items()
    }
    chat = load_chat(policy)
    words = [chat.encode(f" {word}")[0] for word in (*OPEN, *FACING)]
    embedding = tensors["model.embed_tokens.weight"]
    embedding[words] = torch.randn(4, embedding.shape[1], generator=source)
    return tensors


@pytest.fixture(scope="module")
def rivals(policy: Path) -> list[Path]:
    """Weights of two versions."""
    files = [policy.parent / f"v{version}.safetensors" for version in (7, 8)]
    for seed, file in enumerate(files, 1):
        save_file(changed(policy, seed), file)
    return files


class Wire:
    """An actor's channel whose other end is the test."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.results: asyncio.Queue[Trial] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        assert not isinstance(message, TrialResult), "results are sent as frames"

    async def send_frames(self, frames: list[Frame]) -> None:
        message = decode(frames)
        assert isinstance(message, TrialResult)
        await self.results.put(message.trial)


def grant(number: int, version: int | None, path: Path | None = None) -> GroupGrant:
    rival = None if version is None else Rival(version=version, path=str(path))
    return GroupGrant(
        grant=number,
        epoch=0,
        environment="kuhn",
        member="bet-jack-call-queen-king" if version is None else name_of(version),
        seat=number % 2,
        seed=number,
        num_trials=NUM_TRIALS,
        num_episodes=3,
        version=0,
        deadline_s=60.0,
        rival=rival,
    )


def played(
    config: Config, policy: Path, grants: list[GroupGrant], max_contexts: int = 80
) -> dict[tuple[int, int], Trial]:
    """All trials of some groups, by seed of the task and index."""
    chat = load_chat(policy)
    environment = environment_of(config)
    rules = trial_config_of(config, environment, chat, 3)

    async def main() -> list[Trial]:
        wire = Wire()
        few = msgspec.structs.replace(config.engine, max_contexts=max_contexts)
        async with asyncio.timeout(60), EmbeddedEngine(policy, few) as engine:
            actor = Actor(wire, Stage(environment, rules, chat, engine), "a")
            for each in grants:
                await wire.inbox.put(each)
            welcome = Welcome(version=0, weights_path=str(policy))
            living = asyncio.create_task(actor.run(welcome, wire.inbox))
            waiting = asyncio.gather(*(wire.results.get() for _ in range(NUM_TRIALS * len(grants))))
            await asyncio.wait({living, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                await wire.inbox.put(Goodbye(reason="enough"))
            await living
            assert not engine._past_policies._num_users
            return waiting.result()

    return {(each.task.seed, each.index): each for each in asyncio.run(main())}


def texts(trials: dict[tuple[int, int], Trial], policy: Path) -> dict[tuple[int, int], list[str]]:
    chat = load_chat(policy)
    return {key: trial_as_dict(trial, chat.decode, 0)["contexts"] for key, trial in trials.items()}


def test_a_group_against_a_version_is_the_same_whoever_plays_it_beside_whatever(
    config: Config, policy: Path, rivals: list[Path]
) -> None:
    own = [grant(number, 7, rivals[0]) for number in (3, 4, 5)]
    alone = played(config, policy, own)
    assert set(alone) == {(n, index) for n in (3, 4, 5) for index in range(NUM_TRIALS)}
    crowd = [grant(1, 8, rivals[1]), grant(2, None), *own]
    beside = played(config, policy, crowd, max_contexts=6)
    said = texts(alone, policy)
    assert {key: text for key, text in texts(beside, policy).items() if key in said} == said
    for trial in alone.values():
        assert trial.task.member == "policy-7"
        drawn = {run.policy for segment in trial.segments for run in segment.versions}
        assert drawn == {0}, "a rival's tokens are nobody's to train on"
        assert trial.num_extension_faults == 0
    moves = {f"opp {word}" for word in (*OPEN, *FACING)}
    spoke = "".join(text for contexts in said.values() for text in contexts)
    assert any(move in spoke for move in moves), spoke
    other = played(config, policy, [grant(number, 8, rivals[1]) for number in (3, 4, 5)])
    assert texts(other, policy) != said, "another version plays otherwise"


def test_a_version_whose_weights_are_gone_ends_the_actor_with_their_name(
    config: Config, policy: Path
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        played(config, policy, [grant(1, 9, policy.parent / "v9.safetensors")])
    assert caught.group_contains(PolicyError, match=r"v9\.safetensors", depth=None)


class Site:
    """A coordinator as the learner makes it, after any records of an earlier life."""

    def __init__(self, config: Config, weights: WeightFiles, records: list) -> None:
        rules = config.admission
        self.league = League(config.population, environment_of(config).facts)
        self.ledger = Ledger(rules.groups_per_step, rules.max_staleness, NUM_TRIALS)
        self.journal, self.channel = MemoryJournal(), MemoryLearnerChannel()
        for _ in replay(records, self.ledger, self.league):
            continue
        environment = environment_of(config)
        tasks = MatchedTasks(environment, self.league, config)
        self.coordinator = Coordinator(
            self.channel,
            self.ledger,
            self.journal,
            tasks,
            coordinator_config(60.0, steps=9),
            lambda: 1.0,
            WeightStore(weights),
            self.league,
        )

    async def grants(self, version: int) -> list[GroupGrant]:
        """What an actor is granted that says hello."""
        self.coordinator.open(Publication(version=version, path="w", digest="d"))
        self.coordinator.weights.leases.release(UNKNOWN_PEERS)
        hello = Hello(role="actor", name="a", build="test", config_digest="test", group_quota=99)
        peer = self.channel.connect(hello)
        self.coordinator.take(*await self.channel.receive())
        assert isinstance(await peer.receive(), Welcome)
        return [await peer.receive() for _ in range(self.ledger.num_incomplete())]


def test_a_restarted_learner_grants_what_it_would_have(
    config: Config, policy: Path, tmp_path: Path
) -> None:
    weights = WeightFiles(tmp_path)
    records = [first_segment_header(0, 0)]
    for version in range(7):
        if version:
            records.append(Commit(version=version, grants=(), digest="d", tensors={}, time_s=1.0))
        records.append(
            Published(version=version, path=str(weights.announced_path(version)), digest="d")
        )
        weights.announced_path(version).write_bytes(b"weights")

    async def main() -> None:
        first = Site(config, weights, records)
        assert first.league.rivals() == (0, 6)
        before = await first.grants(6)
        against = [each for each in before if each.rival is not None]
        assert against
        for each in against:
            assert each.rival.path == str(weights.announced_path(each.rival.version).resolve())
            assert each.member == name_of(each.rival.version)
        granted = [each for each in first.journal.durable_records() if isinstance(each, Granted)]
        assert [record.grant for record in granted] == before
        fresh = Site(config, weights, records)  # it died before anything was granted
        assert [each for each in await fresh.grants(6)] == before
        again = Site(config, weights, [*records, *granted])  # or afterwards
        assert again.league.state() == first.league.state()
        assert again.coordinator.rivals() == first.coordinator.rivals() == {0, 6}
        assert again.coordinator.unused(list(range(7))) == [1, 2, 3, 4, 5]

    asyncio.run(main())


@pytest.mark.parametrize("every", [0, 2])
def test_whom_a_group_meets_does_not_depend_on_when_weights_are_on_disk(
    config: Config, tmp_path: Path, every: int
) -> None:
    """Between a step and its publication a peer may speak: it is granted nothing yet."""
    rules = msgspec.structs.replace(config.population, every=every)
    config = msgspec.structs.replace(config, population=rules)

    async def main() -> None:
        site = Site(config, WeightFiles(tmp_path), [first_segment_header(0, 0)])
        site.league.published(0)
        assert len(await site.grants(0)) == 4
        for version in (1, 2):
            oldest = tuple(sorted(site.ledger._pending.keys())[:2])
            step = Commit(version=version, grants=oldest, digest="d", tensors={}, time_s=1.0)
            site.ledger.replay_commit(step)
            site.coordinator.tick()
            is_taken = site.league.becomes_rival(version)
            assert site.ledger.num_incomplete() == (2 if is_taken else 4)
            site.league.published(version)
            site.coordinator.publish(Publication(version=version, path="w", digest="d"))
            assert site.ledger.num_incomplete() == 4
            assert site.league.rivals()[-1] == (version if is_taken else 0)

    asyncio.run(main())


@pytest.mark.parametrize("every", [0, 1])
def test_a_learner_killed_in_a_step_misses_no_weights_of_whom_its_batch_met(
    config: Config, tmp_path: Path, every: int
) -> None:
    """The batch is complete and not committed when a new version takes its opponent's place."""
    rules = msgspec.structs.replace(config.population, rivals=1.0, every=every, kept=1)
    config = msgspec.structs.replace(config, population=rules)
    weights = WeightFiles(tmp_path)
    there = [Published(version=v, path=str(weights.announced_path(v)), digest="d") for v in (0, 1)]
    for version in (0, 1):
        weights.announced_path(version).write_bytes(b"weights")

    async def main() -> None:
        records = [first_segment_header(0, 0), there[0]]
        first = Site(config, weights, records)
        granted = await first.grants(0)
        assert [each.member for each in granted] == ["policy-0"] * 4
        *others, last = [result(each, index) for each in granted for index in range(NUM_TRIALS)]
        for message in (Loaded(version=0), *others):
            first.coordinator.take("a/0", message)
        assert first.coordinator.ledger.take_batch() is not None
        step = Commit(version=1, grants=(), digest="d", tensors={}, time_s=1.0)
        first.ledger.replay_commit(step)
        for record in (step, there[1]):
            first.journal.append(record)
        first.league.published(1)
        first.coordinator.publish(Publication(version=1, path="w", digest="d"))
        first.coordinator.take("a/0", Loaded(version=1))
        assert first.coordinator.unused([0, 1]) == [], "one trial against it is still played"
        first.coordinator.take("a/0", last)
        assert first.coordinator.ledger.take_batch() is not None
        weights.remove(first.coordinator.unused([0, 1]))
        assert weights.versions() == [1]
        again = Site(config, weights, [*records, *first.journal.durable_records()])
        check_rivals(again.coordinator.rivals(), again.coordinator.weights)
        assert again.coordinator.ledger.take_batch() is not None, (
            "its groups are there to be trained"
        )

    asyncio.run(main())


def test_weights_that_the_journal_names_and_that_are_gone_are_named(tmp_path: Path) -> None:
    weights = WeightFiles(tmp_path)
    weights.announced_path(2).write_bytes(b"weights")
    check_rivals({2}, WeightStore(weights))
    with pytest.raises(RunError, match=r"whose weights are gone: .*v000004\.safetensors"):
        check_rivals({2, 4}, WeightStore(weights))


def test_a_trial_against_a_version_can_be_watched_or_played_by_a_person(
    config: Config,
    policy: Path,
    rivals: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`mage play RUN_DIR --member policy-7`, with and without `--watch`."""
    chat, environment = load_chat(policy), environment_of(config)
    weights, task = WeightFiles(tmp_path), Task("kuhn", "policy-7", 3, 1)
    weights.announced_path(7).write_bytes(rivals[0].read_bytes())

    def make() -> Stage:
        rules = trial_config_of(config, environment, chat, 2)
        return Stage(environment, rules, chat, EmbeddedEngine(policy, config.engine))

    nobodys, trial = asyncio.run(play_person_and_agent(make, task, weights))
    assert nobodys == []
    said = whole_text(trial, chat)
    assert said.startswith("<|user|> episode 1 you second")
    assert said.count("episode") == 2
    assert "rewards: " in said
    with pytest.raises(RunError, match="the run has kept policy-7"):
        asyncio.run(play_person_and_agent(make, Task("kuhn", "policy-9", 3, 1), weights))
    for seat in (0, 1):
        sits = replace(task, seat=seat)
        _, trial = asyncio.run(play_person_and_agent(make, sits, weights))
        actions = [turn.action for turn in trial.turns]
        moves = iter(actions)
        ours, trial = asyncio.run(
            play_person_and_agent(make, sits, weights, lambda prompt, moves=moves: next(moves))
        )
        assert [turn.action for turn in trial.turns] == actions
        assert ours == trial.episode_rewards(), "who acts as the agent does earns as much"
        assert next(moves, None) is None
    assert "hidden from you was policy-7" in capsys.readouterr().out
