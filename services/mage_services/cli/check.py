"""`mage check NAME:Class`: rehearse an environment alone, and print what it declares and lacks."""

import argparse
import inspect
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from mage_async.errors import CallFault, ConfigError
from mage_services.cli.options import add_config, add_set

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.environments.environment import Environment
    from mage_async.trials.chat_format import ChatFormat
    from mage_async.trials.scripted import Player

HELP = "Rehearse an environment of your own, and say what its declarations switch on."
NUM_TURNS = 5
"""Number of turns that are shown as the model will read them."""
NUM_ROWS = 12
"""Largest number of rows that are shown of one line of a turn."""
NUM_TRIALS, BUDGET_S = 400, 4.0
"""Largest number of trials of random play, of trials of scripted play, and of pairs of tasks that
are compared; and seconds after which each of these three ends early.
"""
SEARCH_S = 30.0
"""Longest expected time in seconds of the search for the best rule of win-stay, lose-shift."""
WIDTH = 100
"""Number of columns to which shown turns are wrapped."""

PARTS = (
    ("legal_actions", "only these are sampled, so every action is valid", "any text is an action"),
    ("legal_pattern", "only texts that match are sampled", "no pattern of actions"),
    ("words", "the tiny model can play", "open text: only a pretrained model can play"),
    ("script", 'warm_start = "script" works', 'no warm start by a script; "win_stay" needs none'),
    ("members", "your own tasks and held-out split", "1,024 train and 256 held-out numbers"),
    ("max_turns", "an episode is truncated after so many steps", "32 steps"),
    ("rules", "the rules in the prompt", "the docstring"),
    (
        "references",
        "known returns beside those of the agent",
        "random play, win-stay and version 0 stand there",
    ),
    ("min_return", "returns have bounds, with max_return", "colours relative to returns reached"),
    ("anchor", "states with equal anchors share a baseline", "the last observation"),
    ("family", "reports by kind of task", "one kind"),
    ("belief", "a bonus for information can be paid", "no bonus for information"),
    ("ladders", "`mage evaluate --harder` works", "no harder tasks"),
    ("close", "called once for each object", "nothing is closed"),
)
"""Optional parts of a class: name, effect if it is declared, and effect if it is not."""
SAY_WHAT_IS_LEGAL = {"legal_actions", "legal_pattern"}
"""Parts of which one is enough: where a class declares one, the other is not missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the environment and the configuration."""
    parser.epilog = (
        "Nothing is trained, and no model is loaded. The status is 0 if a run could start. "
        "`mage new NAME` writes an environment to begin with."
    )
    text = "module:Class, or a name of the catalogue (default: that of the configuration)"
    parser.add_argument("environment", nargs="?", metavar="NAME:Class", help=text)
    add_config(parser)
    add_set(parser, "change a key, such as environment.options.size=5")


def run(given: argparse.Namespace) -> int:
    """Print the rehearsal, the declarations, the first turns and the returns of random play.

    Raises:
        ConfigError: a run with this environment could not start; with what to change.
    """
    from mage_async.assembly import check_context_length, check_keys, named_parts
    from mage_services.actor.rehearsal import rehearse_all
    from mage_services.api.start_to_report import check_start

    wanted, config = _configs(given)
    check_keys(config)
    rehearse_all(config, print)
    check_context_length(config)
    for _, part in named_parts(config):
        _print_declared(part)
        with TemporaryDirectory() as folder:
            if (chat := _chat(config, part, Path(folder))) is not None:
                _print_turns(config, part, chat)
                _print_returns(config, part, chat)
        _print_heldout(part)
    # What a run lacks is said last, so that an environment can be looked at without a model.
    check_start(wanted)
    print("ready: `mage train` with these keys can start")
    return 0


def _configs(given: argparse.Namespace) -> "tuple[Config, Config]":
    """Return the configuration of the command line, with which a run would start, and the one that
    is rehearsed.

    They differ if the tiny policy cannot play the environment, and the command line does not name
    the policy: a pretrained one is rehearsed.
    """
    from mage_async.assembly import named_parts, tiny_fault
    from mage_async.config import config_file
    from mage_async.config.schema import Tiny

    name = (
        [] if given.environment is None else [f"environment.name={json.dumps(given.environment)}"]
    )
    load = partial(config_file.load, config_file.find(given.config))
    config = load([*name, *given.set])
    if isinstance(config.policy, Tiny) and any(tiny_fault(part) for _, part in named_parts(config)):
        # The keys of the command line come last, so that they override this one.
        return config, load([*name, "policy.kind=pretrained", *given.set])
    return config, config


def _print_declared(environment: "Environment") -> None:
    """Print the optional parts of a class with two methods, first those that it declares."""
    from mage_async.environments.user_class import ResetStep

    if not isinstance(environment, ResetStep):
        return
    kind = environment.kind
    # A class may inherit a part that is None, words that are (), or a script that declines to play.
    declared = {name for name, _, _ in PARTS if getattr(kind, name, None) is not None}
    if not getattr(kind, "words", ()):
        declared.discard("words")
    if environment.script(random.Random(0)) is None:
        declared.discard("script")
    rows = [(name, _value(getattr(kind, name)), on) for name, on, _ in PARTS if name in declared]
    # Tools are no optional part with a name of its own. They change what other parts mean.
    unused = set[str]()
    if environment.tools:
        unused = {"words", "legal_actions", "legal_pattern"}
        rows = [
            (name, value, "not used: actions are calls of tools" if name in unused else effect)
            for name, value, effect in rows
        ]
        names = " ".join(each["function"]["name"] for each in environment.tools)
        rows.insert(0, ("tools", _shortened(names), "only a pretrained model can play"))
    print("declared:")
    for name, value, switched_on in rows:
        print(f"  {name:<14}{value:<32}{switched_on}")
    counts = Counter(getattr(kind, "words", ()))
    if twice := [word for word, count in counts.items() if count > 1]:
        print(f"  {'':<14}words lists {', '.join(twice)} more than once, which has no effect")
    print("not declared:")
    needless = SAY_WHAT_IS_LEGAL if declared & SAY_WHAT_IS_LEGAL else set()
    for name, _, without in PARTS:
        if name in declared | needless | unused:
            continue
        if name == "script" and environment.tools:
            without = "no warm start by a script"
        print(f"  {name:<14}{without}")


def _value(declared: Any) -> str:
    """Return the value of a declaration as text of at most 30 characters."""
    if isinstance(declared, property) or inspect.isdatadescriptor(declared):
        return "a property"
    if callable(declared):
        return "a method"
    if isinstance(declared, list | tuple) and len(declared) > 2:
        return _shortened(f"{len(declared)}, such as {declared[0]}")
    return _shortened(" ".join(str(declared).split()))


def _shortened(text: str) -> str:
    """Return a text of at most 30 characters, with an ellipsis for what was cut."""
    return text if len(text) <= 30 else f"{text[:29]}…"


def _chat(config: "Config", environment: "Environment", folder: Path) -> "ChatFormat | None":
    """Return the policy's chat format; without a model on this machine, the tiny one's, or None if
    the environment has tools, which the tiny one does not present.
    """
    from mage_async.config.schema import Pretrained, local_policy
    from mage_async.inference.chat_files import load_chat
    from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer

    policy = config.policy
    if isinstance(policy, Pretrained) and policy.source and (found := local_policy(policy.source)):
        return load_chat(found, thinking=config.transcript.thinking)
    if environment.tools:
        print("nothing is played: no model is on this machine whose chat template presents tools")
        return None
    if isinstance(policy, Pretrained):
        print("no model is on this machine, so the turns below are in the tiny model's chat format")
    save_tokenizer(build_tokenizer(environment.facts.words), folder)
    return load_chat(folder)


def _print_turns(config: "Config", environment: "Environment", chat: "ChatFormat") -> None:
    """Print the first turns of a trial of random play, as the model reads them."""
    from mage_async.trajectory import Kind
    from mage_async.trials.scripted import random_play

    try:
        trial = next(_trials(config, environment, chat, random_play))
    except (CallFault, ConfigError) as fault:
        print(f"no turns are shown: {fault}")
        return
    # `turn.stop` counts tokens within the turn's own segment, which is one context of the trial:
    # only turns of the first segment are shown.
    acts = [turn for turn in trial.turns if turn.kind is Kind.ACT and not turn.segment]
    shown, tokens, start = acts[:NUM_TURNS], trial.segments[0].tokens.tolist(), 0
    print(f"the first {len(shown)} turns, as the model reads and writes them:")
    for turn in shown:
        for line in chat.decode(tokens[start : turn.stop]).splitlines():
            rows = wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
            print("\n".join(rows[:NUM_ROWS]))
            if len(rows) > NUM_ROWS:
                print(f"    … {len(rows) - NUM_ROWS:,} more rows of this line")
        start = turn.stop
    first = "a trial" if len(trial.segments) == 1 else "the first context of a trial"
    most = config.engine.max_tokens
    print(f"  {first} of random play has {len(tokens):,} tokens of {most:,}")
    if len(tokens) > most:
        print(
            f"  an episode is cut where it has used its share of engine.max_tokens = {most:,}: "
            "shorten the observations, or raise the key"
        )


def _trials(
    config: "Config", environment: "Environment", chat: "ChatFormat", player: "Player"
) -> Iterator[Any]:
    """Play trials of training tasks without a model, one after the other.

    Raises:
        CallFault: a call failed, or has to wait.
        ConfigError: the environment declares no actions that could be drawn.
    """
    from dataclasses import replace

    from mage_async.assembly import trial_config_of
    from mage_async.trials.scripted import random_task, scripted_trial

    trial_config = trial_config_of(config, environment, chat, config.trial.episodes)
    trial_config = replace(trial_config, max_tokens=0)  # no limit: no engine plays these trials
    source = random.Random(config.seed)
    for index in itertools.count():
        task = random_task(environment, "train", source)
        yield scripted_trial(environment, task, index, trial_config, chat, player=player)


def _within_budget(items: Iterator[Any]) -> list[Any]:
    """Return what an iterator yields within `BUDGET_S`: at least one item, if it has any, and at
    most `NUM_TRIALS`.
    """
    began, found = time.monotonic(), list[Any]()
    for item in itertools.islice(items, NUM_TRIALS):
        found.append(item)
        if time.monotonic() - began > BUDGET_S:
            break
    return found


def _print_returns(config: "Config", environment: "Environment", chat: "ChatFormat") -> None:
    """Print what random and scripted play earn by episode, and how long the calls take.

    Without a script, win-stay, lose-shift is played, if it earns more than random play.
    """
    from mage_async.policy.demonstrations import compare_win_stay
    from mage_async.results.score import score
    from mage_async.trials.scripted import own_script, random_play
    from mage_async.trials.win_stay import NUM_PLAYED, player_of
    from mage_services.processes.process import in_time

    seconds = 0.0
    has_script = environment.script(random.Random(0)) is not None
    players: list[tuple[str, Player | None]] = [("random", random_play)]
    players.append(("script", own_script) if has_script else ("win-stay", None))
    print("return per unit by episode, on training tasks:")
    for name, known in players:
        if known is None and seconds * NUM_PLAYED > SEARCH_S:
            takes = f"about {seconds * NUM_PLAYED:.0f} s"
            print(f"  {name:<9}not played: its rule is found in {NUM_PLAYED} trials, {takes}")
            continue
        try:
            if (player := known) is None:
                compared = compare_win_stay(config, environment, chat, in_time)
                if isinstance(compared, str):
                    print(f"  {name:<9}not played: {compared}")
                    continue
                print(f"  {name:<9}{compared.sentence(environment.facts.units)}")
                if not compared.is_better:
                    continue
                player = player_of(compared.rule)
            began = time.monotonic()
            trials = _within_budget(_trials(config, environment, chat, player))
        except (CallFault, ConfigError) as fault:
            print(f"  {name:<9}not played: {fault}")
            continue
        seconds = max(seconds, (time.monotonic() - began) / len(trials))
        found = score(trials, environment)
        pairs = zip(found.return_by_episode, found.ci95_by_episode, strict=True)
        returns = "  ".join(f"{mean:+.3f} ±{half:.3f}" for mean, half in pairs)
        print(f"  {name:<9}{returns}  ({len(trials)} trials)")
        earned = [reward for trial in trials for reward in trial.episode_rewards()]
        if player is random_play and not any(earned):
            print("  random play never earned anything: begin with easier tasks or part rewards")
        if wrong := _wrong_bounds(environment, earned):
            print(f"  {wrong}")
    size = config.admission.groups_per_step * config.admission.trials_per_group
    if not seconds:
        return
    print(
        f"a step trains on {size} trials; without a model, one took {seconds:.2g} s here, so the "
        f"environment's part of a step is about {size * seconds:.2g} s on one core"
    )


def _wrong_bounds(environment: "Environment", earned: list[float]) -> str:
    """Return a sentence if an episode earned less or more than declared; "" if none did."""
    facts = environment.facts
    for reward in earned:
        if not facts.allows(reward):
            return (
                f"an episode earned {reward:g}, but the environment declares min_return = "
                f"{facts.min_return:g} and max_return = {facts.max_return:g}: correct them"
            )
    return ""


def _print_heldout(environment: "Environment") -> None:
    """Print whether held-out tasks differ from training tasks."""
    from mage_async.environments.rehearsal import compare_heldout
    from mage_async.environments.user_class import SPLITS

    try:
        found = _within_budget(compare_heldout(environment))
    except (CallFault, ConfigError) as fault:
        print(f"held-out tasks are not compared: {fault}")
        return
    last, declared = found[-1], {split: len(environment.members(split)) for split in SPLITS}
    print(last.sentence())
    if (last.num_train, last.num_heldout) != (declared["train"], declared["heldout"]):
        print(
            f"  this is a sample: {declared['train']:,} training and {declared['heldout']:,} "
            "held-out tasks are declared, and the comparison ends after "
            f"{NUM_TRIALS} pairs or {BUDGET_S:g} s"
        )
