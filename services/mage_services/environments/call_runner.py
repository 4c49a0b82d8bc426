"""Call environments that may block, without blocking the caller's event loop.

what is called                         where the call is made
a user's `reset`, `step` or `close`    in a thread, which is abandoned and replaced if it hangs
`begin` of a class with the whole      the same; calls with the same `serial_group` are made one
`Environment` protocol, or `act` of    after another
its `Play` (one episode)
a coroutine function                   on an event loop in a thread of its own, shared by all
                                       coroutines, which is abandoned and replaced if one blocks it

All threads are daemons, so that a process can end although a user's code hangs. With
`environment.workers`, calls of classes with `reset` and `step` are made in worker processes
(`worker_pool.py`).

A `reset` finds *no room* if the class raises `CapacityReached`, for example because its server has
as many sessions as it can hold. The call is then repeated for a while.
"""

import asyncio
import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.agent import AgentProgram
from mage_async.environments.user_calls import Call, Callee, MethodResult, Request
from mage_async.environments.user_class import UserObject
from mage_async.errors import CallFault, NoRoom
from mage_services.environments.worker_pool import WorkerPool
from mage_services.processes.child_process import settle
from mage_services.processes.process import EXIT_DETERMINISTIC, coroutine_loop

if TYPE_CHECKING:
    from mage_services.gateway.gateway import Gateway

BATCH = 32
"""Number of results that wake an event loop together. Waking another thread costs as much as a few
calls, and hundreds of calls often return together; with larger batches the first results would wait
longer.
"""
CLOSING_S = 5.0
"""Seconds for which `CallRunner.close` waits for objects to be closed."""
TRY_AGAIN_S = 1.0
"""Seconds after which a `reset` that found no room is repeated; earlier if an object is closed."""
SLOW_S = 10.0
"""Seconds on a call's clock after which the call is reported as slow, long before its deadline."""
BUSY = 1.5
"""Load of the machine, for each core that this process may use, above which a note about a slow
call says that the machine is busy.
"""
STUCK_S = 1.0
"""Seconds after which an event loop that does not answer is blocked by a coroutine. It is abandoned
if a call misses its deadline.
"""
RECENT_S = 60.0
"""Seconds after which a call that the event loop began late explains no slow call any more."""


class CallResult(NamedTuple):
    """Hold the value or the exception of a call."""

    value: Any
    error: BaseException | None = None


OnResult = Callable[[CallResult], None]
"""Receives the result of a call, in the thread that made the call."""


class Handover:
    """Queue items from any thread for an event loop, which calls `deliver` with each, in order.

    An item is the tuple of `deliver`'s arguments.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[..., None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._is_woken = False
        # Event loops that have put items, and will wake the receiving loop after the callbacks that
        # they have ready now. A set instead of a flag, because a loop that a coroutine blocks never
        # wakes the receiving loop, and must not keep back the items of the loop that replaces it.
        self._due: set[asyncio.AbstractEventLoop] = set()

    def put(self, *parts: Any) -> None:
        """Put an item, from any thread; an item for a closed event loop is dropped.

        If the thread has an event loop of its own, it wakes the receiving loop only after the
        callbacks that it has ready now, or as soon as `BATCH` items wait.
        """
        self._waiting.append(parts)
        if self._is_woken:
            return
        here = _running_loop()
        if here is None or len(self._waiting) >= BATCH:
            self._wake()
        elif here not in self._due:
            self._due.add(here)
            here.call_soon(self._wake_for, here)

    def _wake_for(self, here: asyncio.AbstractEventLoop) -> None:
        """Wake the receiving loop for the items that the loop `here` has put."""
        self._due.discard(here)
        if self._waiting and not self._is_woken:
            self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        with suppress(RuntimeError):  # the receiving loop is closed
            self._loop.call_soon_threadsafe(self._deliver_all)

    def _deliver_all(self) -> None:
        """Call `deliver` with every item that waits, on the receiving loop."""
        # Cleared before the items are taken, so that an item put from now on wakes the loop again.
        self._is_woken = False
        while self._waiting:
            self._deliver(*self._waiting.popleft())


_SENTINEL = os.open(os.devnull, os.O_RDONLY)
"""A descriptor that nobody uses. If it is closed, a user's code closes descriptors of others."""


def _check_descriptors(place: str) -> None:
    """End this process if a user's call has closed descriptors of the process, among which may be
    its socket to the supervisor. `place` names the call.
    """
    try:
        os.fstat(_SENTINEL)
    except OSError:
        print(
            f"{place} closed descriptors that it did not open (os.close or os.closerange): close "
            "only your own",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_DETERMINISTIC)


def print_to_stderr(text: str) -> None:
    """Print a line into the log of this process."""
    print(text, file=sys.stderr, flush=True)


class CallThread:
    """Make one call after another in a thread, until `end`."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Call, OnResult] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def call(self, call: Call, on_result: OnResult) -> None:
        """Make a call, then call `on_result` with its result, both in the thread."""
        self._inbox.put((call, on_result))

    def end(self) -> None:
        """End the thread after the calls that were put before."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            call, on_result = item
            try:
                result = CallResult(call.function())
            except BaseException as error:  # foreign code, which may also call sys.exit
                result = CallResult(None, error)
            _check_descriptors(call.place)
            on_result(result)
            # The wait for the next call must not keep the objects of this one.
            del item, call, on_result, result


class CoroutineThread:
    """Await coroutines on the event loop of `coroutine_loop`."""

    def __init__(self) -> None:
        self.loop = coroutine_loop()
        self._put_at: dict[Hashable, float] = {}
        """When each call was put that the event loop has not begun."""
        self._latest = (0.0, 0.0)
        """Time at which a call was begun, and its seconds of waiting: the longest recent wait."""
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._inbox = Handover(self.loop, self._begin)

    def call(self, key: Hashable, function: Callable[[], Any], on_result: OnResult) -> None:
        """Await `function()`, then call `on_result` with its result, both in the thread."""
        self._put_at[key] = time.monotonic()
        self._inbox.put(key, function, on_result)

    def latest_s(self) -> float:
        """Return the longest time for which a call has waited for the event loop to begin it, of
        the calls begun in the last `RECENT_S` and those that wait still.
        """
        now = time.monotonic()
        return max([self._recent_s(now), *(now - put_at for put_at in list(self._put_at.values()))])

    def _recent_s(self, now: float) -> float:
        """Return the wait in `_latest`; 0 if it has ended more than `RECENT_S` ago."""
        begun_at, waited_s = self._latest
        return waited_s if now - begun_at <= RECENT_S else 0.0

    def cancel(self, key: Hashable) -> None:
        """Cancel a call that has not ended."""
        self._put_at.pop(key, None)
        self.loop.call_soon_threadsafe(self._cancel, key)

    def _begin(self, key: Hashable, function: Callable[[], Any], on_result: OnResult) -> None:
        task = self.loop.create_task(self._await_and_report(key, function, on_result))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, key: Hashable) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()

    async def _await_and_report(
        self, key: Hashable, function: Callable[[], Coroutine[Any, Any, Any]], on_result: OnResult
    ) -> None:
        """Await a coroutine, and call `on_result` with its value or its exception. No exception is
        raised, because one such as `SystemExit` would end the event loop.
        """
        now = time.monotonic()
        waited_s = now - self._put_at.pop(key, now)
        if waited_s >= self._recent_s(now):
            self._latest = (now, waited_s)
        try:
            result = CallResult(await function())
        except BaseException as error:  # foreign code, which may also call sys.exit
            result = CallResult(None, error)
        on_result(result)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread; `None` if none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@dataclass(slots=True)
class Leases:
    """Limit how many objects of a user's class are open at once, and how long they stay unused.

    An open object has a lease, from before its `reset` to the end of its `close`. Leases are
    granted in the order of the calls. All methods are called on one event loop.
    """

    most_open: int
    """Largest number of objects at once; 0: any number."""
    idle_s: float
    """Seconds without a call after which an object loses its lease; 0: never."""
    close_idle: Callable[[Callee], None]
    """Closes an object whose lease has ended."""
    _open: dict[Callee, asyncio.TimerHandle | None] = field(default_factory=dict, init=False)
    """Open objects, each with the timer of its idle time if the timer runs."""
    _ended: set[Callee] = field(default_factory=set, init=False)
    """Objects that lost their leases, of trials that have not noticed yet."""
    _freed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    async def begin(self, call: Call) -> None:
        """Stop the idle timer of a call's object before the call; before a `reset`, wait for a
        lease of the object.

        Cancellation takes no lease.

        Raises:
            CallFault: the object was idle for too long, and has lost its lease.
        """
        callee, method = call.callee, call.request.method
        if method == "reset" and callee not in self._open:
            async with self._freed:
                await self._freed.wait_for(self._has_room)
                self._open[callee] = None
        elif method == "step" and callee in self._ended:
            raise CallFault(
                f"{call.place}: the object was not called for environment.idle_s = "
                f"{self.idle_s:g}, and was closed"
            )
        self._stop_clock(callee)

    async def end(self, call: Call) -> None:
        """Restart the idle timer, or end the lease, after a call that returned, raised or was
        cancelled.
        """
        callee = call.callee
        if call.request.method == "close":
            self._stop_clock(callee)
            self._ended.discard(callee)
            await self.give_back(callee)
        elif callee in self._open and self.idle_s:
            loop = asyncio.get_running_loop()
            self._open[callee] = loop.call_later(self.idle_s, self._expire, callee)

    async def wait_for_close(self, most_s: float) -> None:
        """Wait until an object of this process is closed, at most `most_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s), self._freed:
                await self._freed.wait()

    async def give_back(self, callee: Callee) -> None:
        """End the lease of an object that has been closed, if it has one."""
        if callee in self._open:
            async with self._freed:
                self._open.pop(callee, None)
                self._freed.notify_all()

    def _has_room(self) -> bool:
        return len(self._open) < (self.most_open or math.inf)

    def _stop_clock(self, callee: Callee) -> None:
        if (clock := self._open.get(callee)) is not None:
            clock.cancel()
            self._open[callee] = None

    def _expire(self, callee: Callee) -> None:
        self._ended.add(callee)
        self.close_idle(callee)


@dataclass(slots=True, eq=False)
class CallClock:
    """Measure the time of a call. The clock is stopped while a program waits for the policy's
    answers: that is the engine's time.
    """

    call: Call
    limit: asyncio.Timeout
    """Ends the call at its deadline."""
    began: float
    """When the call began, in the event loop's time, plus the seconds for which the clock was
    stopped since.
    """
    stopped_at: float
    """When the clock last stopped, in the event loop's time."""
    num_stops: int = 1
    """How many callers keep the clock stopped now; it runs while this is 0. A new clock is stopped
    once, until `CallRunner` starts it.
    """


PATIENT = EnvironmentConfig(step_deadline_s=math.inf)
"""Configuration of calls without a deadline."""


class CallRunner:
    """Make calls, each within a deadline. Threads and processes are started when they are needed.

    Args:
        config: Its deadline of a call, worker processes, and bounds on open objects.
        say: Called with a sentence for the user, about a slow call.
    """

    def __init__(
        self, config: EnvironmentConfig = PATIENT, say: Callable[[str], None] = print_to_stderr
    ) -> None:
        self._deadline_s, self._wait_for_room_s = config.step_deadline_s, config.wait_for_room_s
        self._say = say
        self._running: set[CallClock] = set()
        """Clocks that run: of calls that have not returned, and do not wait for the policy."""
        self._calling_s, self._calling_since = 0.0, 0.0
        """Seconds in which at least one clock ran, over the periods that have ended; and the start
        of the current period, in the event loop's time.
        """
        self._next_check: asyncio.TimerHandle | None = None
        """Timer of the next `_check_for_slow_calls`."""
        self._known_slow: set[str] = set()
        """Names of the functions for which a slow call was reported."""
        self._leases = Leases(config.most_open, config.idle_s, self._close_idle)
        self._pool = WorkerPool(config.workers, say) if config.workers else None
        self._serial: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._idle_threads: list[CallThread] = []
        self._coroutines: CoroutineThread | None = None
        self._background: set[asyncio.Task[object]] = set()

    async def perform(self, call: Call) -> MethodResult:
        """Make a call, and return its result. Cancellation abandons the call: a coroutine is
        cancelled, and a thread goes on by itself until it returns.

        A `reset` that finds no room is repeated for `wait_for_room_s`.

        Raises:
            CallFault: the call raised, or took longer than the deadline; or the object was closed,
                because it had not been called for `idle_s`.
        """
        await self._leases.begin(call)
        began, has_waited = time.monotonic(), False
        try:
            while True:
                try:
                    return await self._within_deadline(call)
                except NoRoom as fault:
                    left_s = self._wait_for_room_s - (time.monotonic() - began)
                    if left_s <= 0:
                        raise
                    if not has_waited:
                        print_to_stderr(f"{fault}; waiting for room")
                has_waited = True
                await self._leases.wait_for_close(min(left_s, TRY_AGAIN_S))
        finally:
            await self._leases.end(call)

    def close_in_background(self, calls: Iterable[Call]) -> None:
        """Make closing calls in the background; a failure is printed to stderr."""
        for call in calls:
            self._in_background(self.perform(call), "closing")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @cached_property
    def gateway(self) -> "Gateway":
        """HTTP server at which an agent's program calls the policy; it listens from the first
        program on that is played.
        """
        # Imported here: few environments are programs.
        from mage_services.gateway.gateway import Gateway

        return Gateway()

    async def close(self) -> None:
        """Wait up to `CLOSING_S` for objects to be closed, and end idle threads and the worker
        processes.

        After a cancellation, objects and processes end with this process.
        """
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSING_S)
        # A program that plays many evaluations, such as a notebook, would keep the threads of each.
        while self._idle_threads:
            self._idle_threads.pop().end()
        if self._pool is not None:
            await self._pool.close()
        if "gateway" in vars(self):
            await self.gateway.close()

    async def _within_deadline(self, call: Call) -> MethodResult:
        """Make a call within the deadline, which starts when the call has its turn."""
        pool, callee = self._pool, call.callee
        if pool is not None and isinstance(callee, UserObject):
            await pool.admit(callee, call.request)
            # The process is looked up before the call, because a `close` forgets its episode.
            process = pool.process_of(callee)
            make_call = partial(pool.perform, callee, call.request)
        else:
            process, make_call = None, partial(self._call_here, call)
        async with self._serial[callee.serial_group] if callee.serial_group else nullcontext():
            try:
                async with asyncio.timeout(None) as limit:
                    with self._watched(call, limit):
                        return await make_call()
            except TimeoutError:  # the deadline: an exception of the call is a `CallFault`
                if pool is not None and process is not None:
                    self._in_background(pool.kill_if_stuck(process), "checking a process")
                raise call.overdue(self._deadline_s) from None

    def calling_s(self) -> float:
        """Return the seconds so far in which at least one call had not returned. A program that
        waits for the policy does not count.
        """
        if not self._running:
            return self._calling_s
        return self._calling_s + asyncio.get_running_loop().time() - self._calling_since

    @contextmanager
    def _watched(self, call: Call, limit: asyncio.Timeout) -> Iterator[None]:
        """Account for the time of a call within the context, end it at its deadline, and report it
        if it is slow.
        """
        now = asyncio.get_running_loop().time()
        clock = CallClock(call, limit, now, now)
        if isinstance(call.callee, AgentProgram):
            # The program's session enters this context while a request waits for the policy.
            call.callee.session.waiting = partial(self._stopped, clock)
        self._resume(clock)
        try:
            yield
        finally:
            # Never started again: a request to the policy may end after the program's own call, and
            # must not resume the clock.
            self._stop(clock)

    @contextmanager
    def _stopped(self, clock: CallClock) -> Iterator[None]:
        """Stop a clock within the context; several contexts of one clock may overlap."""
        self._stop(clock)
        try:
            yield
        finally:
            self._resume(clock)

    def _stop(self, clock: CallClock) -> None:
        """Stop a clock, unless it is stopped already, and suspend its deadline."""
        clock.num_stops += 1
        if clock.num_stops > 1:
            return
        clock.stopped_at = asyncio.get_running_loop().time()
        self._running.remove(clock)
        if not self._running:
            self._calling_s += clock.stopped_at - self._calling_since
        if not clock.limit.expired():  # a timeout that has expired cannot be changed
            clock.limit.reschedule(None)

    def _resume(self, clock: CallClock) -> None:
        """Undo one `_stop` of a clock. After the last one is undone the clock runs again, and its
        deadline is later by the time for which it was stopped.
        """
        clock.num_stops -= 1
        if clock.num_stops:
            return
        now = asyncio.get_running_loop().time()
        clock.began += now - clock.stopped_at
        if not self._running:
            self._calling_since = now
        self._running.add(clock)
        self._check_when_slow(clock)
        if not clock.limit.expired() and not math.isinf(self._deadline_s):
            clock.limit.reschedule(clock.began + self._deadline_s)

    def _check_when_slow(self, clock: CallClock) -> None:
        """Schedule a check for the time at which a call becomes slow, unless a check comes sooner
        or a slow call of the same function was reported already.
        """
        due, timer = clock.began + SLOW_S, self._next_check
        if (timer and timer.when() <= due) or clock.call.name in self._known_slow:
            return
        if timer:
            timer.cancel()
        self._next_check = asyncio.get_running_loop().call_at(due, self._check_for_slow_calls)

    def _check_for_slow_calls(self) -> None:
        """Report slow calls, and schedule a check for when the next call becomes slow."""
        self._next_check = None
        latest = asyncio.get_running_loop().time() - SLOW_S
        for clock in sorted(self._running, key=lambda each: each.began):
            if clock.began > latest:
                self._check_when_slow(clock)
            elif clock.call.name not in self._known_slow:
                self._known_slow.add(clock.call.name)
                self._report_slow(clock.call)

    def _report_slow(self, call: Call) -> None:
        num_others = len(self._running) - 1
        others = f"; {num_others} other calls wait too" if num_others else ""
        slow = f"has not returned for {SLOW_S:g} s{others}"
        cure = "raise engine.max_contexts, so that more of them wait at the same time"
        if isinstance(call.callee, AgentProgram):
            others = f"; {num_others} other programs run too" if num_others else ""
            slow = f"has taken {SLOW_S:g} s, its waits for the policy not counted{others}"
            cure = (
                "raise it; if programs wait for each other, lower environment.most_open, and "
                "create clients once, not in each episode"
            )
        coroutines = self._coroutines
        if call.is_async and coroutines and (late_s := coroutines.latest_s()) > STUCK_S:
            cure = (
                "await what takes long, or write plain functions, which are called in threads: a "
                f"call has waited {late_s:.1f} s for the event loop of all coroutines, so one of "
                "them blocks it"
            )
        # On a machine with other work everything is late, and no key helps.
        cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
        if load > BUSY * cores:
            cure += (
                f". This machine is busy: its load is {load:.0f}, with {cores} cores for this "
                "process; with fewer --actors, or less other work, calls return sooner"
            )
        self._say(
            f"{call.place} {slow}. After environment.step_deadline_s = {self._deadline_s:g} s a "
            "call has failed, and its trial is played again. If calls hang, lower this key; if "
            f"they are slow, {cure}"
        )

    async def _call_here(self, call: Call) -> MethodResult:
        """Make a call in this process, and return its result.

        Raises:
            CallFault: the call raised.
        """
        result = await (self._in_loop(call.function) if call.is_async else self._in_thread(call))
        if result.error is not None:
            raise call.fault(result.error) from result.error
        answered: MethodResult = result.value
        return answered

    async def _leave_blocked_loop(self, coroutines: CoroutineThread) -> None:
        """Abandon an event loop if a coroutine blocks it; later calls get a new one."""
        reply = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), coroutines.loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(reply), STUCK_S)
        except TimeoutError:
            if self._coroutines is coroutines:
                self._coroutines = None
            if coroutine_loop() is coroutines.loop:
                coroutine_loop.cache_clear()

    def _close_idle(self, callee: Callee) -> None:
        """Close an object whose lease has ended; a later call of its trial fails."""
        place = f"an object that was not called for {self._leases.idle_s:g} s: close()"
        self._in_background(self._give_back(Call(callee, Request("close", place))), "closing idle")

    async def _give_back(self, call: Call) -> None:
        """Make a call of `close`, and end the lease of its object even if the call fails."""
        try:
            await self._within_deadline(call)
        finally:
            await self._leases.give_back(call.callee)

    def _in_background(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Do some work in a task, which `close` waits for; print a `CallFault` to stderr."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[object]) -> None:
        """Forget a task of `_in_background` that has ended, and print its `CallFault`."""
        self._background.discard(task)
        try:
            if not task.cancelled():
                task.result()
        except CallFault as fault:
            print_to_stderr(str(fault))

    async def _in_thread(self, call: Call) -> CallResult:
        """Make a call in a thread that is idle, or in a new one."""
        thread = self._idle_threads.pop() if self._idle_threads else CallThread()
        result, on_result = self._new_result(partial(self._reuse, thread, call))
        thread.call(call, on_result)
        return await result

    async def _in_loop(self, function: Callable[[], Any]) -> CallResult:
        """Await a call in the event loop of all coroutines."""
        if self._coroutines is None:
            self._coroutines = CoroutineThread()
        coroutines = self._coroutines
        result, on_result = self._new_result()
        coroutines.call(result, function, on_result)  # the future is also the call's key
        try:
            return await result
        except asyncio.CancelledError:
            coroutines.cancel(result)
            # Even if this runner has no deadline: in a worker process, calls are cancelled at the
            # deadline of the actor.
            self._in_background(self._leave_blocked_loop(coroutines), "checking an event loop")
            raise

    def _new_result(
        self, after: Callable[[], None] = lambda: None
    ) -> "tuple[asyncio.Future[CallResult], OnResult]":
        """Return a future of a call's result, and the function that sets it from any thread.

        Args:
            after: Called on this event loop when the result is there, even if the future was
                cancelled.
        """
        result: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        return result, partial(self._results.put, result, after)

    @cached_property
    def _results(self) -> Handover:
        """Queue of results, created on the event loop that makes the first call."""
        return Handover(asyncio.get_running_loop(), self._set_result)

    def _set_result(
        self, result: "asyncio.Future[CallResult]", after: Callable[[], None], value: CallResult
    ) -> None:
        """Set the future of a call's result, unless it was cancelled; see `_new_result`."""
        after()
        settle(result, None, value)

    def _reuse(self, thread: CallThread, call: Call) -> None:
        """Make a thread idle again after its call. If the call has left an object open, because the
        class's `close` is a coroutine function and a thread cannot await it, close the object on
        the event loop.
        """
        self._idle_threads.append(thread)
        if (close := call.callee.late_close()) is not None:
            self._in_background(self._close_late(call, close), "closing late")

    async def _close_late(self, call: Call, close: Callable[[], Any]) -> None:
        """Await `close` of the object that `call` left open.

        Raises:
            CallFault: `close` raised.
        """
        result = await self._in_loop(close)
        if result.error is not None:
            closing = Call(call.callee, Request("close", f"{call.place}, then close()"))
            raise closing.fault(result.error) from result.error
