"""An event loop whose time is virtual: it jumps to the next timer when nothing is ready.

Everything that runs on it belongs to a :class:`Process`, found through a context variable
that tasks and callbacks inherit. That is how one loop can be a whole cluster: a killed
process runs nothing any more, a stopped one keeps what is ready for it until it continues,
and the others do not notice, as with SIGKILL, SIGSTOP and SIGCONT.

Deterministic: callbacks run in the order in which they became ready, timers in the order of
time and then of creation; ``shuffle`` draws the order between processes from a seed and keeps
the order inside each, which is all that an operating system promises.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Callbacks in a row without the clock moving: more is a loop that never sleeps.
MAX_CALLS_AT_ONCE: Final = 200_000


class Deadlock(AssertionError):
    """Somebody waits, and nothing is left that could ever happen."""


class Process:
    """One operating-system process of a simulated world.

    Its tasks are kept here so that nothing depends on when the collector runs. ``host`` is
    what partitions tell apart.
    """

    __slots__ = ("_tasks", "context", "held", "host", "is_dead", "is_stopped", "name")

    def __init__(self, name: str, host: str = "") -> None:
        self.name = name
        self.host = host or name
        self.is_dead = False
        self.is_stopped = False
        self.held: list[_Call] = []
        self._tasks: list[asyncio.Task[object]] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def tasks(self) -> list[asyncio.Task[object]]:
        """Those that are unfinished, oldest first."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return list(self._tasks)

    def add_task(self, task: asyncio.Task[object]) -> None:
        """Looked through when somebody asks: a callback for the end of each would be one of
        ten that this loop runs."""
        self._tasks.append(task)

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "stopped" if self.is_stopped else "running"
        return f"Process({self.name}, {state}, tasks={len(self.tasks)})"


#: Whose code is running; None is the world itself (network, planned faults, checks).
PROCESS: Final[ContextVar[Process | None]] = ContextVar("pdcore_sim_process", default=None)


class _Call(asyncio.TimerHandle):
    """A callback that is ready or due. The base class only gives it its type: its own
    constructor asks for debugging and source lines, and even an empty one would be a tenth
    of what this loop costs, so whoever makes one sets its attributes. ``when_s`` is not set
    where it was ready at once."""

    __slots__ = ("function", "parameters", "place", "process", "when_s")

    function: Callable[..., object] | None
    parameters: tuple[object, ...]
    place: Context
    process: Process | None
    when_s: float

    def cancel(self) -> None:
        self.function = None
        self.parameters = ()

    def cancelled(self) -> bool:
        return self.function is None

    def when(self) -> float:
        return self.when_s

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"_Call({self.process}, {self.function})"


_new_call: Final[Callable[[type[_Call]], _Call]] = object.__new__


class _Calls(asyncio.BaseEventLoop):
    """The part of an event loop that asyncio and libraries on it use."""

    def __init__(self, start_s: float) -> None:
        self._is_running = False
        super().__init__()
        #: Virtual time in seconds; read here by whoever asks a hundred times per request.
        self.now_s = start_s
        #: What is ready, in the order of becoming so.
        self._queue: list[_Call] = []
        self._timers: list[tuple[float, int, _Call]] = []
        self._num_timers = 0
        #: What asyncio would log: exceptions that nobody took, with the process's name.
        self.errors: list[str] = []
        #: All tasks since the last look at them, and whose they are.
        self._made: list[tuple[Process | None, asyncio.Task[object]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        call = _new_call(_Call)
        call.function, call.parameters = callback, args
        call.place = place = copy_context() if context is None else context
        call.process = place.get(PROCESS)
        self._queue.append(call)
        return call

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        call = _new_call(_Call)
        call.function, call.parameters, call.when_s = callback, args, when
        call.place = place = copy_context() if context is None else context
        call.process = place.get(PROCESS)
        self._num_timers += 1  # what is due at the same time happens in the order of creation
        heappush(self._timers, (when, self._num_timers, call))
        return call

    def create_future(self) -> asyncio.Future[object]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[asyncio.Future[object] | None, None, T] | Coroutine[object, object, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """A process keeps its tasks, so that no collection can end one; they have its name."""
        process = PROCESS.get() if context is None else context.get(PROCESS)
        owner = "world" if process is None else process.name
        task = asyncio.Task(coro, loop=self, name=owner, context=context)
        if process is not None:
            process.add_task(task)
        self._made.append((process, task))
        return task

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Ts]], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Called inline: what a thread would do takes no virtual time."""
        future: asyncio.Future[T] = asyncio.Future(loop=self)
        future.set_result(func(*args))
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        """It holds nothing that would have to be closed."""
        return not self._is_running

    def call_exception_handler(self, context: Mapping[str, object]) -> None:
        process = PROCESS.get()
        error = context.get("exception")
        text = f"{context.get('message')}" + ("" if error is None else f": {error!r}")
        self.errors.append(f"{'world' if process is None else process.name}: {text}")


class SimLoop(_Calls):
    """See the module. ``run`` is the only way in."""

    def __init__(self, shuffle: random.Random | None = None, *, start_s: float = 1000.0) -> None:
        super().__init__(start_s)
        self._shuffle = shuffle
        #: Callbacks since time moved last.
        self._num_at_once = 0

    def run(self, main: Coroutine[object, object, T]) -> T:
        """Raises Deadlock when nothing is left to do, and what a callback raised. Afterwards
        ``errors`` has what tasks ended with and nobody asked for."""
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            task = asyncio.Task(main, loop=self)
            self._turn_until(task)
        finally:
            self._look_for_failures()
            self._is_running = False
            asyncio._set_running_loop(None)
        return task.result()

    def stop_process(self, process: Process) -> None:
        """SIGSTOP: what becomes ready for it waits."""
        process.is_stopped = True

    def resume_process(self, process: Process) -> None:
        """SIGCONT, in the order in which things became ready."""
        process.is_stopped = False
        held, process.held = process.held, []
        self._queue.extend(held)

    def kill_process(self, process: Process) -> None:
        """SIGKILL: nothing of it runs from now on, not even what cleans up."""
        process.is_dead = True
        process.held = []

    def _look_for_failures(self) -> None:
        """Add to ``errors`` what tasks ended with and nobody has asked for: asyncio tells of it
        when it forgets the task, which may be kept for as long as its process lives."""
        made, self._made = self._made, []
        for process, task in made:
            if not task.done():
                self._made.append((process, task))
            elif task._log_traceback:
                task._log_traceback = False
                owner = "world" if process is None else process.name
                self.errors.append(f"{owner}: a task that nobody awaits: {task._exception!r}")

    async def bury(self, process: Process) -> None:
        """After the end of a world: unwind what a killed process left on its stacks."""
        process.is_dead = process.is_stopped = False
        for _ in range(100):
            left = process.tasks
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)

    def _turn_until(self, task: asyncio.Task[T]) -> None:
        """Run what is ready, turn by turn; where nothing is, time jumps to the next timer."""
        timers, shuffle = self._timers, self._shuffle
        left: Iterator[_Call] = iter(())
        try:
            while not task.done():
                ready, self._queue = self._queue, []
                if not ready:
                    self._jump()
                while timers and timers[0][0] <= self.now_s:
                    call = heappop(timers)[2]
                    if call.function is not None:
                        ready.append(call)
                turn = len(ready)
                if shuffle is not None and turn > 1:
                    ready = _shuffled(ready, shuffle)
                self._num_at_once += turn
                if self._num_at_once > MAX_CALLS_AT_ONCE:
                    why = f"time stands still at {self.now_s:.6f} s: somebody never sleeps"
                    raise Deadlock(why)
                left = iter(ready)
                for call in left:
                    if (function := call.function) is None:
                        continue
                    process = call.process
                    if process is None or not (process.is_dead or process.is_stopped):
                        call.place.run(function, *call.parameters)
                    elif not process.is_dead:
                        process.held.append(call)
        finally:
            self._queue[:0] = left  # those that were not reached, if one raised

    def _jump(self) -> None:
        """Go on at the time of the next timer."""
        timers = self._timers
        while timers and timers[0][2].function is None:
            heappop(timers)
        if not timers:
            raise Deadlock("nothing is ready and no timer is set: somebody waits for ever")
        if timers[0][0] > self.now_s:
            self.now_s = timers[0][0]
            self._num_at_once = 0


async def pass_time(seconds: float) -> None:
    """Let virtual time pass. Takes no real time."""
    await asyncio.sleep(seconds)


def _shuffled(ready: list[_Call], rng: random.Random) -> list[_Call]:
    """Another order between processes, the same inside each."""
    keys: dict[Process | None, float] = {}
    for call in ready:
        if call.process not in keys:
            keys[call.process] = rng.random()
    return sorted(ready, key=lambda call: keys[call.process]) if len(keys) > 1 else ready
