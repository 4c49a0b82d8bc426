"""`mage check NAME:Class`: rehearse an environment alone, and print what it declares and lacks."""

import argparse
import asyncio
import inspect
import itertools
import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from mage_async.errors import (
    ConfigError,
    EnvironmentFault,
    InfrastructureFault,
    MageError,
    TrialFault,
)
from mage_services.cli.options import add_config, add_set
from mage_services.terminal import CountedOutput

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.environments.environment import Environment, Script
    from mage_async.environments.rehearsal import Listener
    from mage_async.environments.user_class import ResetStep
    from mage_async.trials.chat_format import ChatFormat
    from mage_async.trials.scripted_play import Player
    from mage_services.processes.process import Runner

HELP = "Rehearse an environment of your own, and print the effects of its declarations."
NUM_TURNS = 5
"""Number of turns that are shown as the model will read them."""
NUM_ROWS = 12
"""Largest number of rows that are shown of one line of a turn."""
NUM_TRIALS, BUDGET_S = 400, 4.0
"""Largest number of trials of random play, of trials of scripted play, and of pairs of tasks that
are compared; and seconds after which each of these three ends early.
"""
SEARCH_S, TOTAL_S = 30.0, 60.0
"""The search for the best rule of win-stay, lose-shift, and the comparison of held-out tasks, are
each left out if they are expected to take more than `SEARCH_S` seconds. After `TOTAL_S` seconds all
play ends at the next call that returns.
"""
FEW_KINDS = 12
"""Number of different training tasks up to which a run is expected to learn them by heart. A run on
ten tasks, each of which hid two foods of six, earned 0.61 on them and 0.02 on held-out ones.
"""
FEWEST, FEWEST_WITH_CI = 2, 8
"""Number of trials of a player, and of pairs of tasks, that are played even if they take longer
than `BUDGET_S`; and smallest number of trials from which an interval is computed.
"""
MOST_IN_A_ROW = 5
"""If so many trials in a row fail by transient faults, the last fault is not counted as transient.
"""
LEAST_WAIT_S = 0.05
"""If a trial waits for fewer seconds than this, its waiting is not reported."""
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
        "known returns are shown next to those of the agent",
        "only random play, win-stay and version 0 are known",
    ),
    ("min_return", "returns have bounds, with max_return", "colours relative to the returns seen"),
    (
        "anchor",
        "states with equal anchors are the same, to win-stay and to GiGPO",
        "the last observation, with its words about the last action",
    ),
    (
        "interchangeable",
        "training exchanges these words at random",
        "each training task has the same words in every trial",
    ),
    ("family", "reports by kind of task", "one kind"),
    ("belief", "a bonus for information can be paid", "no bonus for information"),
    ("ladders", "`mage evaluate --harder` works", "no harder tasks"),
    ("close", "called once for each object", "nothing is closed"),
)
"""Optional parts of a class: name, effect if it is declared, and effect if it is not."""
_NAME_WIDTH = max(len(name) for name, _, _ in PARTS) + 1
"""Columns of a part's name in the listing of parts, with a space after the longest."""
LEGAL_PARTS = {"legal_actions", "legal_pattern"}
"""Two parts of which one is enough: if a class declares one, the other is not listed as missing."""


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
    """Check an environment; see `_check`. Then end the processes that it leaves running."""
    from mage_services.processes.child_process import ending_descendants

    with ending_descendants():
        _check(_CheckArguments(given.environment, given.config, given.set), asyncio.run)
    return 0


def check(
    environment: type | str | None = None,
    file: str | Path | None = None,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Rehearse an environment alone, without a model, and print the report of `mage check`: the
    optional parts that the class declares and lacks, the first turns, the returns of random and
    scripted play, and a comparison of held-out tasks with training tasks.

    Args:
        environment: See `mage.configure`; None for that of the configuration.
        file: See `mage.configure`.
        keys: See `mage.configure`.

    Raises:
        ConfigError, PolicyError: a run with this environment, or this model, could not start; the
            message says what to change.
    """
    from mage_services.api.configuration import address_of, assignments_of
    from mage_services.api.coroutines import run_coroutine_to_end

    name = address_of(environment) if isinstance(environment, type) else environment
    _check(_CheckArguments(name, file, assignments_of(keys or {})), run_coroutine_to_end)


class _CheckArguments(NamedTuple):
    """Hold the arguments of a check: an environment, a configuration file, and assignments."""

    name: str | None
    file: str | Path | None
    assignments: list[str]


def _check(given: _CheckArguments, runner: "Runner") -> None:
    """Print the rehearsal, the declarations, the first turns and the returns of random play.

    Raises:
        ConfigError, PolicyError: a run with this environment, or this model, could not start; the
            message says what to change.
    """
    from mage_async.assembly import (
        check_context_length,
        check_keys,
        environment_of,
        named_parts,
    )
    from mage_async.environments.agent import AgentTasks
    from mage_async.environments.mix import Mix
    from mage_services.actor.preflight import check_model_files
    from mage_services.actor.rehearsal_runner import rehearse_all
    from mage_services.api.start_to_report import check_start
    from mage_services.processes.process import unless_a_call_hangs

    run_config, config = _configs(given)
    check_keys(config)
    printed, say = CountedOutput(sys.stdout), partial(print, file=sys.stdout, flush=True)
    deadline_s = config.environment.step_deadline_s
    with redirect_stdout(printed), chdir("."):  # a class may change the folder
        rehearse_all(config, say, runner)
        check_length = partial(check_context_length, config)
        unless_a_call_hangs(check_length, deadline_s, say, runner)
    play = _Play(printed, say, deadline_s, runner, time.monotonic() + TOTAL_S)
    environment = environment_of(config)
    for index, (name, part) in enumerate(named_parts(config)):
        if isinstance(environment, Mix):
            print(f"part {environment.parts[index].label!r} of the mix:")
        if isinstance(part, AgentTasks):
            print(f"{name} is a program, which only a run can play: `{_first_step(given)}`")
            continue
        _print_declared(part)
        play.listen(config, name, part)
        with TemporaryDirectory() as folder:
            if (chat := _chat(config, part, Path(folder))) is not None:
                _print_trials(play, config, part, chat)
        _print_heldout(play, config, part)
        play.check_words()
    if printed.num_lines:
        print(printed.sentence())
    if play.transient:
        num, first = len(play.transient), play.transient[0]
        print(
            f"trials left out because of transient faults, after which a run plays a trial again: "
            f"{num}; the first fault: {first}"
        )
    if play.faults:
        raise ConfigError(f"not ready: {play.faults[0]}")
    # Faults of the run itself, such as a missing model, are reported last, so that an environment
    # can be looked at without a model.
    check_start(run_config)
    unread = ""
    if (model := _model_here(run_config)) is not None:
        if lost := check_model_files(run_config, model, num_actors=1).lost:
            print(f"policy: {lost}")
        unread = ", unless the model fails a check after it is loaded"
    print(f"ready: `mage train` with these keys can start{unread}{play.to_correct}")


class _OutOfTime(MageError):
    """Report that a check has used its time."""


@dataclass(slots=True)
class _Play:
    """Play trials of a check within its time, and note the faults that an actor would meet."""

    printed: CountedOutput
    say: Callable[[str], None]
    """Called with lines about a call that has not returned."""
    deadline_s: float
    """Seconds after which a call of the class counts as hanging."""
    runner: "Runner"
    """Runs a coroutine to its end, as `asyncio.run` does."""
    ends_at: float
    """When all play ends, by the machine's monotonic clock."""
    faults: list[str] = field(default_factory=list)
    """Faults of the class, as sentences."""
    transient: list[TrialFault] = field(default_factory=list)
    """Faults of trials that were left out, after which a run plays a trial again."""
    to_correct: str = ""
    """End of the last sentence, if the class should be corrected although a run can start; else "".
    """
    seconds: float = 0.0
    """Mean seconds of a trial, of the player whose trials took longest."""
    waited_s: float = 0.0
    """Seconds of such a trial in which this process did not compute."""
    _num_in_a_row: int = 0
    """Number of trials that failed by transient faults since the last complete one."""
    _name: str = ""
    _environment: "ResetStep | None" = None
    _listener: "Listener | None" = None

    def listen(self, config: "Config", name: str, environment: "Environment") -> None:
        """Listen to the calls of an environment, if it is a class with `reset` and `step`."""
        from mage_async.config.schema import Tiny
        from mage_async.environments.rehearsal import Listener
        from mage_async.environments.user_class import ResetStep

        self._environment = self._listener = None
        if isinstance(environment, ResetStep):
            is_tiny = isinstance(config.policy, Tiny)
            self._name, self._environment = name, environment
            self._listener = Listener(environment, writes_words=is_tiny, after_call=self.check_time)
            environment.listener = self._listener

    def check_time(self) -> None:
        """Raise an `_OutOfTime` if the check has used its time."""
        if time.monotonic() > self.ends_at:
            raise _OutOfTime(f"the trials of this check have used their {TOTAL_S:g} s")

    def attempt(self, label: str, function: Callable[[], Any]) -> Any:
        """Call a function that plays trials, and return its result. If it fails, print the reason
        and return None.
        """
        from mage_services.processes.process import unless_a_call_hangs

        try:
            with redirect_stdout(self.printed), chdir("."):
                return unless_a_call_hangs(function, self.deadline_s, self.say, self.runner)
        except (EnvironmentFault, ConfigError, _OutOfTime) as fault:
            print(f"{label}: {fault}")
            if isinstance(fault, EnvironmentFault) and not self.note_transient(fault):
                self.faults.append(str(fault))
            return None

    def note_transient(self, fault: TrialFault) -> bool:
        """Return whether a fault is transient, such as one of a network or a server, and note it.

        A run plays a trial again after such a fault. Mistakes in a class, calls that hang, and the
        last of `MOST_IN_A_ROW` faults in a row are not transient.
        """
        is_mistake = isinstance(fault, InfrastructureFault) and fault.mistake
        if is_mistake or not isinstance(fault.__cause__, Exception):
            return False
        self.transient.append(fault)
        self._num_in_a_row += 1
        return self._num_in_a_row < MOST_IN_A_ROW

    def within_budget(self, items: Iterator[Any]) -> list[Any]:
        """Return the items that an iterator yields within `BUDGET_S`: at least `FEWEST`, if it has
        so many and the check has time left, and at most `NUM_TRIALS`. A fault after the first item
        is noted, and ends the iteration.
        """
        began, found = time.monotonic(), list[Any]()
        try:
            for item in itertools.islice(items, NUM_TRIALS):
                self._num_in_a_row = 0
                found.append(item)
                if time.monotonic() - began > BUDGET_S and len(found) >= FEWEST:
                    break
                self.check_time()
        except (EnvironmentFault, _OutOfTime) as fault:
            if not found:
                raise
            if isinstance(fault, EnvironmentFault) and not self.note_transient(fault):
                self.faults.append(str(fault))
        return found

    def timed(self, trials: Iterator[Any]) -> list[Any]:
        """Return trials as `within_budget` does, and measure the mean seconds of a trial."""
        ends = [(time.monotonic(), time.process_time())]

        def marked() -> Iterator[Any]:
            for trial in trials:
                ends.append((time.monotonic(), time.process_time()))
                yield trial

        found = self.within_budget(marked())
        # The time of a trial that was not finished is left out.
        (first_end, first_cpu_s), (last_end, last_cpu_s) = ends[0], ends[-1]
        seconds = (last_end - first_end) / len(found)
        computed_s = (last_cpu_s - first_cpu_s) / len(found)
        if seconds > self.seconds:
            self.seconds, self.waited_s = seconds, max(0.0, seconds - computed_s)
        return found

    def too_long(self, num_trials: float) -> str:
        """Return the expected time of trials as text, if it is longer than the time that is left;
        else "".
        """
        seconds = num_trials * self.seconds
        left = max(0.0, min(SEARCH_S, self.ends_at - time.monotonic()))
        return f"about {seconds:.0f} s" if seconds > left else ""

    def is_always_truncated(self) -> bool:
        """Return whether a class without `max_turns` has never ended an episode itself."""
        is_unbounded = self._environment is not None and not hasattr(
            self._environment.kind, "max_turns"
        )
        return is_unbounded and self._listener is not None and not self._listener.num_ended

    def check_words(self) -> None:
        """Note a fault if the trials had words that the class does not declare."""
        from mage_async.environments.rehearsal import check_vocabulary

        if self._listener is not None and self._environment is not None:
            try:
                check_vocabulary(self._name, self._environment, self._listener.undeclared)
            except ConfigError as fault:
                self.faults.append(str(fault))


def _configs(given: _CheckArguments) -> "tuple[Config, Config]":
    """Return the configuration with which a run would start, and the one that is rehearsed.

    They differ if the tiny policy cannot play the environment, and no assignment names the policy:
    then a pretrained policy is assumed for the rehearsal.
    """
    from mage_async.assembly import named_parts, tiny_fault
    from mage_async.config import config_file
    from mage_async.config.schema import Tiny

    name = [] if given.name is None else [f"environment.name={json.dumps(given.name)}"]
    file = None if given.file is None else str(given.file)
    load = partial(config_file.load, config_file.find(file))
    config = load([*name, *given.assignments])
    if isinstance(config.policy, Tiny) and any(tiny_fault(part) for _, part in named_parts(config)):
        # The assignments come last, so that they override this one.
        return config, load([*name, "policy.kind=pretrained", *given.assignments])
    return config, config


def _first_step(given: _CheckArguments) -> str:
    """Return the command that trains the configuration for one step."""
    name = [] if given.name is None else [f"environment.name={given.name}"]
    keys = [*name, *given.assignments, "learner.steps=1"]
    config = [] if given.file is None else ["--config", given.file]
    return shlex.join(["mage", "train", *map(str, config), *(f"--set={key}" for key in keys)])


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
    values = {name: _value(getattr(kind, name)) for name in declared}
    values |= dict.fromkeys(environment.set_by_methods, "set by a method")
    declared |= environment.set_by_methods
    rows = [(name, values[name], on) for name, on, _ in PARTS if name in declared]
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
        print(f"  {name:<{_NAME_WIDTH}}{value:<32}{switched_on}")
    counts = Counter(getattr(kind, "words", ()))
    if twice := [word for word, count in counts.items() if count > 1]:
        indent = " " * (2 + _NAME_WIDTH)
        print(f"{indent}words lists {', '.join(twice)} more than once, which has no effect")
    print("not declared:")
    needless = LEGAL_PARTS if declared & LEGAL_PARTS else set()
    for name, _, without in PARTS:
        if name in declared | needless | unused:
            continue
        if name == "script" and environment.tools:
            without = "no warm start by a script"
        print(f"  {name:<{_NAME_WIDTH}}{without}")
    if not environment.wants_episode:
        without = "of `reset`: `seed` is the same in all episodes of a trial"
        print(f"  {'episode':<{_NAME_WIDTH}}{without}")


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
    """Cut a text to at most 30 characters; an ellipsis replaces the rest."""
    return text if len(text) <= 30 else f"{text[:29]}…"


def _chat(config: "Config", environment: "Environment", folder: Path) -> "ChatFormat | None":
    """Return the policy's chat format. If no model is on this machine, return the tiny model's, or
    None for an environment with tools, which the tiny model's format does not present.
    """
    from mage_async.config.schema import Tiny
    from mage_async.inference.chat_files import load_chat
    from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer

    if found := _model_here(config):
        return load_chat(found, thinking=config.transcript.thinking)
    if environment.tools:
        print("nothing is played: no model is on this machine whose chat template presents tools")
        return None
    if not isinstance(config.policy, Tiny):
        print("no model is on this machine, so the turns below are in the tiny model's chat format")
    save_tokenizer(build_tokenizer(environment.facts.words), folder)
    return load_chat(folder)


def _model_here(config: "Config") -> Path | None:
    """Return the directory of a pretrained policy on this machine; None without one."""
    from mage_async.config.schema import Pretrained, local_policy

    policy = config.policy
    if isinstance(policy, Pretrained) and policy.source:
        return local_policy(policy.source)
    return None


def _print_trials(
    play: _Play, config: "Config", environment: "Environment", chat: "ChatFormat"
) -> None:
    """Print the first turns of random play, the returns of random and scripted play by episode, and
    the time of the calls.

    Where the class does not say what an action may be, any text is played, to show what the model
    reads; what it earns is not printed. Without a script, win-stay, lose-shift is played, if it
    earns more than random play.
    """
    from mage_async.environments.rehearsal import ANY_TEXT
    from mage_async.environments.user_class import ResetStep
    from mage_async.trials.scripted_play import RandomScript, own_script, random_play
    from mage_async.trials.win_stay import NUM_PLAYED

    trials = partial(_trials, play, config, environment, chat)
    is_open = isinstance(environment, ResetStep) and not (
        environment.facts.words
        or LEGAL_PARTS & environment.set_by_methods
        or any(getattr(environment.kind, each, None) is not None for each in LEGAL_PARTS)
    )

    def made_up_play(_: "Environment", source: random.Random) -> "Script":
        return RandomScript(source, ANY_TEXT)

    shown = made_up_play if is_open else random_play
    found = play.attempt("no turns are shown", lambda: play.timed(trials(shown)))
    if found is not None:
        _print_turns(config, chat, found[0], "made-up answers" if is_open else "random play")
    print("return per unit by episode, on training tasks:")
    if found is not None and not is_open:
        _print_returns(play, "random", environment, found)
        _print_oddities(play, environment, found)
    name = "script"
    player: Player | None = own_script
    if environment.script(random.Random(0)) is None:
        name, player = "win-stay", None
        if takes := play.too_long(NUM_PLAYED):
            print(f"  win-stay not played: its rule is found in {NUM_PLAYED} trials, {takes}")
        else:
            player = _win_stay(play, config, environment, chat)
    if player is not None:
        found = play.attempt(f"  {name:<9}not played", lambda: play.timed(trials(player)))
        if found is not None:
            _print_returns(play, name, environment, found)
    _print_time(play, config)


def _win_stay(
    play: _Play, config: "Config", environment: "Environment", chat: "ChatFormat"
) -> "Player | None":
    """Print how the best player of win-stay, lose-shift compares with random play, and return it;
    `None` if a warm start would not clone it.
    """
    from mage_async.policy.demonstrations import compare_win_stay
    from mage_async.trials.win_stay import player_of
    from mage_services.processes.process import in_time

    label = "  win-stay not played"
    compared = play.attempt(label, lambda: compare_win_stay(config, environment, chat, in_time))
    if compared is None:
        return None
    if isinstance(compared, str):
        print(f"{label}: {compared}")
        return None
    print(f"  win-stay {compared.sentence(environment.facts.units)}")
    return player_of(compared.rule) if compared.is_better else None


def _print_turns(config: "Config", chat: "ChatFormat", trial: Any, player: str) -> None:
    """Print the first turns of a trial, as the model reads them."""
    from mage_async.config.schema import Tiny
    from mage_async.trajectory import Kind

    # `turn.stop` counts tokens within the turn's own segment, which is one context of the trial:
    # only turns of the first segment are shown.
    acts = [turn for turn in trial.turns if turn.kind is Kind.ACT and not turn.segment]
    shown, tokens, start = acts[:NUM_TURNS], trial.segments[0].tokens.tolist(), 0
    count = f"{len(shown)} turns" if len(shown) > 1 else "turn"
    print(f"the first {count} of {player}, as the model reads and writes them:")
    for turn in shown:
        for line in chat.decode(tokens[start : turn.stop]).splitlines():
            rows = wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
            print("\n".join(rows[:NUM_ROWS]))
            if len(rows) > NUM_ROWS:
                print(f"    … {len(rows) - NUM_ROWS:,} more rows of this line")
        start = turn.stop
    if not isinstance(config.policy, Tiny) and _model_here(config) is None:
        return  # in the tiny model's format unknown words are bytes: other tokens
    first = "a trial" if len(trial.segments) == 1 else "the first context of a trial"
    most = config.engine.max_tokens
    print(f"  {first} of {player} has {len(tokens):,} tokens of {most:,}")
    if len(tokens) > most:
        print(
            f"  an episode is cut where it has used its share of engine.max_tokens = {most:,}: "
            "shorten the observations, or raise the key"
        )


def _trials(
    play: _Play, config: "Config", environment: "Environment", chat: "ChatFormat", player: "Player"
) -> Iterator[Any]:
    """Return trials of training tasks, which are played without a model, one after the other.

    Raises:
        CallFault: a call failed, or has to wait.
        ConfigError: the environment declares no actions that could be drawn.
    """
    from mage_async.policy.demonstrations import scripted_play
    from mage_async.trials.scripted_play import random_task

    def fail(fault: TrialFault) -> None:
        if not play.note_transient(fault):
            raise fault

    source = random.Random(config.seed)
    tasks = (random_task(environment, "train", source) for _ in itertools.count())
    return scripted_play(config, environment, chat, player, tasks, config.trial.episodes, fail)


def _print_returns(play: _Play, name: str, environment: "Environment", trials: list[Any]) -> None:
    """Print a player's mean returns by episode, and a sentence if an episode contradicts the
    declared bounds.
    """
    from mage_async.results.score import score
    from mage_async.trajectory import num_decimals

    found = score(trials, environment)
    digits, count = num_decimals(found.return_by_episode), f"{len(trials)} trials"
    returns = [f"{mean:+.{digits}f}" for mean in found.return_by_episode]
    if len(trials) < FEWEST_WITH_CI:
        count = f"of {len(trials)} in time, too few for an interval"
    else:
        halves = zip(returns, found.ci95_by_episode, strict=True)
        returns = [f"{mean} ±{half:.{digits}f}" for mean, half in halves]
    print(f"  {name:<9}{'  '.join(returns)}  ({count})")
    if wrong := _wrong_bounds(environment, _earned(trials)):
        print(f"  {wrong}")
        play.to_correct = ", but correct min_return and max_return first: reports use them"


def _earned(trials: list[Any]) -> list[float]:
    """Return the reward of every episode of some trials."""
    return [reward for trial in trials for reward in trial.episode_rewards()]


def _print_oddities(play: _Play, environment: "Environment", trials: list[Any]) -> None:
    """Print oddities of random play: rewards that are rare or always the same, and episodes that
    never end by themselves.
    """
    from mage_async.results.metrics import earning_share
    from mage_async.results.progress import RARE, RARE_CURES

    earned, share = _earned(trials), earning_share(trials)
    if not any(earned):
        print("  random play never earned anything: begin with easier tasks or partial rewards")
    elif share < RARE:
        print(f"  {share:.1%} of the episodes of random play earned anything: {RARE_CURES}")
    elif len(trials) >= FEWEST and len({*earned}) == 1:
        print(
            f"  every episode of random play earned {earned[0]:+g}: if no action changes what an "
            "episode earns, there is nothing to learn"
        )
    if play.is_always_truncated():
        print(
            f"  none of {len(earned)} episodes of random play ended by itself: each was truncated "
            f"after {environment.facts.max_turns} steps; return True as terminated, or declare "
            "`max_turns`"
        )


def _print_time(play: _Play, config: "Config") -> None:
    """Print how long the environment's part of a step would take."""
    from mage_async.config.defaults import default_actors
    from mage_async.plan.forecast import trials_of_step

    size, seconds = trials_of_step(config), play.seconds
    if not seconds:
        return
    begins = f"a step trains on {size} trials; without a model, one took {seconds:.2g} s here"
    # A busy machine makes a short trial wait too, but only for a core.
    if play.waited_s < max(LEAST_WAIT_S, seconds / 2):
        print(
            f"{begins}, so the environment's part of a step is about {size * seconds:.2g} s on one "
            "core"
        )
        return
    actors = default_actors(config)
    # An actor plays as many trials at the same time as its engine has contexts, or as its
    # environment may have open objects.
    at_once = min(config.engine.max_contexts, config.environment.most_open or size) * actors
    rounds = -(-size // at_once)
    part = size * (seconds - play.waited_s) + rounds * play.waited_s
    print(
        f"{begins}, {play.waited_s:.2g} s of them waiting; {actors} actors wait for up to "
        f"{min(size, at_once)} trials at the same time, so the environment's part of a step is "
        f"about {part:.2g} s"
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


def _print_heldout(play: _Play, config: "Config", environment: "Environment") -> None:
    """Print whether held-out tasks differ from training tasks."""
    from mage_async.environments.rehearsal import NUM_EPISODES, compare_heldout
    from mage_async.environments.user_class import SPLITS

    label = "held-out tasks are not compared"
    num_episodes = 2 * FEWEST * NUM_EPISODES
    if takes := play.too_long(num_episodes / config.trial.episodes):
        print(f"{label}: {FEWEST} of each split take {num_episodes} episodes, {takes}")
        return
    found = play.attempt(label, lambda: play.within_budget(compare_heldout(environment)))
    if found is None:
        return
    last, declared = found[-1], {split: len(environment.members(split)) for split in SPLITS}
    print(last.sentence())
    if (last.num_train, last.num_heldout) != (declared["train"], declared["heldout"]):
        print(
            f"  this is a sample: {declared['train']:,} training and {declared['heldout']:,} "
            "held-out tasks are declared, and the comparison ends after "
            f"{NUM_TRIALS} pairs or {BUDGET_S:g} s"
        )
    is_whole = last.num_train == declared["train"]
    is_few = is_whole and 1 < last.num_kinds <= FEW_KINDS and last.num_known < last.num_heldout
    if is_few and not getattr(environment, "interchangeable", ()):
        print(
            f"  {last.num_kinds} different training tasks are so few that they can be learned by "
            'heart, and held-out ones then earn less: let `members("train")` list more of them, or '
            'list words that could be exchanged, as in interchangeable = [("left", "right")]'
        )
