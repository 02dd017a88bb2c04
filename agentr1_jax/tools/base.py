"""The Tool contract, and the execution of one call.

A tool says *what happened*; the environment decides what that means for the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

import jsonschema

P = ParamSpec("P")
T = TypeVar("T")
Fault = Literal["model", "infrastructure"]
MAX_MESSAGE = 500  # characters of an exception's text


@dataclasses.dataclass(frozen=True)
class ToolError:
    """Kind and fault of a failed call.

    Attributes:
      kind: a short typed name, e.g. `unknown_tool`, `bad_arguments`, `oversized`, `exception`, `bad_result`, `timeout`.
      fault: `model` errors go back to the policy as an observation; `infrastructure` errors are retried.
    """

    kind: str
    fault: Fault


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """The result of one call.

    Attributes:
      content: text shown to the policy.
      ok: False if the call failed.
      error: set exactly where `ok` is False.
      reward: an own reward of the tool, None if it gives none.
      data: machine-readable details for the environment (e.g. passage ids); never shown to the policy.
    """

    content: str
    ok: bool = True
    error: ToolError | None = None
    reward: float | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Tool(Protocol):
    """A tool: a name, a description, a JSON Schema of its arguments, and `execute`, sync or async.

    A sync `execute` runs in a thread, so that it may block, and has to bear being called from several at once. A tool
    whose `execute` is quicker than starting a thread (0.1 ms) may say `blocking = False`; it then runs on the event
    loop, where no time limit can interrupt it. An async `execute` must not block.

    A tool that gains from many calls at once may have `execute_batch(sequence of arguments) -> sequence of ToolResult`,
    sync or async too; see `batching.Batched`.
    """

    @property
    def name(self) -> str:
        """Name by which the policy calls it."""
        ...

    @property
    def description(self) -> str:
        """Description for the policy."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of the arguments."""
        ...

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult | Awaitable[ToolResult]:
        """Run the call. `arguments` have been validated against `parameters`."""
        ...


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """Base of all wrappers: name, description and parameters are those of the tool inside."""

    tool: Tool

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def description(self) -> str:
        return self.tool.description

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.tool.parameters


def failure(kind: str, content: str, fault: Fault = "model") -> ToolResult:
    """Return a failed call, with the text that the policy will read."""
    return ToolResult(content=content, ok=False, error=ToolError(kind, fault))


def schema(tool: Tool) -> dict[str, Any]:
    """Return the tool as chat templates expect it: `{"type": "function", "function": {...}}`."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def argument_error(tool: Tool, arguments: Any) -> str | None:
    """Return in one line what is wrong with `arguments` by the tool's schema; None if nothing is."""
    validator = jsonschema.Draft202012Validator(dict(tool.parameters))
    error = next(iter(sorted(validator.iter_errors(arguments), key=lambda e: list(map(str, e.absolute_path)))), None)
    return None if error is None else error.message


async def call(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    """Validate the arguments and execute one call. Raises nothing but what `execute` raises."""
    try:
        problem = argument_error(tool, arguments)
    except Exception as error:  # The tool's schema is none.
        return exception_result(tool, error)
    if problem is not None:
        return failure("bad_arguments", f"Error: bad arguments for {tool.name}: {problem}")
    return await execute(tool, arguments)


async def execute(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    """Execute one call with valid arguments; whatever the tool does comes back as a result.

    What goes wrong in the tool's own code is an infrastructure fault (the policy could not have known better): kind
    `exception` for whatever it raises, `bad_result` where it returns anything but a proper ToolResult.

    Raises:
      asyncio.CancelledError: the task that waits was cancelled; never because the tool raised it.
    """
    result, problem = await run_safely(tool, tool.execute, arguments)
    return problem or check_result(tool, result)


async def run_safely(tool: Tool, function: Callable[[Any], Any], argument: Any) -> tuple[Any, ToolResult | None]:
    """Run a sync or async function of a tool; return its value, or the failure that stands for what it raised.

    Raises:
      asyncio.CancelledError: the waiting task was cancelled, also where the tool hid it.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    value, problem = None, None
    try:
        if inspect.iscoroutinefunction(function) or not getattr(tool, "blocking", True):
            value = function(argument)
        else:
            value = await run_in_thread(_in_worker, function, argument)
        if inspect.isawaitable(value):
            value = await value
    except BaseException as error:  # Nothing that a tool does may end the batch.
        if _ends_the_program(error, task):
            raise
        value, problem = None, exception_result(tool, error)
    if task and task.cancelling() > cancels:
        raise asyncio.CancelledError
    return value, problem


def exception_result(tool: Tool, error: BaseException) -> ToolResult:
    """Return the failed call that stands for an exception."""
    try:
        message = str(error)
    except Exception:
        message = ""
    content = f"Error: {tool.name} raised {type(error).__name__}: {message[:MAX_MESSAGE]}"
    return failure("exception", content, "infrastructure")


def check_result(tool: Tool, result: Any) -> ToolResult:
    """Return `result` if it keeps the contract, else the failed call that says how it does not."""
    problem = result_problem(result)
    return failure("bad_result", f"Error: {tool.name} {problem}", "infrastructure") if problem else result


def result_problem(result: Any) -> str | None:
    """Return how this result breaks the contract, as `returned ...`; None if it does not."""
    if not isinstance(result, ToolResult):
        return f"returned a {type(result).__name__}, not a ToolResult"
    content, ok, error, reward, data = (getattr(result, field.name) for field in dataclasses.fields(ToolResult))
    if not isinstance(content, str):
        return f"returned a content of type {type(content).__name__}, not str"
    if not isinstance(ok, bool) or not isinstance(error, ToolError | None) or ok != (error is None):
        return "returned an `ok` that does not fit its `error`"
    if not isinstance(reward, numbers.Real | None) or not math.isfinite(reward or 0):
        return "returned a reward that is no finite number"
    if not isinstance(data, Mapping):
        return f"returned data of type {type(data).__name__}, not a mapping"
    return None


def _ends_the_program(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Return True for an interrupt by the user, and for the end of a coroutine that nobody will resume."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, GeneratorExit):
        try:
            return asyncio.current_task() is not task
        except RuntimeError:  # No loop runs.
            return True
    return False


def _in_worker(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt) as error:
        # On the event loop these would pass for the loop's own.
        raise RuntimeError(type(error).__name__) from error


_abandoned: set[threading.Thread] = set()
_lock = threading.Lock()


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a daemon thread of its own; return or raise what it does.

    A thread pool will not do: its threads are joined at exit, and calls that hang would take its places from others.
    Where the waiter is cancelled the call is not, for Python cannot stop a thread: it ends by itself, its result is
    dropped, and until then `abandoned_threads` counts it. The event loop may be closed before that.
    """
    loop = asyncio.get_running_loop()
    # A pair, since a future refuses some exceptions (StopIteration) and treats others (CancelledError) as its own.
    outcome: asyncio.Future[tuple[list[T], BaseException | None]] = loop.create_future()

    def deliver(values: list[T], error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((values, error))

    def work() -> None:
        values: list[T] = []
        raised: BaseException | None = None
        try:
            values.append(function(*args, **kwargs))
        except BaseException as error:  # It belongs to the waiter, whatever it is.
            raised = error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(deliver, values, raised)

    context = contextvars.copy_context()
    name = f"run_in_thread:{getattr(function, '__qualname__', 'call')}"
    thread = threading.Thread(target=context.run, args=(work,), daemon=True, name=name)
    thread.start()
    try:
        values, error = await outcome
    except BaseException:
        _abandon(thread)
        raise
    if error is not None:
        raise error
    return values[0]


def abandoned_threads() -> int:
    """Return the number of threads that still run a call whose waiter was cancelled."""
    with _lock:
        _forget_dead_threads()
        return len(_abandoned)


def _abandon(thread: threading.Thread) -> None:
    with _lock:
        _forget_dead_threads()
        _abandoned.add(thread)


def _forget_dead_threads() -> None:
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])


class PerLoop(Generic[T]):
    """A value for each running event loop: each rollout has its own, and asyncio's locks and futures do not travel.

    Args:
      make: makes the value where it is first asked for; values of closed loops are dropped.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """Return the running loop's value."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            for other in [loop for loop in list(self._values) if loop.is_closed()]:
                self._values.pop(other, None)
            self._values[loop] = self._make()
        return self._values[loop]
