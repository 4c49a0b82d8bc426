"""An actor whose environment is slow, or fails: what waits, what is dropped, and what goes on."""

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from mage_async.protocol.messages import GroupDrop, Message, TrialResult
from tests.helpers.actor_site import Run, Site, grant

OWN = '''
import asyncio, math, os, threading, time

CLOSED, TROUBLES = [], []


class Own:
    """Rules."""

    def members(self, split):
        return ("good", "bad") if split == "train" else ("first", "second")

    def reset(self, seed, task):
        self.is_bad, self.turns = task == "bad", 0
        return "rock"

    {define} step(self, action):
        self.turns += 1
        if self.is_bad and self.turns == 2 and len(TROUBLES) < 2:  # once a trial
            TROUBLES.append(self)
            {trouble}
        return "paper", 1.0, self.turns == 4

    {define} close(self):
        CLOSED.append(self)
'''
Begin = Callable[..., None]


@pytest.fixture
def begin(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Run a test beside an actor of a class in which a bad task makes trouble in its second turn.

    The class is a module's, and so is `CLOSED`, the objects that were closed.
    """

    def begun(main: Callable[[Site], object], trouble: str, kind: str, **given: float) -> None:
        monkeypatch.delitem(sys.modules, "troubled", raising=False)
        (tmp_path / "troubled.py").write_text(
            OWN.format(trouble=trouble, define=f"{kind} def".strip())
        )
        monkeypatch.syspath_prepend(tmp_path)
        run(main, environment="troubled:Own", **given)
        closed = sys.modules["troubled"].CLOSED
        assert len(closed) == len(set(map(id, closed))), "an object was closed twice"

    return begun


def sorted_out(heard: list[Message]) -> tuple[list[str], set[int]]:
    """The reasons of what was dropped, and the grants whose trials came."""
    reasons = [message.reason for message in heard if isinstance(message, GroupDrop)]
    return reasons, {message.grant for message in heard if isinstance(message, TrialResult)}


@pytest.mark.parametrize("kind", ["", "async"])
@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("os.sys.exit(1)", "raised SystemExit: 1"),
        ("raise asyncio.CancelledError", "raised CancelledError: "),
        ("raise TimeoutError('no answer')", "raised TimeoutError: no answer"),
        ("return 7, 0.0, False", "must return text as observation, got a value of type int"),
        ("return chr(0xD800), 0.0, False", "of a surrogate pair, which no tokenizer reads"),
        ("return 'on', math.nan, False", "must return a finite reward, got nan"),
        ("return 'on', math.inf, False", "must return a finite reward, got inf"),
        (
            "return 'x' * 10_000_000, 0.0, False",
            "returned 10,000,000 characters of text: at most 100,000 fit",
        ),
        ("await asyncio.Event().wait()", "took longer than environment.step_deadline_s = 0.5"),
    ],
)
def test_a_call_that_fails_costs_its_group_and_names_the_turn(
    begin: Begin, trouble: str, sentence: str, kind: str
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", environment="own"), grant(1, member="good"))
        reasons, played = sorted_out([await site.hear() for _ in range(3)])
        (reason,) = reasons
        assert reason.startswith("own, task bad, seed 5, episode 1, turn 2: step('")
        said, frame, _ = reason.partition(" (/")
        assert said.endswith(sentence)
        assert bool(frame) == ("deadline" not in sentence)
        assert "\n" not in reason
        assert played == {1}
        site.say(grant(2, member="good"))
        assert {result.grant for result in await site.results(2)} == {2}
        assert site.engine.statistics().num_contexts == 0

    if not kind:
        trouble = trouble.replace("await asyncio.Event()", "threading.Event()")
    begin(main, trouble, kind, step_deadline_s=0.5 if "deadline" in sentence else 60.0)


@pytest.mark.parametrize(
    ("trouble", "kind", "others_s"),
    [
        ("time.sleep(2.2)", "", 1.5),
        ("await asyncio.sleep(2.2)", "async", 1.5),
        ("time.sleep(2.2)", "async", 30),  # a coroutine that blocks delays those of its class
    ],
)
def test_a_step_of_seconds_delays_neither_heartbeats_nor_other_trials(
    begin: Begin, trouble: str, kind: str, others_s: float
) -> None:
    async def main(site: Site) -> None:
        began = time.monotonic()
        site.say(grant(0, member="bad"), *(grant(number, member="good") for number in range(1, 20)))
        results, beats = await _all_heard(site, began)
        assert max(after for result, after in results if result.grant) < others_s
        assert max(after for result, after in results if not result.grant) > 2.2
        assert all(later - beat < 2.0 for beat, later in pairwise(beats))

    begin(main, trouble, kind)


def test_time_is_the_environments_only_while_a_call_has_not_returned(begin: Begin) -> None:
    """A bad trial waits 0.5 s for one call, when nothing else is played."""

    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        assert isinstance(await site.hear(), TrialResult)
        spent = (await site.beat()).blocked_s
        assert spent["environment"] > 0.4
        assert spent["environment"] > 5 * spent["trials"]

    begin(main, trouble="time.sleep(0.5)", kind="")


def test_a_coroutine_that_blocks_for_ever_is_left_behind_with_its_event_loop(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad"))
        message, number = await site.hear(), 0
        while isinstance(message, GroupDrop):  # until the event loop is known to be stuck
            number += 1
            site.say(grant(number, member="good"))
            message = await site.hear()
        assert isinstance(message, TrialResult)
        assert message.grant == number

    begin(main, "threading.Event().wait()", "async", step_deadline_s=0.3)


async def _all_heard(
    site: Site, began: float
) -> tuple[list[tuple[TrialResult, float]], list[float]]:
    """All results of twenty groups of two trials, and the times of the heartbeats meanwhile."""
    heard, at = list[tuple[TrialResult, float]](), list[float]()
    while len(heard) < 40:
        _, message = await site.learner.receive()
        after = time.monotonic() - began
        if isinstance(message, TrialResult):
            heard.append((message, after))
        elif type(message).__name__ == "Heartbeat":
            at.append(after)
    return heard, at


@pytest.mark.parametrize("kind", ["", "async"])
def test_trials_that_are_abandoned_close_what_they_hold(begin: Begin, kind: str) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad"), grant(1, member="good"))
        await site.results(2)
        assert await site.goodbye() == "the run is complete"

    begin(main, "await asyncio.sleep(60)" if kind else "time.sleep(0.5)", kind)
