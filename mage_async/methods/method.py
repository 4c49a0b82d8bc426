"""Define the interface of a research method, and call the methods that a run turns on.

A method is a class derived from `Method` that overrides the hooks it needs; every hook does nothing
by default. The core never names a method: it calls `Methods`, which calls the methods that the
configuration turns on. The docstring of a hook says which process calls the hook. A hook must be a
function of the configuration, of its arguments and of the method's state, so that a replay of the
journal computes the same. The hooks of the learner's step are called on a new instance each time,
whose state is that of `begin(None, 0)`: pages and exports, which have no states, compute the same
rewards.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2s
from itertools import chain
from math import isfinite, prod
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from mage_async.config.schema import Config, Embedded
from mage_async.config.section import Section
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment, Play
from mage_async.errors import ConfigError
from mage_async.methods.catalogue import method_class
from mage_async.trajectory import Group, Guidance, Kind, SecondRole, Task, Trial
from mage_async.user_modules import as_config_error


@dataclass(frozen=True, slots=True)
class Horizon:
    """State how long the trials of one group are."""

    num_episodes: int
    max_turns: int = 0
    """Largest number of actions of an episode; 0: as many as the environment allows."""


class Adviser(Protocol):
    """Propose another action at each action of a trial, which is recorded and not played."""

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str | None:
        """Return the adviser's action, which is recorded and not played; None: it knows none.

        Args:
            play: the episode, in its state before the policy's action.
            episode: number of the episode, from 0.
            done: the policy's earlier actions of the episode.
        """
        ...


Advisers = Callable[[Environment, Task, int], Adviser | None]
"""Function that makes the adviser of a trial from the trial's environment (of a mix of several: the
one that the trial plays), its task and its index in the group."""


def overriding(config: Config, hook: str) -> list[str]:
    """Return the names of the methods of a configuration that override a hook of `Method`."""
    return [name for name in config.methods if _overrides(method_class(name), hook)]


def _overrides(kind: Any, hook: str) -> bool:
    """Return whether a method's class overrides a hook of `Method`."""
    return getattr(kind, hook) is not getattr(Method, hook)


def check_two_adapters(key: str, config: Config) -> None:
    """Refuse a configuration in which the two roles of a policy cannot have an adapter each.

    Args:
        key: name of the boolean key that turns the two roles on; the error names it.

    Raises:
        ConfigError: the message has the first problem and its remedy.
    """
    others = overriding(config, "self_play_share")
    for problem, is_present, remedy in (
        (
            "the two roles are low-rank adapters, and policy.lora is absent",
            config.policy.lora is None,
            "set policy.lora.rank = 16",
        ),
        (
            "SGLang cannot compute the tokens of one context by two adapters",
            not isinstance(config.engine, Embedded),
            'set engine.kind = "embedded"',
        ),
        (
            "a version of the policy in the opponent's seat has one role",
            config.population.rivals > 0,
            "set population.rivals = 0",
        ),
        (
            "a policy in both seats has one role",
            bool(others),
            f"leave methods.{' and methods.'.join(others)} out",
        ),
        (
            'transport.weights = "nccl" has not been tried with two adapters',
            config.transport.weights.kind == "nccl",
            'set transport.weights = "disk" or "tensor"',
        ),
    ):
        if is_present:
            raise ConfigError(f"{key}: {problem}: {remedy}, or set {key} = false")


class Method:
    """Implement one method of a run. A subclass overrides `Settings` and the hooks that it needs.

    Args:
        settings: the method's table of the configuration, an instance of `Settings`.
        config: the whole configuration.
        environment: the environment of the run; None: it is loaded when it is first used.
    """

    Settings: ClassVar[type[Section]] = Section
    """Keys of the table `[methods.NAME]`, with a type, a default and a docstring each."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Keys of the configuration by name of a preset: `mage --method NAME` writes them over a file.
    A preset that turns the method on sets a key of its table, `methods.NAME.KEY`."""
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Unit and meaning of each metric that the method adds to a step's line of `metrics.jsonl`, by
    name."""

    def __init__(
        self, settings: Any, config: Config, environment: Environment | None = None
    ) -> None:
        self.settings, self.config = settings, config
        if environment is not None:
            self.environment = environment

    @cached_property
    def environment(self) -> Environment:
        """The environment of the run."""
        return load(self.config.environment.name, **self.config.environment.options)

    def check(self) -> None:
        """Refuse a configuration with which the method would not work as documented.

        Called once, before any process starts.

        Raises:
            ConfigError: the message has the key, its value, and what to write instead.
        """

    # Groups and their trials.

    def horizon(self, version: int, horizon: Horizon) -> Horizon:
        """Return the horizon of a group that is granted at a policy version.

        Called by the learner for each grant. The horizon travels with the grant.

        Args:
            horizon: `trial.episodes`, and no limit of turns.
        """
        return horizon

    def self_play_share(self) -> float:
        """Return the share of groups, 0 to 1, in which the policy plays both seats of each trial
        and is trained on both.
        """
        return 0.0

    def guidance(self, number: int, task: Task) -> Guidance | None:
        """Return text with which the first trials of a new group begin; None: no text.

        Called by the learner when it grants a group, and again by a replay of the journal, which
        compares the text with the recorded one.

        Args:
            number: number of the group, in order of grant.
        """
        return None

    def guidance_tokens(self) -> int:
        """Return the least number of tokens that a guidance of this method adds to a context."""
        return 0

    def evaluation_guidance(
        self, task: Task, record: Mapping[str, Any] | None = None
    ) -> Guidance | None:
        """Return text with which a trial of an evaluation begins; None: no text.

        Args:
            record: result of `record` at the evaluated version; None: this instance's state.
        """
        return None

    def advisers(self) -> Advisers | None:
        """Return a function that makes the adviser of each trial in training; None: no adviser.

        Called by every actor as it starts. The answers of advisers are in `Trial.alternatives`.
        """
        return None

    # State: kept by the learner, in step with the policy version.

    def begin(self, state: bytes | None, version: int) -> None:
        """Replace the state.

        Args:
            state: result of `state`, from the journal; None: the run has just begun, or the method
                has just been added to it.
            version: the policy version that the state belongs to.
        """

    def adopt(self, settings: Any, config: Config) -> None:
        """Replace the configuration: a resumed run may have other values than before."""
        self.settings, self.config = settings, config

    def learn(self, groups: Sequence[Group]) -> None:
        """Update the state with a batch, after a step has trained on the batch.

        Args:
            groups: in order of grant.
        """

    def state(self) -> bytes | None:
        """Return the whole state; equal states are equal bytes. None: the method has none.

        Each segment of the journal begins with the state, each commit holds its digest, and a
        replay compares the digests. A checkpoint does not hold it.
        """
        return None

    def record(self) -> dict[str, Any] | None:
        """Return the state as plain data for people and for evaluations; None: nothing is written.

        The learner appends it to `memory.jsonl` of the run before it announces a version. The keys
        "version" and "method" are added.
        """
        return None

    # The warm start, which clones scripted trials before training.

    def guide_demonstration(self, task: Task) -> Guidance | None:
        """Return text with which the next scripted trial of a warm start begins, and whose
        decisions its script follows in the first episode; None: no text.
        """
        return None

    def learn_demonstration(self, trial: Trial) -> None:
        """Take a scripted trial of the warm start into account for later ones."""

    # The step of the learner. No hook below sees the state, and `__init__` should be cheap.

    def turn_rewards(self, trials: Sequence[Trial]) -> list[list[float]] | None:
        """Return a reward for each turn of each trial of a batch, added to the environment's;
        None: nothing is added.

        It stays in the episode of its turn, whatever `credit.kind` does with the environment's
        rewards, and is discounted by `credit.turn_discount` alone.
        """
        return None

    @property
    def rewards_need_environment(self) -> bool:
        """Whether `turn_rewards` plays the environment. `mage view` shows no returns of such a run
        where the environment is a user's own, because to look at a run must not execute its code.
        """
        return False

    def early_share(self) -> float:
        """Return the factor, 0 to 1, by which the environment's credited return of each turn before
        the last episode is multiplied.
        """
        return 1.0

    def roles(self) -> tuple[str, str] | None:
        """Return the names of two low-rank adapters, of which `takes_second_role` chooses one for
        each turn; None: the policy has one role.
        """
        return None

    def takes_second_role(self, kind: Kind, is_last: bool) -> bool:
        """Return whether the second adapter computes a turn; called only if `roles` names two.

        Args:
            kind: the kind of the turn.
            is_last: whether the turn is in the last episode of its trial.
        """
        return is_last

    def trained_kinds(self, version: int) -> Collection[Kind]:
        """Return the kinds of turns that are trained on at a policy version."""
        return tuple(Kind)

    def trainer(self, model: Any, chat: Any) -> Any:
        """Return a trainer that replaces `mage_async.learning.trainer.Trainer`; None: it stays.

        A run cannot be resumed with such a method added or left out, because the checkpoints of the
        two trainers differ.

        Args:
            model: a `transformers.PreTrainedModel`, the one to train.
            chat: a `mage_async.trials.chat_format.ChatFormat`.
        """
        return None

    def loss_term(self) -> Any:
        """Return a `mage_async.learning.token_loss.LossTerm`, which is added to the loss of each
        micro-batch; None: nothing is added.
        """
        return None

    def frozen_policy(self) -> Path | None:
        """Return the directory of a frozen model that the loss term needs in addition to the
        reference policy; None: it needs none. The model must have the tokenizer of the trained
        policy.
        """
        return None

    def batch_metrics(self, trials: Sequence[Trial]) -> dict[str, float]:
        """Return metrics of a batch by name, for its step's line of `metrics.jsonl`. `metrics` must
        explain each name.
        """
        return {}


T = TypeVar("T")


class Methods:
    """Hold the active methods of a run, in the order of their tables.

    Where a run needs one answer, such as the guidance of a group, the first method that gives an
    answer decides. Created without arguments, the object has no methods.

    Args:
        environment: the environment of the run; None: a method that needs it loads it.
    """

    def __init__(
        self, config: Config | None = None, environment: Environment | None = None
    ) -> None:
        self._environment = environment
        self._version = 0
        self._methods: dict[str, Method] = {}
        if config is not None:
            self.adopt(config)

    def __iter__(self) -> Iterator[Method]:
        return iter(self._methods.values())

    def check(self) -> None:
        """Refuse two methods that replace the trainer, and let every method refuse a configuration
        with which it cannot work.

        Raises:
            ConfigError: the message has the problem and its remedy.
        """
        own = [name for name in self._methods if _overrides(method_class(name), "trainer")]
        if len(own) > 1:
            raise ConfigError(
                f"methods.{own[0]} and methods.{own[1]} both replace the trainer: leave one of the "
                "two out"
            )
        for method in self:
            method.check()

    def horizon(self, version: int, num_episodes: int) -> Horizon:
        """Return the horizon of a group granted at a policy version.

        Args:
            num_episodes: number of episodes of a trial, unless a method changes it.
        """
        horizon = Horizon(num_episodes)
        for method in self:
            horizon = method.horizon(version, horizon)
        return horizon

    def self_play_share(self) -> float:
        """Return the share of groups in which the policy plays both seats."""
        return sum(method.self_play_share() for method in self)

    def guidance(self, number: int, task: Task) -> Guidance | None:
        """Return the text with which the first trials of a new group begin."""
        return _first(method.guidance(number, task) for method in self)

    def guidance_tokens(self) -> int:
        """Return the least number of tokens that a guidance adds to a context: those of the longest
        one, because a trial begins with the guidance of one method.
        """
        return max((method.guidance_tokens() for method in self), default=0)

    def evaluation_guidance(
        self, task: Task, records: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Guidance | None:
        """Return the text with which a trial of an evaluation begins.

        Args:
            records: results of `Method.record` at the evaluated version, by method; a method that
                recorded nothing gives no guidance. None: the methods' own states.
        """
        if records is None:
            return _first(method.evaluation_guidance(task) for method in self)
        return _first(
            method.evaluation_guidance(task, records[name])
            for name, method in self._methods.items()
            if name in records
        )

    def advisers(self) -> Advisers | None:
        """Return the function that makes the adviser of each trial in training."""
        return _first(method.advisers() for method in self)

    def adopt(self, config: Config) -> None:
        """Replace the methods by those of a configuration. A method that was active before keeps
        its state; a new one begins without state.
        """
        before, self._methods = self._methods, {}
        for name, table in config.methods.items():
            kind = method_class(name)
            try:
                settings = msgspec.convert(table, kind.Settings)
            except msgspec.ValidationError as error:
                # The configuration that a run recorded is loaded without importing a user's own
                # method, whose keys may have changed since.
                raise ConfigError(f"methods.{name}: {error}") from error
            method: Any = before.get(name)
            if method is not None:
                method.adopt(settings, config)
            else:
                with _naming(name, "__init__"):
                    method = kind(settings, config, self._environment)
                method = _OwnMethod(name, method) if ":" in name else method
                method.begin(None, self._version)
            self._methods[name] = method

    def begin(self, states: Mapping[str, bytes], version: int) -> None:
        """Replace the states by those of a journal, which belong to a policy version."""
        self._version = version
        for name, method in self._methods.items():
            method.begin(states.get(name), version)

    def learn(self, groups: Sequence[Group]) -> None:
        """Update the states with a batch, after a step has trained on the batch."""
        self._version += 1
        for method in self:
            method.learn(groups)

    def states(self) -> dict[str, bytes]:
        """Return the states, by method; methods without a state are left out."""
        states = {name: method.state() for name, method in self._methods.items()}
        return {name: state for name, state in states.items() if state is not None}

    def digests(self) -> dict[str, str]:
        """Return the digests of the states, by method."""
        return {
            name: blake2s(state, digest_size=8).hexdigest() for name, state in self.states().items()
        }

    def records(self) -> list[dict[str, Any]]:
        """Return one line of `memory.jsonl` for each method that records its state."""
        records = ((name, method.record()) for name, method in self._methods.items())
        return [
            {"version": self._version, "method": name, **record}
            for name, record in records
            if record is not None
        ]

    def guide_demonstration(self, task: Task) -> Guidance | None:
        """Return the text with which the next scripted trial of a warm start begins."""
        return _first(method.guide_demonstration(task) for method in self)

    def learn_demonstration(self, trial: Trial) -> None:
        """Take a scripted trial of the warm start into account for later ones."""
        for method in self:
            method.learn_demonstration(trial)

    def turn_rewards(self, trials: Sequence[Trial]) -> list[list[float]] | None:
        """Return the sum of the methods' rewards of each turn; None: no method gives any.

        Raises:
            ConfigError: a user's own method raised, or gave no finite number for a turn.
        """
        lengths, parts = [len(trial.turns) for trial in trials], []
        for name, method in self._methods.items():
            rewards = method.turn_rewards(trials)
            if rewards is None:
                continue
            with _naming(name, "turn_rewards"):
                rewards = [[*map(float, each)] for each in rewards]
                is_whole = [*map(len, rewards)] == lengths and all(map(isfinite, chain(*rewards)))
            if not is_whole:
                raise ConfigError(
                    f"method {name!r}, turn_rewards: return a list for each of the {len(trials)} "
                    f"trials, with a finite reward for each of its turns; got {rewards!s:.200}"
                )
            parts.append(rewards)
        if len(parts) < 2:
            return parts[0] if parts else None
        return [
            [sum(rewards) for rewards in zip(*of_trial, strict=True)]
            for of_trial in zip(*parts, strict=True)
        ]

    def early_share(self) -> float:
        """Return the factor of the credited return of turns before the last episode: the product of
        the methods' factors.
        """
        return prod(method.early_share() for method in self)

    def roles(self) -> tuple[str, str] | None:
        """Return the names of the two adapters; None: the policy has one role."""
        return _first(method.roles() for method in self)

    def second_role(self) -> SecondRole | None:
        """Return the function that says which turns the second adapter computes; None: the policy
        has one role.
        """
        return _first(
            method.takes_second_role if method.roles() is not None else None for method in self
        )

    def trained_kinds(self, version: int) -> set[Kind]:
        """Return the kinds of turns that all methods train on at a policy version."""
        return set(Kind).intersection(*(method.trained_kinds(version) for method in self))

    def trainer(self, model: Any, chat: Any) -> Any:
        """Return the trainer that a method brings; None: the default one is used."""
        return _first(method.trainer(model, chat) for method in self)

    def loss_terms(self) -> list[Any]:
        """Return the terms that methods add to the loss."""
        terms = {name: method.loss_term() for name, method in self._methods.items()}
        return [
            _OwnTerm(name, term) if ":" in name else term
            for name, term in terms.items()
            if term is not None
        ]

    def frozen_policy(self) -> Path | None:
        """Return the directory of the frozen model that a loss term needs; None: none needs one."""
        return _first(method.frozen_policy() for method in self)

    def metric_names(self) -> set[str]:
        """Return the names of all metrics that the methods add."""
        return {name for method in self for name in method.metrics}

    def batch_metrics(self, trials: Sequence[Trial]) -> dict[str, float]:
        """Return the metrics that methods add to a step's line of `metrics.jsonl`."""
        metrics: dict[str, float] = {}
        for name, method in self._methods.items():
            found = method.batch_metrics(trials)
            with _naming(name, "batch_metrics"):
                metrics |= {key: float(each) for key, each in found.items()}
        return metrics


class _OwnMethod:
    """Call the hooks of a user's own method, and name the method and the hook that raises."""

    def __init__(self, name: str, method: Method) -> None:
        self._name, self._method = name, method

    def __getattr__(self, hook: str) -> Any:
        with _naming(self._name, hook):
            found = getattr(self._method, hook)
        if not inspect.isroutine(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            with _naming(self._name, hook):
                value = found(*given, **named)
                is_valid, expected = _RETURNS.get(hook, (None, ""))
                if is_valid and not is_valid(value):
                    raise ConfigError(
                        f"method {self._name!r}, {hook}: return {expected}, got {value!r:.100}, of "
                        f"type {type(value).__name__}"
                    )
            return value

        return call


def _is_share(value: Any) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return hasattr(value, "__float__") and 0.0 <= float(value) <= 1.0


_GUIDANCE = (lambda value: value is None or isinstance(value, Guidance), "a `Guidance`, or None")
_SHARE = (_is_share, "a number from 0 to 1")
_RETURNS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "horizon": (lambda value: isinstance(value, Horizon), "a `Horizon`"),
    "self_play_share": _SHARE,
    "guidance": _GUIDANCE,
    "guidance_tokens": (lambda value: isinstance(value, Integral), "a whole number"),
    "evaluation_guidance": _GUIDANCE,
    "advisers": (lambda value: value is None or callable(value), "a function, or None"),
    "state": (lambda value: value is None or isinstance(value, bytes), "bytes, or None"),
    "record": (lambda value: value is None or isinstance(value, Mapping), "a dictionary, or None"),
    "guide_demonstration": _GUIDANCE,
    "early_share": _SHARE,
    "roles": (
        lambda value: value is None or (isinstance(value, tuple | list) and len(value) == 2),
        "the names of two adapters, or None",
    ),
    "trained_kinds": (
        lambda value: isinstance(value, Collection) and {*value} <= {*Kind},
        "a collection of members of `Kind`",
    ),
    "trainer": (
        lambda value: value is None or hasattr(value, "train"),
        "an object with the methods of `Trainer`, or None",
    ),
    "frozen_policy": (
        lambda value: value is None or isinstance(value, str | Path),
        "the path of a directory, or None",
    ),
    "batch_metrics": (lambda value: isinstance(value, Mapping), "a dictionary of numbers"),
}
"""By hook: a function that returns whether a value is a valid result of the hook, and a description
of valid results. Rewards of turns and loss terms are checked where they are used."""


class _OwnTerm:
    """Call the loss term of a user's own method, and name the method if it raises or returns
    something else than a `mage_async.learning.token_loss.LossTerm` does.
    """

    def __init__(self, name: str, term: Any) -> None:
        self._name, self._term = name, term
        self.needs_reference = getattr(term, "needs_reference", False)
        self.reference_cycle = getattr(term, "reference_cycle", 0)

    def prepare(self, *given: Any) -> Any:
        """Return the result of the user's `prepare`."""
        with _naming(self._name, "prepare"):
            return self._term.prepare(*given)

    def loss(self, *given: Any) -> tuple[Any, Any]:
        """Return the result of the user's `loss`."""
        with _naming(self._name, "loss"):
            added, counted = self._term.loss(*given)
            dimensions = added.dim(), counted.dim()
        if dimensions != (0, 1):
            raise ConfigError(
                f"method {self._name!r}, loss: return a scalar, and a tensor [C] of numbers for "
                f"`metrics`; got tensors of {dimensions[0]} and {dimensions[1]} dimensions"
            )
        return added, counted

    def metrics(self, counted: Any) -> dict[str, float]:
        """Return the result of the user's `metrics`."""
        with _naming(self._name, "metrics"):
            return {name: float(each) for name, each in self._term.metrics(counted).items()}


def _naming(name: str, hook: str) -> AbstractContextManager[None]:
    """Return a context in which an exception of a user's own method becomes a `ConfigError` that
    names the method and its hook.
    """
    return as_config_error(f"method {name!r}, {hook}") if ":" in name else nullcontext()


def _first(answers: Iterator[T | None]) -> T | None:
    """Return the first answer that is not None; None: there is none."""
    return next((answer for answer in answers if answer is not None), None)
