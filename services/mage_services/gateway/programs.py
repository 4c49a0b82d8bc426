"""Load a user's programs that play the agent with a loop of their own, which calls the policy.

Such a program is a function (`agent:module:function`), a command line (`agent:command`) or a server
(`agent:url`). An episode of it is one call, which `mage_services/environments/call_runner.py` ends
at its deadline.
"""

import asyncio
import inspect
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from mage_async import user_modules
from mage_async.environments.agent import AgentProgram
from mage_async.environments.environment import check_whole
from mage_async.environments.loaders.loader import NumberedTasks
from mage_async.errors import CapacityReached, ConfigError, EnvironmentFault, SessionClosed
from mage_services.processes.child_process import dying_with_parent, end_in_words

CALLS = 64
"""Default of the option `turns`, the largest number of calls of the policy in an episode."""
PARAMETERS = ("task", "episode", "seed", "base_url", "api_key", "memory")
"""Arguments that a function may have, and fields of the request to a server; see `AgentProgram.run`
and, for the last one, `Session`."""
_DECLARED = (
    *("members", "family", "swaps", "words"),
    *("min_return", "max_return", "units", "wins_above", "loses_below"),
)
"""Names that a function's module may declare, as a class with `reset` and `step` may."""
KEPT_BYTES = 2**16
"""Number of bytes of a command's output that are kept, the last ones."""
MAX_LINE_CHARS = 200
"""Number of characters to which a program's output is cut in an error."""
STARTING_S = 30.0
"""Seconds within which the server of an agent must accept a connection before a run starts: it may
have been started just before.
"""
AGAIN_S = 1.0
"""Seconds between two tries to connect to the server of an agent."""


def load(
    name: str,
    /,
    *,
    turns: int = CALLS,
    size: int | None = None,
    command: str | None = None,
    url: str | None = None,
) -> type[AgentProgram]:
    """Return the class of programs for the name of an environment.

    Args:
        name: `module:function`, "command" or "url".
        turns: largest number of calls of the policy in an episode.
        size: number of tasks, the last quarter of them held out; None: those of the module, by
            `members(split)`.
        command: a command line with `{task}`, and perhaps `{episode}` and `{seed}`, whose last line
            of output is the reward.
        url: address of a server on this machine. Each POST with the fields `PARAMETERS` plays an
            episode; the answer is JSON, `{"reward": 1.0}`.

    Raises:
        ConfigError: there is no such function or command, or an option is out of its range.
    """
    full = f"agent:{name}"
    check_whole(full, "turns", turns, 1, 4096)
    # Attributes and methods of the class that is returned.
    parts: dict[str, Any] = {"name": full, "max_turns": turns}
    for option, value in (("command", command), ("url", url)):
        if (name == option) != bool(value):
            wrong = f"needs the option `{option}`" if name == option else f"has no `{option}`"
            raise ConfigError(
                f"environment {full!r}: {wrong}; `{option}` belongs to agent:{option}"
            )
    if command:
        parts |= {"run": _command_runner(full, command)}
    elif url:
        parts |= _url_methods(full, url)
    else:
        module_name, _, function_name = name.partition(":")
        module = user_modules.import_own(module_name, f"environment {full!r}")
        function = getattr(module, function_name, None)
        if not callable(function):
            hint = user_modules.hides_own_file(module)
            raise ConfigError(f"environment {full!r}: {module_name} has no such function{hint}")
        parts |= {"run": _function_runner(full, function)}
        for each in _DECLARED:
            if hasattr(module, each):
                found = getattr(module, each)
                parts[each] = staticmethod(found) if inspect.isfunction(found) else found
    if size is None and (command or url):
        size = 1280  # as many as a class without `members` has
    if size is not None:
        check_whole(full, "size", size, 5, 10_000_000)
        parts |= {"num_tasks": size, "members": NumberedTasks.members}
    return type(re.sub(r"\W", "_", full), (AgentProgram,), parts)


def _function_runner(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `run`, which calls a function with those of `PARAMETERS` that it takes.

    Raises:
        ConfigError: the function requires another argument, or does not take `base_url`.
    """
    own = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in own.values())
    unknown = [
        key
        for key, each in own.items()
        if key not in PARAMETERS
        and each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if unknown or ("base_url" not in own and not takes_any):
        raise ConfigError(
            f"environment {name!r}: write the function as "
            f"{getattr(function, '__name__', 'run')}(task, episode, base_url, api_key); all but "
            "`base_url` may be left out, and `seed` and `memory` may be added"
        )

    def given(self: AgentProgram, arguments: tuple[Any, ...]) -> dict[str, Any]:
        named = dict(zip(PARAMETERS, (*arguments, self.session.memory), strict=True))
        return {key: value for key, value in named.items() if takes_any or key in own}

    async def run_async(self: AgentProgram, *arguments: Any) -> Any:
        return await function(**given(self, arguments))

    def run(self: AgentProgram, *arguments: Any) -> Any:
        return function(**given(self, arguments))

    return run_async if inspect.iscoroutinefunction(function) else run


def _command_runner(name: str, command: str) -> Callable[..., Any]:
    """Return the method `run`, which plays an episode by running a command.

    Raises:
        ConfigError: the command line cannot be read, has no `{task}`, or names no program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"environment {name!r}: `command` cannot be read: {error}") from None
    if not words or not any("{task}" in word for word in words):
        raise ConfigError(f"environment {name!r}: `command` must have {{task}} in it")

    if shutil.which(words[0]) is None:
        raise ConfigError(f"environment {name!r}: there is no command {words[0]!r} here")

    async def run(
        self: AgentProgram, task: Any, episode: int, seed: int, base_url: str, api_key: str
    ) -> float:
        """Play an episode by one run of the command, and return its reward."""
        values = {"task": task, "episode": episode, "seed": seed}
        line = [_filled(word, values) for word in words]
        return await _reward_of_command(line, base_url, api_key)

    return run


def _filled(word: str, values: dict[str, Any]) -> str:
    """Replace `{task}` and the like; other braces stay."""
    return re.sub(r"\{(task|episode|seed)\}", lambda found: str(values[found[1]]), word)


async def _reward_of_command(line: list[str], base_url: str, api_key: str) -> float:
    """Run a command; return the number on its last line. Cancellation kills its process group.

    Raises:
        EnvironmentFault: the command cannot be started, failed, or printed no number.
    """
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
    with _Output() as out, _Output() as errors:
        try:
            process = await asyncio.create_subprocess_exec(
                *dying_with_parent(line),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out.writable,
                stderr=errors.writable,
                env=os.environ | variables,
                process_group=0,
            )
        except OSError as error:
            raise EnvironmentFault(f"{line[0]} cannot be started: {error.strerror}") from error
        try:
            # Processes that the command leaves behind may hold its output open: its end counts.
            code = await process.wait()
        finally:
            # The command leads a process group of its own, so the processes that it has started are
            # killed with it. If our own process is killed, its parent ends all groups of its
            # session (`ChildProcess.kill`).
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        last, why = out.last_line(), errors.last_line()
    if code:
        # `dying_with_parent` ends with 128 + N after signal N.
        ended = end_in_words(128 - code if 128 < code < 128 + signal.NSIG else code)
        raise EnvironmentFault(f"{line[0]} {ended}{': ' if why else ''}{why}")
    try:
        return float(last)
    except ValueError:
        raise EnvironmentFault(
            f"the last line of output must be the reward, a number, got {last!r}"
        ) from None


def _url_methods(name: str, url: str) -> dict[str, Callable[..., Any]]:
    """Return the methods `check`, which waits for a server, and `run`, which plays an episode by a
    request to it.

    Raises:
        ConfigError: the URL is no address of HTTP.
    """
    try:
        address = urlsplit(url)
        host, port = address.hostname, address.port or (443 if address.scheme == "https" else 80)
    except ValueError:  # the port is no number
        host = None
    if not host or address.scheme not in ("http", "https"):
        raise ConfigError(
            f"environment {name!r}: write `url` as http://HOST:PORT/PATH, got {url!r}"
        )

    async def check(self: AgentProgram) -> None:
        """Wait until the server accepts a connection, and check that it is on this machine."""
        began, has_said = time.monotonic(), False
        while True:
            left_s = began + STARTING_S - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    _, writer = await asyncio.open_connection(host, port)
                break
            except OSError as error:  # of which TimeoutError is one
                why = f"no server accepts connections at {url} ({error or type(error).__name__})"
                if left_s <= AGAIN_S:
                    advice = "start it before the run"
                    raise ConfigError(f"environment {name!r}: {why}: {advice}") from error
            if not has_said:
                print(f"{why}; waiting {STARTING_S:g} s for it", file=sys.stderr, flush=True)
            has_said = True
            await asyncio.sleep(AGAIN_S)
        (own, *_), (their, *_) = (writer.get_extra_info(e) for e in ("sockname", "peername"))
        writer.close()
        # The server is to call the gateway, which listens on this machine only.
        if own != their and not ipaddress.ip_address(their).is_loopback:
            raise ConfigError(
                f"environment {name!r}: {url} is on another machine ({their}), from which the "
                "policy cannot be reached: start the server on this one"
            )

    async def run(self: AgentProgram, *arguments: Any) -> Any:
        """Play an episode by one POST to the server, and return its reward."""
        body = dict(zip(PARAMETERS, (*arguments, self.session.memory), strict=True))
        # `environment.step_deadline_s` bounds the whole call; at the deadline the call is
        # cancelled, which closes the connection.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            try:
                async with http.post(url, json=body, allow_redirects=False) as answer:
                    return _reward_of(url, answer.status, await answer.read())
            except aiohttp.ClientConnectorError as error:
                raise SessionClosed(f"{error}; is the server of the agent running?") from error
            except (aiohttp.ClientError, OSError) as error:
                raise SessionClosed(
                    f"{url} closed the connection before it had answered: "
                    f"{error or type(error).__name__}; its own log says why"
                ) from error

    return {"check": check, "run": run}


def _reward_of(url: str, status: int, body: bytes) -> Any:
    """Return the reward in a server's answer.

    Raises:
        CapacityReached: the server has no room for another episode now.
        EnvironmentFault: the answer has no reward.
    """
    text = " ".join(body.decode(errors="replace").split())[:MAX_LINE_CHARS]
    if status in (429, 503):
        raise CapacityReached(f"{url} has no room for another episode (status {status}): {text}")
    if status != 200:
        raise EnvironmentFault(f"{url} answered with status {status}: {text}")
    try:
        return json.loads(body)["reward"]
    except (ValueError, LookupError, TypeError):
        raise EnvironmentFault(
            f'{url} must answer with JSON such as {{"reward": 1.0}}, got {text!r}'
        ) from None


class _Output:
    """Context manager: read what a command writes to `writable`, and keep the end of it."""

    def __init__(self) -> None:
        self._end = b""

    def __enter__(self) -> Self:
        self._readable, self.writable = os.pipe()
        os.set_blocking(self._readable, False)
        asyncio.get_running_loop().add_reader(self._readable, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._readable)
        os.close(self._readable)
        os.close(self.writable)

    def _read(self) -> None:
        """Read what the pipe holds, which is at most `KEPT_BYTES` unless a command enlarges it."""
        with suppress(BlockingIOError):  # there is nothing
            self._end = (self._end + os.read(self._readable, KEPT_BYTES))[-KEPT_BYTES:]

    def last_line(self) -> str:
        """Return the last line so far that is not blank, cut; "" if there is none."""
        self._read()
        lines = self._end.decode(errors="replace").strip().splitlines()
        return lines[-1][:MAX_LINE_CHARS] if lines else ""
