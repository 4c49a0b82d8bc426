"""Trials that are played again after a fault of their environment, and those that fail again."""

import asyncio
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import InfrastructureFault, TurnLost, TurnOverdue
from mage_async.inference.chat_files import load_chat
from mage_async.policy.initial_policy import prepare_policy
from mage_async.protocol.messages import GroupDrop, TrialResult
from mage_async.results.progress import drop_kind, place_in_code
from mage_async.tasks.task_stream import TaskStream
from mage_async.trajectory import Task, Trial
from mage_services.actor import actor, rollout
from mage_services.actor.rollout import Retries, Stage, play_all
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.environments.call_runner import CallRunner
from tests.helpers.actor_site import Run, Site, grant

OWN = '''
import os
import pathlib
import threading
from itertools import count

FAILING = {"reset": set(), "step": set()}
COUNTS = {"reset": count(1), "step": count(1)}


class Fault(Exception):
    """Own, so that nothing of the package is imported."""


class Own:
    """Rules."""

    def members(self, split):
        return ("good", "bad") if split == "train" else ("first", "second")

    def reset(self, seed, task):
        self.is_bad, self.turns = task == "bad", 0
        if next(COUNTS["reset"]) in FAILING["reset"]:
            raise Fault("the container is gone")
        return "rock"

    def step(self, action):
        self.turns += 1
        if next(COUNTS["step"]) in FAILING["step"]:
            raise ConnectionError(f"no answer to call {self.turns}")
        if self.is_bad and self.turns == 2:
            {trouble}
        return "paper", float(action == "rock"), self.turns == 4
'''
RPS = """
from itertools import count

from mage_async.environments.games.rps import Rps, RpsPlay

FAILING = {"begin": set(), "act": set()}
COUNTS = {"begin": count(1), "act": count(1)}


def call(name):
    if next(COUNTS[name]) in FAILING[name]:
        raise ConnectionError("no answer")


class Own(Rps):
    called = "at_once"

    def begin(self, task, episode):
        call("begin")
        play = super().begin(task, episode)
        return Visit(play._opponent, play.chance)


class Visit(RpsPlay):
    def act(self, action):
        call("act")
        return super().act(action)
"""
Begin = Callable[..., None]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the module of a user's class, `flaky`; pauses between retries take no time."""

    def write(source: str) -> None:
        monkeypatch.delitem(sys.modules, "flaky", raising=False)
        (tmp_path / "flaky.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(rollout, "RETRY_PAUSE_S", 0.0)
    return write


@pytest.fixture
def begin(run: Run, own: Callable[[str], None]) -> Begin:
    """Run a test beside an actor of a class in which a bad task makes trouble in turn 2."""

    def begun(main: Callable[[Site], object], trouble: str = "pass", **given: float) -> None:
        own(OWN.replace("{trouble}", trouble))
        run(main, environment="flaky:Own", **given)

    return begun


def contents(trial: Trial) -> tuple[object, ...]:
    """All that is trained on."""
    arrays = [
        (each.tokens.tolist(), each.is_sampled.tolist(), each.logprobs.tolist(), each.versions)
        for each in trial.segments
    ]
    return trial.task, trial.index, arrays, trial.turns


def test_faults_drop_no_group_and_change_no_trial(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[dict[tuple[int, int], Trial]] = []

    async def main(site: Site) -> None:
        site.say(*(grant(number, member="good", seed=number) for number in range(4)))
        results = await site.results(8)
        played.append({(each.grant, each.trial.index): each.trial for each in results})
        assert site.engine.statistics().num_contexts == 0

    async def disturbed(site: Site) -> None:
        sys.modules["flaky"].FAILING.update(reset={2, 5, 11}, step={3, 17, 40})
        await main(site)

    begin(main)
    assert capsys.readouterr().err == ""
    begin(disturbed, retries=6)
    plain, retried = played
    assert {key: contents(trial) for key, trial in retried.items()} == {
        key: contents(trial) for key, trial in plain.items()
    }
    assert sum(trial.num_retries for trial in plain.values()) == 0
    assert sum(trial.num_retries for trial in retried.values()) == 6
    lines = capsys.readouterr().err.splitlines()
    told = "; the trial is played again with fresh objects, up to 6 times (environment.retries)"
    assert len(lines) == 2, "each kind once"
    assert all(line.startswith("own, task good, seed ") and line.endswith(told) for line in lines)
    words = (
        "reset() reported a fault of its infrastructure: the container is gone",
        "no answer to",
    )
    assert all(any(each in line for line in lines) for each in words)


def test_heartbeats_count_each_trial_that_is_played_again_once(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(site: Site) -> None:
        # The first three calls fail: one trial's alone, if it comes before the other one each time.
        sys.modules["flaky"].FAILING.update(reset={1, 2, 3})
        site.say(grant(0, member="good"))
        while (beat := await site.beat()).counters["num_completions"] < 24:
            assert beat.counters["num_played_again"] <= 2
        assert beat.counters["num_played_again"] in (1, 2)

    monkeypatch.setattr(actor, "HEARTBEAT_S", 0.005)
    begin(main, retries=6)


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize(("retries", "tries"), [(0, ""), (1, "after 2 tries: ")])
def test_a_class_that_always_fails_drops_its_group_after_the_tries(
    begin: Begin, retries: int, tries: str, num_processes: int
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1), grant(1, member="good"))
        heard = [await site.hear() for _ in range(3)]
        (drop,) = (message for message in heard if isinstance(message, GroupDrop))
        assert drop.reason.startswith(f"{tries}own, task bad, seed 5, episode 1, turn 2: step('")
        assert "reported a fault of its infrastructure: down (" in drop.reason
        assert drop.num_turns == 1, "the turn before"
        assert {each.grant for each in heard if isinstance(each, TrialResult)} == {1}
        if not num_processes:
            # the good ones take all their steps, and each try of the bad one takes two
            assert next(sys.modules["flaky"].COUNTS["step"]) == 24 + 2 * (retries + 1) + 1

    begin(main, "raise Fault('down')", retries=retries, num_processes=num_processes)


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize(
    ("trouble", "most"),
    [
        ("raise ValueError('broken')", 2),
        ("raise SystemExit(3)", 2),
        ("return 'paper', None, True", 2),
        ("raise OSError('a server must return 200, as if it raised ValueError: no')", 7),
    ],
)
def test_a_mistake_that_comes_back_in_the_same_line_is_not_tried_again(
    begin: Begin,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
    most: int,
    num_processes: int,
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        drop = await site.hear()
        assert isinstance(drop, GroupDrop)
        assert drop.reason.startswith(f"after {most} tries: own, task bad, seed 5, episode 1")
        if trouble.startswith("raise"):
            assert place_in_code(drop.reason).endswith("flaky.py, line 32")

    begin(main, trouble, retries=6, num_processes=num_processes)
    assert ("or once if the same mistake comes back" in capsys.readouterr().err) == (most == 2)


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ("ValueError('caf\\udce9')", "ValueError: caf?"),
        ("type('Odd', (Exception,), {'__str__': lambda self: None})", "Odd: (its text cannot be "),
    ],
)
def test_an_exception_with_a_text_that_cannot_be_read_or_sent_is_retried(
    begin: Begin, raised: str, text: str, num_processes: int
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        drop = await site.hear()
        assert isinstance(drop, GroupDrop)
        assert drop.reason.startswith("after 2 tries: own, task bad, seed 5, episode 1, turn 2: ")
        assert f"raised {text}" in drop.reason

    begin(main, f"raise {raised}", retries=1, num_processes=num_processes)


def test_a_trial_whose_process_died_or_hung_once_is_played_again(
    begin: Begin, tmp_path: Path
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        (result,) = await site.results(1)
        assert result.trial.num_retries == 2
        assert result.trial.num_played() == 3

    tries = (
        "here = pathlib.Path(__file__)\n"
        "            if not here.with_name('died').exists():\n"
        "                here.with_name('died').touch()\n"
        "                os._exit(3)\n"
        "            if not here.with_name('hung').exists():\n"
        "                here.with_name('hung').touch()\n"
        "                threading.Event().wait()"
    )
    begin(main, tries, retries=2, num_processes=1, step_deadline_s=1.0)


def test_a_worker_process_declares_a_fault_by_its_exit_code(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        drop = await site.hear()
        assert isinstance(drop, GroupDrop)
        declared = "the worker process of the episode reported a fault of its infrastructure"
        assert declared in drop.reason
        assert drop_kind(drop.reason).name == "the environment's infrastructure failed"

    begin(main, "os._exit(os.EX_TEMPFAIL)", num_processes=1)


@pytest.mark.parametrize("fault", [TurnLost, TurnOverdue])
def test_a_turn_that_the_engine_lost_or_missed_is_retried(
    begin: Begin, capsys: pytest.CaptureFixture[str], fault: type[InfrastructureFault]
) -> None:
    async def main(site: Site) -> None:
        complete, turns = site.engine.complete, count(1)

        async def lose_some(prompt: Prompt) -> Completion:
            if next(turns) in {5, 11}:
                raise fault("the engine is gone")
            return await complete(prompt)

        site.engine.complete = lose_some  # type: ignore[method-assign]
        site.say(grant(0, member="good", num_trials=1))
        (result,) = await site.results(1)
        assert (result.trial.num_retries, result.trial.num_played()) == (2, 3)
        assert capsys.readouterr().err.count("the engine is gone; the trial is played again") == 1

    begin(main, retries=2)


def test_an_evaluated_trial_is_cut_after_the_last_try_alone(begin: Begin) -> None:
    async def main(site: Site) -> None:
        plans = [site.stage.plan(Task("own", member, 5), 0, member) for member in ("good", "bad")]
        sys.modules["flaky"].FAILING["reset"] = {1, 2}
        good, bad = await play_all(plans, site.stage, 2)
        assert (good.cut_at, good.num_played()) == (None, 3)
        assert (bad.cut_at, len(bad.turns)) == (0, 1)
        assert site.engine.statistics().num_contexts == 0

    begin(main, "raise Fault('down')", retries=2)


@pytest.mark.parametrize("fault", [TurnLost, TurnOverdue])
def test_an_evaluated_trial_that_the_engine_fails_in_every_try_is_cut(
    begin: Begin, capsys: pytest.CaptureFixture[str], fault: type[InfrastructureFault]
) -> None:
    async def main(site: Site) -> None:
        complete = site.engine.complete

        async def lose_bad(prompt: Prompt) -> Completion:
            if prompt.context.startswith("bad"):
                raise fault("the engine is gone")
            return await complete(prompt)

        site.engine.complete = lose_bad  # type: ignore[method-assign]
        plans = [site.stage.plan(Task("own", "good", 5), 0, name) for name in ("good", "bad")]
        good, bad = await play_all(plans, site.stage, 2)
        assert (good.cut_at, bad.cut_at) == (None, 0)

    begin(main, retries=1)
    assert "after 2 tries: the engine is gone" in capsys.readouterr().err


def test_under_exact_arithmetic_faults_change_no_bit(
    own: Callable[[str], None], tmp_path: Path
) -> None:
    own(RPS)
    changes = ["environment.name=flaky:Own", "engine.arithmetic=exact", "warm_start.steps=0"]
    config, policy = config_file.load(config_file.find(None), changes), tmp_path / "policy"
    prepare_policy(config, policy, lambda progress: None)
    plain = played_embedded(config, policy, Retries())
    sys.modules["flaky"].FAILING.update(begin={2, 9}, act={5, 30})
    counts = sys.modules["flaky"].COUNTS
    counts |= {name: count(1) for name in counts}
    retried = played_embedded(config, policy, Retries(4))
    assert [contents(trial) for trial in retried] == [contents(trial) for trial in plain]
    assert next(counts["act"]) > 8 * 3 * 4 + 1, "turns were played again"


def played_embedded(config: Config, policy: Path, retries: Retries) -> list[Trial]:
    """Eight trials on the embedded engine."""
    environment, chat = environment_of(config), load_chat(policy)
    tasks = TaskStream(environment, 0)

    async def main() -> list[Trial]:
        rules = trial_config_of(config, environment, chat, 3)
        async with EmbeddedEngine(policy, config.engine) as engine, CallRunner() as workers:
            stage = Stage(environment, rules, chat, engine, workers, retries)
            plans = [stage.plan(tasks.task(n), 0, f"{n}.0.0") for n in range(8)]
            return await play_all(plans, stage, 8)

    return asyncio.run(main())
