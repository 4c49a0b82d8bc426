"""Scripted play: trials as a policy could have played them, for warm starts."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import Environment, Play, Script, Split
from mage_async.environments.mix.parts import Mixed, part_of
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Guidance, Kind, Task, Trial
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels.begin import settle
from mage_async.trials.trial_rules import TrialRules
from mage_async.trials.trial_run import TrialRun


@dataclass(slots=True)
class ToldScript:
    """Follows strategies in the first episode, where they can be followed; otherwise another
    script, which sees every state.
    """

    script: Script
    told: Mapping[str, str]
    """Action by state."""
    _first: Play | None = None

    def choose(self, play: Play) -> str:
        """The next action."""
        if self._first is None:
            self._first = play
        action = self.script.choose(play)
        told = self.told.get(play.anchor) if play is self._first else None
        return action if told is None or told not in play.legal_actions() else told


def scripted_trial(
    environment: Environment,
    task: Task,
    index: int,
    rules: TrialRules,
    chat: ChatFormat,
    guidance: Guidance | None = None,
) -> Trial:
    """One trial in which a script of the environment chooses every action.

    A remark repeats the last words of the game that its context holds: short, and true.

    Args:
        guidance: strategies that the trial begins with, and that its script follows.
    """
    source = random.Random(f"{task.seed}/{index}/script")
    part = part_of(environment, task.member)
    script = part.script(source)
    assert script is not None, "a warm start and a measured script are checked to have one"
    if guidance is not None:
        script = ToldScript(script, dict(guidance.decisions))
    run = TrialRun(environment, task, index, rules.guided(guidance), chat, name="script")
    words = word_tokens(part, chat)
    settle(run)
    while (prompt := run.next_prompt()) is not None:
        run.receive(_completion(_answer(run, prompt, script, words, chat, rules.parser)))
        settle(run)
    return run.trial()


def word_tokens(environment: Environment, chat: ChatFormat) -> frozenset[int]:
    """Ids of the environment's words where each is one token; a longer word has none."""
    encoded = (chat.encode(f" {word}") for word in environment.facts.words)
    return frozenset(ids[0] for ids in encoded if len(ids) == 1)


def random_task(environment: Environment, split: Split, source: random.Random) -> Task:
    """A task drawn uniformly over members and seats; of a mix, over those of a part that is drawn
    by the shares.
    """
    name = environment.facts.name
    if isinstance(environment, Mixed):
        (part,) = source.choices(environment.parts, [part.share for part in environment.parts])
        task = random_task(part.environment, split, source)
        return replace(task, environment=name, member=part.member(task.member))
    members, seats = environment.members(split), environment.seats()
    return Task(name, source.choice(members), source.getrandbits(40), source.choice(seats))


def _answer(
    run: TrialRun,
    prompt: Prompt,
    script: Script,
    words: Collection[int],
    chat: ChatFormat,
    parser: ActionParser,
) -> list[int]:
    if run.kind is Kind.ACT:
        return _tagged(parser, Kind.ACT, list(chat.encode(f" {script.choose(run.play)}")), chat)
    seen = [token for token in cast("list[int]", prompt.tokens.tolist()) if token in words]
    room = prompt.sampling.max_tokens - 1
    return _tagged(parser, run.kind, seen[-room:] if room else [], chat)


def _tagged(parser: ActionParser, kind: Kind, inside: list[int], chat: ChatFormat) -> list[int]:
    """Add what the transcript does not write itself."""
    opening = [] if parser.prefill(kind) else list(chat.encode(f"<{NAMES[kind]}>"))
    leaves_open = kind is Kind.ACT and parser.forced == "both"
    closing = [] if leaves_open else list(chat.encode(f"</{NAMES[kind]}>"))
    return opening + inside + closing


def _completion(ids: list[int]) -> Completion:
    tokens = np.array(ids, np.int32)
    runs = (VersionRun(0, 0, 0),)
    return Completion(tokens, np.zeros(len(ids), np.float32), runs, "stop", 0)
