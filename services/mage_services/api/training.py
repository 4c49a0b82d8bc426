"""Train from Python (`mage.train`): in a script, in a notebook, or next to a running event loop."""

import asyncio
import inspect
import operator
import queue
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from tqdm.auto import tqdm

from mage_async.config.schema import Config
from mage_async.errors import ConfigError, Halted
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import num_decimals
from mage_services.api.run import Run
from mage_services.api.start_to_report import EXIT_HALTED, start_run
from mage_services.processes.supervisor import Supervisor
from mage_services.terminal.final_table import print_final
from mage_services.terminal.run_state import Event, RunState, permanent_line

T = TypeVar("T")

REDRAWN_EVERY_S, PRINTED_EVERY_S = 0.5, 20.0
"""Seconds between two updates of the progress bar: where the output can overwrite its last line (a
terminal or notebook), and where every update adds a line.
"""
OnStep = Callable[[dict[str, Any]], None]
"""Receives the metrics of a step, as a line of `metrics.jsonl` has them."""


def train(
    config: Config,
    *,
    run_dir: str | Path | None = None,
    actors: int | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
    cluster: str = "",
) -> Run:
    """Train to the end, and return the run, as `mage train` does.

    The processes of the run are supervised in another thread, so this works in a notebook and
    next to a running event loop; `await asyncio.to_thread(mage.train, config)` does not block
    it. No signal handler is touched. Ctrl-C, or an exception of `on_step`, ends all processes and
    is raised, and stderr names the run; `mage.load(run_dir).resume()` goes on.

    Args:
        config: A configuration, as `mage.configure` returns it.
        run_dir: Where the run is written; None for a new folder of `runs/`.
        actors: Number of actor processes; None for 4, or 1 with a pretrained policy.
        on_step: Called in this thread after each step, with its metrics; no coroutine function.
        progress: Whether to show a progress bar, and the table of returns at the end.
        cluster: Address of a Ray cluster; "" for this machine.

    Raises:
        ConfigError: `config` is no configuration, or one that cannot be run as written; `on_step`
            is no function, or a coroutine function.
        RunError: the directory holds another run, is in use or cannot be written.
        RunFailed: a process failed more often than its budget allows.
        Halted: the doctor ended the run; it can be resumed.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"mage.train takes what mage.configure returns, got {config!r:.60}: "
            "mage.train(mage.configure(FILE, KEYS)), as in "
            'mage.configure("quickstart", {"learner.steps": 40})'
        )
    place = None if run_dir is None else Path(run_dir)
    given = {"run_dir": place, "actors": actors, "cluster": cluster}
    return supervise(config, on_step, progress, is_resumed=False, **given)


def supervise(config: Config, on_step: OnStep | None, progress: bool, **given: Any) -> Run:
    """Do the work of `train` and of `Run.resume`: run the supervisor in a thread, and show its
    events in this one.

    Args:
        given: Further arguments of `start_run`.
    """
    if on_step is not None and (not callable(on_step) or inspect.iscoroutinefunction(on_step)):
        raise ConfigError(
            "on_step must be a function, without `async`, of the metrics of a step, got "
            f"{on_step!r:.60}"
        )
    if given["actors"] is not None:
        given["actors"] = operator.index(given["actors"])
    relay = Relay()

    def work() -> tuple[RunDirectory, int]:
        """Start the run and supervise it to its end, in the other thread."""
        return start_run(
            config,
            say=relay.line,
            runner=relay.run,
            view=relay,
            until=relay.until_stopped,
            **given,
        )

    with ThreadPoolExecutor(1, thread_name_prefix="mage supervisor") as threads:
        outcome = threads.submit(work)
        outcome.add_done_callback(relay.end)
        try:
            _follow(relay, config, on_step, progress)
        except BaseException:  # Ctrl-C, or an exception of `on_step`
            print("ending the run", file=sys.stderr, flush=True)
            relay.stop()
            wait([outcome])
            if relay.reason:  # empty before the run's directory is written
                print(relay.reason, file=sys.stderr, flush=True)
            raise
    run, code = outcome.result()
    if code == EXIT_HALTED:
        raise Halted(relay.reason)
    if progress and relay.summary is not None:
        print_final(Console(highlight=False, emoji=False), relay.summary, run.report)
    return Run(run.root)


class Relay:
    """Pass the events of a run from the thread of its supervisor to the thread that called `train`.

    The supervisor uses this object as the run's view. The other thread iterates over it, and calls
    `stop` to end the run early.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Event] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_stopped = False
        self._last_line = ""
        self.reason = ""
        """The last line for the user before the summary: if the run did not end by itself, it says
        why, and how to go on.
        """
        self.summary: dict[str, Any] | None = None

    def event(self, process: str, event: Event) -> None:
        """Pass on an event of a process."""
        self._queue.put((process, event))

    def line(self, text: str) -> None:
        """Pass on a line for the user."""
        self._last_line = text
        self._queue.put(("supervisor", {"event": "line", "text": text}))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Keep the summary for `supervise`, and the reason why the run ended."""
        self.summary, self.reason = summary, self._last_line

    def end(self, _: object) -> None:
        """End the iteration over the events; called when the supervisor's thread is done."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[tuple[str, Event]]:
        while (item := self._queue.get()) is not None:
            yield item

    def stop(self) -> None:
        """End the run, from any thread; has no effect if it has ended."""
        self._is_stopped = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed: the run has ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, in the supervisor's thread; `stop` cancels it."""
        return asyncio.run(self._stoppable(work))

    async def _stoppable(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine. `stop` cancels it, even if `stop` was called before."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._is_stopped:
            work.close()
            raise asyncio.CancelledError
        return await work

    async def until_stopped(self, supervisor: Supervisor) -> int | None:
        """Supervise until the end, or until `stop`, which counts as Ctrl-C."""
        try:
            await self._stoppable(supervisor.supervise())
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        return signal.SIGINT if self._is_stopped else None


def _follow(relay: Relay, config: Config, on_step: OnStep | None, progress: bool) -> None:
    """Show the events of a run in a progress bar until its end, and call `on_step`."""
    state, drawn_at = RunState(config, time.monotonic()), 0.0
    overwrites = sys.stderr.isatty() or "ipykernel" in sys.modules
    every_s = REDRAWN_EVERY_S if overwrites else PRINTED_EVERY_S
    with tqdm(total=config.learner.steps, unit="step", disable=not progress) as bar:
        for process, event in relay:
            now = time.monotonic()
            state.take(process, event, now)
            text = event["text"] if event["event"] == "line" else permanent_line(process, event)
            if text is not None and progress:
                bar.write(text)
            if event["event"] == "step":
                metrics = event["metrics"]
                bar.n = metrics["step"]
                digits = num_decimals(metrics["return_by_episode"])
                returns = " ".join(f"{value:+.{digits}f}" for value in metrics["return_by_episode"])
                bar.set_postfix_str(f"return by episode {returns}", refresh=False)
                if on_step is not None:
                    on_step(metrics)
            if now - drawn_at >= every_s:
                drawn_at = now
                phase = state.phase if state.phase == "training" else state.waiting(now)
                bar.set_description_str(phase)
