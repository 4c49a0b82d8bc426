"""Define tasks in which a user's program is the agent: the program runs its own loop, calls the
policy over HTTP as it would call any other model, and returns a reward.

The program knows nothing of trials: it runs once for each episode, and receives the address of the
policy. `mage_async/trials/agent_run.py` joins the episodes to trials.
"""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from mage_async.environments.environment import Outcome, reward_fault
from mage_async.environments.interchangeable_words import WordSets
from mage_async.environments.user_calls import Call, Callee, Method, MethodResult, Request
from mage_async.environments.user_class import ResetStep, ResetStepPlay
from mage_async.errors import CallFault, ConfigError, RunError
from mage_async.trajectory import Task
from mage_async.user_modules import place_of


@dataclass(slots=True)
class Session:
    """Hold the data that a program gets for one episode of a trial, and the errors of its calls."""

    base_url: str
    api_key: str
    memory: str = ""
    """Text that replaces `{memory}` in the program's messages: the guidance of a method, and the
    policy's remarks on earlier episodes of the trial.
    """
    length_error: str = ""
    """Error of a call of the policy that was refused because its conversation no longer fits the
    context; "" if none was.
    """
    call_note: str = ""
    """Clause on the latest call of the policy: at which limit of tokens its answer was cut, or that
    the call was refused; "" if the answer ended by itself.
    """
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager within which a call waits for the policy's answer. `CallRunner`
    sets it, and does not count the time spent in it towards the program's deadline.
    """


class AgentProgram(Callee):
    """Play whole episodes by a program; there is one object for each episode.

    A subclass has `run`, plain or a coroutine function, and may declare what a class with `reset`
    and `step` declares, such as `members`.
    """

    session: Session
    """Address of the policy. `AgentTasks.call` sets it before `run` is called."""
    value: Any
    """The task, as `members` lists it. `AgentTasks.call` sets it before `run` is called."""

    def run(
        self, task: Any, episode: int, seed: int, base_url: str, api_key: str
    ) -> float | Awaitable[float]:
        """Play an episode and return its reward.

        Args:
            episode: Number of the episode in its trial, from 0.
            seed: Seed that is equal in all episodes of a trial, and in all trials of a group.
            base_url: Address of the policy, for clients of OpenAI's protocol.
            api_key: Key that identifies the trial and the episode.
        """
        raise NotImplementedError

    def is_async(self, method: Method) -> bool:
        """Return whether `run` is a coroutine function; a program has no `close`."""
        return method != "close" and inspect.iscoroutinefunction(self.run)

    def method_name(self, method: Method) -> str:
        """Return "run", the only method; a program has no `close`."""
        return "" if method == "close" else "run"

    def circumstance(self) -> str:
        """Return what went wrong with the latest call of the policy; see `Callee.circumstance`."""
        # A program often raises when it parses an answer that was cut.
        return self.session.call_note

    async def check(self) -> None:
        """Check before training, without a policy, whether the program could run. The default
        checks nothing.

        The object that is checked plays no episode.

        Raises:
            ConfigError: the program cannot run.
        """

    def perform(self, request: Request) -> Any:
        """Run the program; see `Callee.perform`."""
        if request.method == "close":
            return MethodResult()
        session = self.session
        arguments = (self.value, request.episode, request.seed, session.base_url, session.api_key)
        # Every call but `close` is a `reset`; see `AgentTasks.call`.
        if self.is_async("reset"):
            return self._perform_async(request, arguments)
        try:
            reward: Any = self.run(*arguments)
        except Exception:  # the border to foreign code; raised again
            reward = self._zero_if_full()
        return _checked_result(request, reward)

    async def _perform_async(self, request: Request, arguments: tuple[Any, ...]) -> MethodResult:
        """Run a program whose `run` is a coroutine function."""
        try:
            running: Any = self.run(*arguments)
            reward = await running
        except Exception:  # the border to foreign code; raised again
            reward = self._zero_if_full()
        return _checked_result(request, reward)

    def _zero_if_full(self) -> float:
        """Return a reward of 0 if a call was refused for its length; else raise again the exception
        that is being handled.
        """
        # If the agent's own messages outgrew the context, the agent has failed and earns 0. Any
        # other exception is a fault of the program.
        if not self.session.length_error:
            raise
        return 0.0


def _checked_result(request: Request, value: Any) -> MethodResult:
    """Return the result of an episode; raise a `CallFault` if its reward is not valid."""
    if wrong := reward_fault(value):
        raise CallFault(f"{request.place} {wrong}", mistake=wrong)
    return MethodResult(Outcome("", float(value), is_done=True))


class AgentTasks(ResetStep):
    """Adapt an `AgentProgram` to the protocol of environments."""

    def begin(self, task: Task, episode: int) -> ResetStepPlay:
        """Refuse: the program owns the loop over the turns."""
        raise RunError(
            f"{self.facts.name}: a program is played by actors and evaluators alone, which serve "
            "it the policy"
        )

    def call(self, task: Task, episode: int, session: Session) -> Call:
        """Return the call that runs the program for one episode."""
        program = self.make()
        program.session, program.value = session, self.value_of(task.member)
        where = f"{self.facts.name}, task {task.member}, seed {task.seed}, episode {episode + 1}"
        # The call of `run` counts as a `reset`: with it the object becomes one of
        # `environment.most_open`, until `close`.
        request = Request("reset", f"{where}: run()", self.seed_of(task), task.member, episode)
        return Call(program, request)

    def rules(self) -> str:
        """Return the name only: a program writes its own prompts."""
        return self.facts.name

    def _check_methods(self) -> None:
        """Check nothing: a program has neither `reset` nor `step`."""

    def _checked_exchange(self, sets: Any, words: tuple[str, ...]) -> WordSets:
        """Return no sets; raise a `ConfigError` if the program declares some."""
        # The program reads and writes the policy's texts itself.
        if sets is not None:
            raise ConfigError(
                f"environment {self._name!r}: `interchangeable` words are exchanged in what `step` "
                "reads and returns, and a program has no `step`: leave them out, or exchange words "
                f"in `run`{place_of(self.kind)}"
            )
        return ()
