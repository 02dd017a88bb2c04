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
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from agentr1_jax.tools import schemas

P = ParamSpec("P")
T = TypeVar("T")
Fault = Literal["model", "infrastructure"]
MAX_MESSAGE = 500  # characters of an exception's text


@dataclasses.dataclass(frozen=True)
class ToolError:
    """Kind and fault of a failed call.

    Attributes:
      kind: e.g. `unknown_tool`, `bad_arguments`, `oversized`, `exception`, `bad_result`, `timeout`.
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
    sync or async too; see `wrappers.Batched`.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult | Awaitable[ToolResult]:
        """Run the call. `arguments` have been validated against `parameters`."""
        ...


def failure(kind: str, content: str, fault: Fault = "model") -> ToolResult:
    """Return a failed call, with the text that the policy will read."""
    return ToolResult(content=content, ok=False, error=ToolError(kind, fault))


def schema(tool: Tool) -> dict[str, Any]:
    """Return the tool as chat templates expect it: `{"type": "function", "function": {...}}`."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def argument_error(tool: Tool, arguments: Any) -> str | None:
    """Return in one line what is wrong with `arguments` by the tool's schema; None if nothing is."""
    return schemas.find_error(tool.parameters, arguments)


async def call(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    """Validate the arguments and execute one call. Raises nothing but what `execute` raises."""
    try:
        in_thread = schemas.is_slow(tool.parameters)
        problem = await run_in_thread(argument_error, tool, arguments) if in_thread else argument_error(tool, arguments)
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
    in_thread = getattr(tool, "blocking", True) and not inspect.iscoroutinefunction(function)
    value, problem = None, None
    try:
        value = await run_in_thread(function, argument) if in_thread else function(argument)
        if inspect.isawaitable(value):
            value = await value
    except BaseException as error:  # Nothing that a tool does may end the batch.
        by_user = not in_thread and threading.current_thread() is threading.main_thread()
        if (isinstance(error, KeyboardInterrupt) and by_user) or (
            isinstance(error, GeneratorExit) and _is_closed(task)
        ):
            raise
        value, problem = None, exception_result(tool, error)
    if task and task.cancelling() > cancels:
        raise asyncio.CancelledError
    return value, problem


def exception_result(tool: Tool, error: BaseException) -> ToolResult:
    """Return the failed call that stands for an exception."""
    try:
        message = str(error)[:MAX_MESSAGE]
    except BaseException:
        message = ""
    content = f"Error: {tool.name} raised {type(error).__name__}: {message}"
    return failure("exception", content, "infrastructure")


def check_result(tool: Tool, result: Any) -> ToolResult:
    """Return `result` if it keeps the contract, else the failed call that says how it does not."""
    problem = _result_problem(result)
    return failure("bad_result", f"Error: {tool.name} returned {problem}", "infrastructure") if problem else result


def _result_problem(result: Any) -> str | None:
    if not isinstance(result, ToolResult):
        return f"a {type(result).__name__}, not a ToolResult"
    content, ok, error, reward, data = (getattr(result, field.name) for field in dataclasses.fields(ToolResult))
    if not isinstance(content, str):
        return f"a content of type {type(content).__name__}, not str"
    if not isinstance(ok, bool) or not isinstance(error, ToolError | None) or ok != (error is None):
        return "an `ok` that does not fit its `error`"
    if not isinstance(reward, numbers.Real | None) or not math.isfinite(reward or 0):
        return "a reward that is no finite number"
    if not isinstance(data, Mapping):
        return f"data of type {type(data).__name__}, not a mapping"
    return None


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Return whether the coroutine of a task is closed from outside: nobody will resume it."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # No loop runs.
        return True


class _CallThread(threading.Thread):
    abandoned = False


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
    thread = _CallThread(target=context.run, args=(work,), daemon=True, name=name)
    thread.start()
    try:
        values, error = await outcome
    except BaseException:
        thread.abandoned = True
        raise
    if error is not None:
        raise error
    return values[0]


def abandoned_threads() -> int:
    """Return the number of threads that still run a call whose waiter was cancelled."""
    return sum(isinstance(thread, _CallThread) and thread.abandoned for thread in threading.enumerate())
