"""`mage adapt`: measure whether a model adapts, with controls, and certify it in one sentence.

The model is behind a chat endpoint of another server, in a model directory, or the policy of a run.
`mage_services/actor/adaptation.py` plays the tasks and records the returns, and
`mage_async/results/certificate.py` computes the verdict from them.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.errors import ConfigError, MageError, RunFailed
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.options import add_checkpoint, add_number, add_set, amount, positive

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.trials.chat_format import ChatFormat
    from mage_services.actor.adaptation import Game, Measurement, Record
    from mage_services.engines.chat_endpoint import ChatEndpoint, Endpoint
    from mage_services.engines.engine import Engine

HELP = "Measure whether a model adapts over several episodes of a task, against controls."
GAMES = "rps,numberlock,mastermind"
"""Names of the games that are played if none are named."""
TRIALS = 128
"""Tasks of each game, unless a test of a paper has another number."""
PAPERS = {"orbit": ("papers/orbit", 256)}
"""Tests of papers that `--games` may name: a configuration, whose environment is a mix, and the
number of tasks of each game. The games are the parts of the mix with a share of 0: those that are
not trained on.
"""
CONCURRENCY = 16
"""Number of trials that an endpoint plays at once, unless `--concurrency` has another."""
ENDPOINT_OPTIONS = (
    "concurrency",
    "requests_per_minute",
    "timeout",
    "patience",
    "key_variable",
    "request",
)
"""Options that apply to endpoints alone."""
REPORT_S = 10.0
"""Seconds between two lines of progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the games and the limits of an endpoint."""
    parser.epilog = (
        "Every answer is recorded as it comes, and the same command continues a measurement that "
        "was interrupted. See docs/adapt.md for the controls and for what a verdict means."
    )
    model = (
        "openai:URL#NAME, a chat endpoint with OpenAI's protocol; DIR, a HuggingFace model "
        "directory; or RUN_DIR, a run, of which a checkpoint plays"
    )
    parser.add_argument("--model", required=True, help=model)
    add_checkpoint(parser, "of a run: newest, best, or the number of a step (default: newest)")
    # None: not given. So `_refuse` finds a checkpoint that is given for a model which is no run.
    parser.set_defaults(checkpoint=None)
    games = (
        f"names as environment.name, separated by commas (default: {GAMES}; of a run, its own); "
        f"{' or '.join(PAPERS)} is that paper's test"
    )
    parser.add_argument("--games", metavar="A,B", help=games)
    option = "an option of a game, such as maze.size=5; can be given several times"
    parser.add_argument(
        "--option", action="append", default=[], metavar="GAME.KEY=VALUE", help=option
    )
    add_number(
        parser, "--episodes", "episodes of a task (default: 3)", 3, type=_two_or_more, metavar="K"
    )
    paper = ", ".join(f"{number} with --games {name}" for name, (_, number) in PAPERS.items())
    add_number(
        parser, "--trials", f"tasks of each game (default: {TRIALS}; {paper})", type=positive
    )
    carried = (
        "what a later episode sees: the history, or the model's reflections (default: history)"
    )
    memories = ("history", "reflection")
    parser.add_argument("--memory", choices=memories, default="history", help=carried)
    out = (
        "where the record, certificate.json and certificate.html are written (default: adapt/MODEL)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    margin = "the least adaptation that matters, as a share of the range of returns (default: 0.1)"
    add_number(parser, "--margin", margin, 0.1, type=_share, metavar="X")
    tokens = (
        "largest length of an answer (default: 512; of a run or a directory, the configuration's)"
    )
    add_number(parser, "--max-tokens", tokens, type=positive)
    temperature = (
        "temperature of sampling (default: the endpoint's own; of a run or a directory, the "
        "configuration's)"
    )
    add_number(parser, "--temperature", temperature, type=amount, metavar="T")
    price = "money per million prompt tokens and per million sampled tokens"
    parser.add_argument("--price", type=_price, metavar="IN,OUT", help=price)
    limits = parser.add_argument_group("limits of an endpoint")
    # None: not given. The defaults are in `Endpoint`, except that of `--concurrency`.
    at_once = f"trials played at once (default: {CONCURRENCY})"
    add_number(limits, "--concurrency", at_once, type=positive)
    minute = "largest rate of calls (default: the endpoint's own limit, which holds in any case)"
    add_number(limits, "--requests-per-minute", minute, type=amount)
    add_number(limits, "--timeout", "seconds of one call (default: 300)", type=amount, metavar="S")
    patience = "seconds without any answer after which the endpoint is given up (default: 600)"
    add_number(limits, "--patience", patience, type=amount, metavar="S")
    key = "environment variable that holds the key (default: OPENAI_API_KEY)"
    limits.add_argument("--key-variable", metavar="NAME", help=key)
    request = (
        "further keys of each request, such as '{\"top_p\": 0.9}'; null removes one, such as "
        '\'{"max_tokens": null, "max_completion_tokens": 4096}\''
    )
    limits.add_argument("--request", type=_table, metavar="JSON", help=request)
    add_set(parser, "of a run or a directory: change a key, such as engine.max_tokens=4096")


def run(given: argparse.Namespace) -> int:
    """Play the tasks that are not recorded yet, and write and print the certificate.

    Raises:
        ConfigError: the model, a game or an option cannot be used, or the record is of another
            measurement.
        RunError: the folder cannot be written, or another process measures in it.
        RunFailed: the endpoint or the disk ended the measurement, which can be continued.
    """
    import uvloop

    from mage_async.assembly import environment_of
    from mage_async.environments.mix import Mix
    from mage_async.pages.certificate import render_certificate
    from mage_async.policy.full_disk import writing
    from mage_async.results.run_files import write_whole
    from mage_services.processes.process import first_failure
    from mage_services.processes.run_lock import hold

    player = _player(given)
    # All games are checked before the folder is made, so that a wrong one leaves no folder.
    for _, name, options in player.games:
        environment = environment_of(player.config(name, options))
        if isinstance(environment, Mix):
            names = ",".join(dict.fromkeys(part.name for part in environment.parts))
            raise ConfigError(
                f"the game {name!r} is a mix, which is not measured as a whole: name its "
                f"environments, as in --games {names}"
            )
    out = given.out or Path("adapt") / re.sub(r"[^\w.-]+", "-", player.name)
    refusal = f"{out} is being measured by another process: wait for it, or end it"
    with writing(str(out), "make room, or choose another --out"):
        out.mkdir(exist_ok=True, parents=True)
        lock = hold(out / ".lock", refusal)
    try:
        with writing(str(out), "make room"):
            _check_same(out / "measurement.json", _identity(given, player))
        document = uvloop.run(_measure(given, player, out))
        with writing(f"the certificate to {out}", "make room"):
            write_whole(out / "certificate.json", json.dumps(document, indent=1))
            write_whole(out / "certificate.html", render_certificate(document))
    except* KeyboardInterrupt:
        raise RunFailed(f"interrupted; {_continues(out)}") from None
    except* MageError as group:
        failure = first_failure(group)
        # After a wrong option, the same command cannot continue the measurement.
        if isinstance(failure, ConfigError):
            raise failure from None
        raise RunFailed(f"{failure}. {_continues(out)}") from None
    finally:
        os.close(lock)
    _show(document, out)
    return 0


@dataclass(frozen=True, slots=True)
class _Player:
    """Describe the model of `--model`: an endpoint, a model directory, or the policy of a run."""

    name: str
    """Name of the model in the certificate."""
    games: Sequence[tuple[str, str, dict[str, Any]]]
    """Label, name and options of each game."""
    config: "Callable[[str, dict[str, Any]], Config]"
    """Returns the configuration for a game by its name and options."""
    endpoint: "Endpoint | None" = None
    policy: Path | None = None
    """Directory of the model; None for an endpoint."""
    version: int = 0
    """Version of the policy of a run; 0 for other models."""


def _player(given: argparse.Namespace) -> _Player:
    """Return the model that the command line names.

    Raises:
        ConfigError: there is no such model, or an option does not apply to it.
    """
    kind, colon, address = given.model.partition(":")
    if kind == "openai" and colon:
        _refuse(given, ("set",), "is for a run or a directory; an endpoint takes --request")
        _refuse(given, ("checkpoint",), "is for a run")
        return _endpoint_player(given, address)
    _refuse(given, ENDPOINT_OPTIONS, "is for an endpoint, openai:URL#NAME")
    directory = Path(given.model)
    if (directory / "config.toml").is_file():
        return _run_player(given, RunDirectory(directory.resolve()))
    _refuse(given, ("checkpoint",), "is for a run")
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--model {given.model!r}: no run (config.toml) and no model (config.json) lies there; "
            "an endpoint is written openai:URL#NAME"
        )
    from mage_async.config import config_file

    def config(name: str, options: dict[str, Any]) -> "Config":
        file = config_file.find(None)
        source = f"policy.source={json.dumps(str(directory.resolve()))}"
        return config_file.load(file, [source, *_assignments(given, name, options), *given.set])

    games = _games_of(given.games or GAMES, given.option)
    return _Player(directory.name, games, config, policy=directory.resolve())


def _refuse(given: argparse.Namespace, options: Sequence[str], advice: str) -> None:
    """Refuse options that do not apply to the model of `--model`, if they are given.

    Raises:
        ConfigError: one of the options is given.
    """
    for name in options:
        if getattr(given, name) not in (None, []):
            raise ConfigError(f"--{name.replace('_', '-')} {advice}")


def _endpoint_player(given: argparse.Namespace, address: str) -> _Player:
    """Return a model at a chat endpoint; `address` is URL#NAME."""
    from mage_async.config import config_file
    from mage_services.engines.chat_endpoint import Endpoint

    url, _, model = address.rpartition("#")
    if not url or not model:
        raise ConfigError(f"--model must be openai:URL#NAME, got {given.model!r}")
    limits = {
        "key_variable": given.key_variable,
        "request": given.request,
        "requests_per_minute": given.requests_per_minute or None,  # 0: no limit
        "timeout_s": given.timeout,
        "patience_s": given.patience,
    }
    stated: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    endpoint = Endpoint(url=url, model=model, temperature=given.temperature, **stated)

    def config(name: str, options: dict[str, Any]) -> "Config":
        """Return the configuration for a game; it describes the trials, and no policy."""
        # No policy is loaded: "pretrained" stands for a model that may write any text, and the
        # source is a placeholder. A chat endpoint writes whole messages, so the transcript cannot
        # write a tag before them.
        keys = [
            'policy.kind="pretrained"',
            'policy.source="endpoint"',
            'transcript.forced_tags="none"',
        ]
        assignments = [*keys, *_assignments(given, name, options, given.max_tokens or 512)]
        return config_file.load(config_file.find(None), assignments)

    return _Player(model, _games_of(given.games or GAMES, given.option), config, endpoint=endpoint)


def _run_player(given: argparse.Namespace, run: RunDirectory) -> _Player:
    """Return a policy of a run, or that of a folder of `mage push`, which has the configuration
    of its run too.
    """
    from mage_async.config import config_file
    from mage_async.plan.does_it_fit import check_words
    from mage_services.actor.play_session import chosen_policy

    own = config_file.load_recorded(run.config, imports=False)
    if (run.root / "config.json").is_file():
        _refuse(given, ("checkpoint",), "is for a run")
        policy, version = run.root, 0
    else:
        run.check_policy()
        policy, version = chosen_policy(run, own, given.checkpoint or "newest")
    own_name = own.environment.name
    games = _games_of(given.games or own_name, given.option)
    games = [
        (label, name, {**own.environment.options, **options} if name == own_name else options)
        for label, name, options in games
    ]

    def config(name: str, options: dict[str, Any]) -> "Config":
        """Return the run's configuration for a game; check that the policy knows its words."""
        keys = [*_assignments(given, name, options), *given.set]
        found = config_file.load_recorded(run.config, keys, imports=False)
        check_words(found, policy)
        return found

    return _Player(run.root.name, games, config, policy=policy, version=version)


def _assignments(
    given: argparse.Namespace, name: str, options: dict[str, Any], max_tokens: int | None = None
) -> list[str]:
    """Return the changes to the configuration that the command line makes for one game.

    Args:
        max_tokens: Largest length of an answer; None for that of the command line, if it has one.
    """
    from mage_async.config.config_file import toml_text

    longest = max_tokens or given.max_tokens
    lengths = [
        f"transcript.max_{kind}_tokens={longest}" for kind in ("action", "reflection") if longest
    ]
    return [
        f"environment.name={json.dumps(name)}",
        # These options replace all of those that the configuration file sets.
        f"environment.options={toml_text(options)}",
        f"trial.episodes={given.episodes}",
        f"trial.memory={given.memory}",
        "trial.episode_budget=0",  # every trial plays all its episodes
        *lengths,
    ]


def _games_of(names: str, assignments: Sequence[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return label, name and options of each game.

    Args:
        names: Value of `--games`.
        assignments: Values of `--option`.

    Raises:
        ConfigError: an option belongs to no game, or a game is named twice.
    """
    from mage_async.config.config_file import toml_value

    games = list[tuple[str, str, dict[str, Any]]]()
    for name in _split(names):
        games += _games_of_paper(name) or [(name, name, {})]
    labels = [label for label, _, _ in games]
    if not games or len(set(labels)) < len(labels):
        raise ConfigError(f"--games must name different games, got {names!r}")
    for text in assignments:
        key, equals, value = text.partition("=")
        label, dot, option = key.strip().rpartition(".")
        if not equals or not dot or label not in labels:
            raise ConfigError(
                f"--option takes GAME.KEY=VALUE with one of {', '.join(labels)}, got {text!r}"
            )
        games[labels.index(label)][2][option] = toml_value(value.strip())
    return games


def _split(names: str) -> list[str]:
    """Return the names of `--games`."""
    return [name for name in map(str.strip, names.split(",")) if name]


def _games_of_paper(name: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the games of a paper's test, with their options; an empty list if `name` names no
    test.
    """
    from mage_async.config import config_file

    if name not in PAPERS:
        return []
    environment = config_file.load(config_file.find(PAPERS[name][0])).environment
    tested = [part for part in environment.options["parts"] if part.get("share") == 0]
    return [(part["name"], part["name"], dict(part["options"])) for part in tested]


def _num_tasks(given: argparse.Namespace) -> int:
    """Return the number of tasks of each game."""
    of_papers = [PAPERS[name][1] for name in _split(given.games or "") if name in PAPERS]
    return int(given.trials or max(of_papers, default=TRIALS))


def _identity(given: argparse.Namespace, player: _Player) -> dict[str, Any]:
    """Return the arguments that must equal those of an earlier call, if its measurement is to be
    continued.
    """
    from mage_async.assembly import played_sources

    endpoint = player.endpoint
    sources = [played_sources(player.config(name, options)) for _, name, options in player.games]
    # Other weights may be written to the same directory, and a class may be edited.
    paths = sorted(player.policy.iterdir()) if player.policy else []
    files = [(each.name, each.stat()) for each in paths]
    return {
        "model": given.model if endpoint else str(player.policy),
        "version": player.version,
        "files": _digest([(name, each.st_size, each.st_mtime_ns) for name, each in files]),
        "sources": sources,
        "games": [list(game) for game in player.games],
        "episodes": given.episodes,
        "memory": given.memory,
        "max_tokens": given.max_tokens,
        "temperature": given.temperature,
        "request": given.request or {},
        "set": given.set,
    }


def _digest(value: Any) -> str:
    """Return a digest of plain data."""
    return blake2s(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _check_same(file: Path, identity: dict[str, Any]) -> None:
    """Write the identity of a measurement, or compare it with that of an earlier call.

    Raises:
        ConfigError: the folder holds another measurement.
    """
    from mage_async.results.run_files import read_document, write_whole

    # Pass through JSON once, as the recorded identity did: it turns tuples into lists.
    identity = json.loads(json.dumps(identity))
    if not (known := read_document(file)):
        write_whole(file, json.dumps(identity, indent=1))
        return
    if changed := [key for key, value in identity.items() if known.get(key) != value]:
        key = changed[0]
        if key == "sources":
            raise ConfigError(
                f"{file.parent} holds a measurement from before a class of the games was edited: "
                "give this one another --out"
            )
        raise ConfigError(
            f"{file.parent} holds a measurement with {key} = {json.dumps(known.get(key))}, not "
            f"{json.dumps(identity[key])}: give this one another --out"
        )


async def _measure(given: argparse.Namespace, player: _Player, out: Path) -> dict[str, Any]:
    """Play the tasks that are not recorded yet, and return the certificate as plain data.

    Completions that were received before a cancellation are kept.
    """
    from mage_async.results.certificate import too_few_members
    from mage_async.results.run_files import read_lines
    from mage_services.actor.adaptation import Measurement, Record
    from mage_services.actor.rollout import Retries
    from mage_services.environments.call_runner import CallRunner

    record, began = Record(out), time.monotonic()
    configs = [player.config(name, options) for _, name, options in player.games]
    chat, engine, games = _prepare(given, player, configs, record)
    concurrency = given.concurrency or CONCURRENCY
    at_once = concurrency if player.endpoint else configs[0].engine.max_contexts
    async with engine, CallRunner(configs[0].environment) as workers:
        measurement = Measurement(
            games,
            chat,
            engine,
            record,
            workers,
            num_tasks=_num_tasks(given),
            at_once=at_once,
            retries=Retries(configs[0].environment.retries, _say),
        )
        if too_few := too_few_members(measurement.num_members()):
            _say(f"no verdict can come of these {_num_tasks(given):,} tasks: {too_few}")
        for sentence in _unnamed_actions(games) if player.endpoint else ():
            _say(sentence)
        _say(f"{await engine.describe()}: {measurement.num_trials():,} trials into {out}")
        if num_done := len(record.outcomes):
            _say(f"{num_done:,} of them are recorded, with {record.usage.calls:,} answers")
        with _session(out / "sessions.jsonl", began):
            await _with_progress(measurement, given.price)
    wall_s = sum(line["wall_s"] for line in read_lines(out / "sessions.jsonl"))
    return _document(given, player, measurement, wall_s)


@contextmanager
def _session(file: Path, began: float) -> Iterator[None]:
    """Append the seconds since `began` to a file at the end of the block, also if it is interrupted
    or fails.
    """
    from mage_async.policy.full_disk import writing
    from mage_services.processes.process import append_lines

    try:
        yield
    finally:
        with writing(str(file), "make room"):
            append_lines(file, [{"wall_s": time.monotonic() - began}])


def _prepare(
    given: argparse.Namespace, player: _Player, configs: "Sequence[Config]", record: "Record"
) -> "tuple[ChatFormat, ChatEndpoint | Engine, list[Game]]":
    """Return the chat format, the engine, and the games as this model plays them."""
    from mage_async.assembly import environment_of, trial_config_of
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.adaptation import Game
    from mage_services.engines.chat_endpoint import ChatEndpoint, text_chat
    from mage_services.engines.engine import make_engine

    if player.endpoint:
        chat = text_chat()
        engine: ChatEndpoint | Engine = ChatEndpoint(player.endpoint, _say, record.served)
    else:
        assert player.policy is not None, "a player is an endpoint or a model directory"
        chat = load_chat(player.policy, thinking=configs[0].transcript.thinking)
        engine = make_engine(configs[0], player.policy, "adapt")
    games = []
    for (label, _, _), config in zip(player.games, configs, strict=True):
        environment = environment_of(config)
        trials = trial_config_of(config, environment, chat, given.episodes)
        if player.endpoint:  # the endpoint has deadlines and a context length of its own
            trials = replace(trials, max_tokens=0, turn_deadline_s=float("inf"))  # 0: no limit
        elif given.temperature is not None:
            sampling = replace(trials.sampling, temperature=given.temperature)
            trials = replace(trials, sampling=sampling)
        games.append(Game(label, environment, trials))
    return chat, engine, games


def _unnamed_actions(games: "Sequence[Game]") -> Iterator[str]:
    """Yield a sentence for each class whose rules name none of its legal actions."""
    from mage_async.environments.interchangeable_words import whole_word
    from mage_async.environments.user_class import ResetStep

    for game in games:
        if not isinstance(game.environment, ResetStep):
            continue
        actions, rules = game.environment.actions_of_every_turn, game.environment.rules()
        if isinstance(actions, tuple) and not whole_word(actions).search(rules):
            yield (
                f"{game.label}: the docstring or `rules` of the class names none of its "
                f"{len(actions)} legal_actions, such as {actions[0]}, and an endpoint may write "
                "any text: name them there, unless every observation does"
            )


async def _with_progress(measurement: "Measurement", price: tuple[float, float] | None) -> None:
    """Play, and show a bar in a terminal or print a line now and then."""
    import asyncio

    from rich import progress

    from mage_services.processes.process import ticks

    # Rates are those of this process: trials and calls that earlier ones recorded are subtracted.
    began, num_all, record = time.monotonic(), measurement.num_trials(), measurement.record
    finished, calls = len(record.outcomes), record.usage.calls

    def line() -> str:
        """Return calls per second, tokens and money."""
        usage, spent = record.usage, time.monotonic() - began
        tokens = usage.prompt_tokens + usage.completion_tokens
        money = "" if price is None else f", {_money(asdict(usage), price):.2f} spent"
        return f"{(usage.calls - calls) / max(spent, 1e-9):.1f} calls/s, {tokens:,} tokens{money}"

    async def report() -> None:
        """Show the progress until cancelled."""
        async for _ in ticks(REPORT_S if not sys.stderr.isatty() else 0.5):
            done = len(record.outcomes)
            if bar.disable:
                left = (num_all - done) * (time.monotonic() - began) / max(1, done - finished)
                more = f", about {left / 60:.0f} min left" if done > finished else ""
                _say(f"{done:,} of {num_all:,} trials, {line()}{more}")
            else:
                bar.update(task, completed=done, status=line())

    kinds = (progress.BarColumn, progress.MofNCompleteColumn, progress.TimeRemainingColumn)
    columns = (*(kind() for kind in kinds), progress.TextColumn("{task.fields[status]}"))
    with progress.Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=num_all, completed=finished, status="")
        async with asyncio.TaskGroup() as group:
            reporting = group.create_task(report())
            await measurement.play()
            reporting.cancel()


def _document(
    given: argparse.Namespace, player: _Player, measurement: "Measurement", wall_s: float
) -> dict[str, Any]:
    """Return the certificate, the returns that it rests on, and the costs, as plain data.

    Returns are listed by arm. An arm is a way in which each task is played: the model's own way, or
    one of the controls.
    """
    import msgspec

    from mage_async.pages.certificate import warnings_of
    from mage_async.results.certificate import TaskReturns, arm_returns, certificate

    games, record = measurement.games, measurement.record
    tasks = {game.label: measurement.returns(game.label) for game in games}
    every = [task for each in tasks.values() for task in each]
    usage = asdict(record.usage)
    is_counted = bool(usage["prompt_tokens"] and usage["completion_tokens"])
    money = _money(usage, given.price) if given.price is not None and is_counted else None
    costs = usage | {"wall_s": wall_s, "money": money}
    counts = {label: measurement.counts(label) for label in tasks}
    lengths = {game.config.sampling.max_tokens for game in games}
    lengths |= {game.config.max_reflection_tokens for game in games if game.config.reflects}
    named = zip(games, player.games, strict=True)
    # There is one certificate for each game, and one for all games together. The permitted error of
    # each is divided by their number.
    statements = len(games) + 1 if len(games) > 1 else 1

    def certified(tasks: Sequence[TaskReturns]) -> dict[str, Any]:
        """Return the certificate of some tasks, as plain data."""
        found = certificate(tasks, margin=given.margin, statements=statements)
        return dict(msgspec.to_builtins(found))

    return {
        "model": player.name,
        "served": record.served,  # name of the model that answered, as the endpoint states it
        "fingerprints": sorted(record.fingerprints),
        **certified(every),
        "margin": given.margin,
        "episodes": given.episodes,
        "memory": given.memory,
        "warnings": [
            *warnings_of(counts, costs, lengths, len(record.fingerprints)),
            *_seen_ranges(measurement),
        ],
        "returns": arm_returns(every),
        "games": [
            {
                "label": game.label,
                "name": name,
                "options": options,
                **certified(tasks[game.label]),
                "returns": _in_units(arm_returns(tasks[game.label]), game, measurement),
                "references": game.environment.references("heldout", given.episodes),
                "actions": counts[game.label].actions,
                "invalid_actions": counts[game.label].invalid,
            }
            for game, (_, name, options) in named
        ],
        "costs": costs,
        "tasks": [msgspec.to_builtins(task) for task in every],
    }


def _in_units(returns: Any, game: "Game", measurement: "Measurement") -> Any:
    """Convert returns from shares of the game's range to the game's own scale, per unit."""
    least, most = measurement.scale(game.label)
    units = game.environment.facts.units

    def own(value: tuple[float, float] | None) -> tuple[float, float] | None:
        """Convert a mean and the half-width of its interval; None if the episode was not played."""
        if value is None:
            return None
        return (least + value[0] * (most - least)) / units, value[1] * (most - least) / units

    return {name: [own(value) for value in values] for name, values in returns.items()}


def _money(usage: dict[str, Any], price: tuple[float, float]) -> float:
    """Return the price of the tokens used, in the unit of `price`, which is per million tokens."""
    cost: float = usage["prompt_tokens"] * price[0] + usage["completion_tokens"] * price[1]
    return cost / 1e6


def _show(document: dict[str, Any], out: Path) -> None:
    """Print the returns, what they cost, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from mage_async.results.intervals import half_text

    table = Table(
        title=f"{document['model']}, {document['num_tasks']:,} tasks", title_justify="left"
    )
    table.add_column("share of the range of returns")
    for number in range(document["episodes"]):
        table.add_column(f"episode {number + 1}", justify="right")
    for name, values in document["returns"].items():
        texts = [
            "" if each is None else f"{each[0]:.3f} ±{half_text(each[1], 3, document['num_tasks'])}"
            for each in values
        ]
        table.add_row(name, *texts)
    # A name such as `tea:Tea` followed by a colon would become an emoji.
    console = Console(emoji=False)
    console.print(table)
    for game in document["games"]:
        console.print(f"{game['label']}: {game['sentence']}", markup=False, highlight=False)
    for warning in document["warnings"]:
        console.print(f"careful: {warning}", markup=False, highlight=False)
    costs = document["costs"]
    money = "" if costs["money"] is None else f", {costs['money']:.2f} in money"
    print(
        f"{costs['calls']:,} calls, {costs['prompt_tokens']:,} prompt and "
        f"{costs['completion_tokens']:,} sampled tokens{money}; {out / 'certificate.html'}"
    )
    print(f"{document['model']} {document['sentence']}")


def _seen_ranges(measurement: "Measurement") -> Iterator[str]:
    """Yield a warning for each game that does not declare the range of its returns."""
    for game in measurement.games:
        facts = game.environment.facts
        if facts.min_return is None or facts.max_return is None:
            least, most = measurement.scale(game.label)
            yield (
                f"{game.label} does not declare min_return and max_return, so its shares are of "
                f"the returns that were seen, {least:g} to {most:g}; those of other tasks may be "
                "shares of another range"
            )


def _continues(out: Path) -> str:
    """Return a sentence on an interrupted measurement: what is recorded, and how to continue."""
    from mage_services.actor.adaptation import Record

    record = Record(out)
    return (
        f"{len(record.outcomes):,} trials and {record.usage.calls:,} answers are recorded in "
        f"{out}; the same command continues"
    )


def _say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def _two_or_more(text: str) -> int:
    """Parse a whole number of at least 2, as the `type` of an argument."""
    if (number := positive(text)) < 2:
        raise argparse.ArgumentTypeError("adaptation needs at least 2 episodes")
    return number


def _share(text: str) -> float:
    """Parse a number between 0 and 1, as the `type` of an argument."""
    if not 0 < (number := amount(text)) < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text!r}")
    return number


def _price(text: str) -> tuple[float, float]:
    """Parse two numbers separated by a comma, as the `type` of an argument."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers with a comma, got {text!r}")
    return amount(parts[0]), amount(parts[1])


def _table(text: str) -> dict[str, Any]:
    """Parse a JSON object, as the `type` of an argument."""
    try:
        table = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(table, dict):
        raise argparse.ArgumentTypeError(f"must be an object, got {text!r}")
    return table
