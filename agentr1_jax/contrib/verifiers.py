"""Task `verifiers`: a Python file written for the `verifiers` library (v0, releases 0.1), used by duck typing.

The file has `load_environment(**kwargs)`, which returns an object with a dataset, a rubric, and for more than one turn
`env_response(messages, state)` and `is_completed`. The library is needed only where the file imports it.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from annotated_types import MinLen
from pydantic.dataclasses import dataclass

from agentr1_jax.contrib import read_arguments
from agentr1_jax.envs.base import Action, Observation, Row, Transition
from agentr1_jax.envs.datasets import RowsTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.text.tool_calls import ParseError, ToolCall, parse_tool_calls
from agentr1_jax.tools.base import run_in_thread
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT

EVALUATION_ONE_IN = 8
"""One row in so many is held out for evaluation where the environment has no evaluation data set."""
GROUP_PARAMETERS = {"states", "prompts", "completions", "answers", "tasks", "infos"}
"""Parameters by which a reward function asks for all rollouts of a row."""
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class RewardFunction(NamedTuple):
    """One function of a rubric, sync or async; it takes by name what `VerifiersEnv` can pass."""

    name: str
    """name of its reward part and of its metric, unique in the rubric: a second `f` is `f_2`"""
    function: Callable[..., Any]
    weight: float
    """factor of its value in the reward; 0 for a metric only"""


@dataclass(frozen=True, config=STRICT)
class VerifiersConfig:
    """Keys of `task.verifiers`."""

    source: Annotated[str, MinLen(1)] = ""
    """path of a Python file with load_environment, or an installed module"""
    args: str = ""
    """keyword arguments of load_environment: the text of a JSON object; "" for none"""


class Message(dict[str, Any]):
    """A chat message that can be read as a dict and by attributes: releases differ in what environments expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@register("verifiers", VerifiersConfig)
def make_verifiers(config: VerifiersConfig, run: TaskContext) -> RowsTask:
    """Load a file or module and return its environment as a Task.

    Raises:
      ValueError: the source does not load, lacks something, needs what is not supported, or has a row of another shape.
    """
    source = config.source
    env = _load_environment(source, config.args)
    name = os.path.splitext(os.path.basename(source))[0]
    where = f"task.verifiers.source {source}"
    _check_support(env, where)
    train = _rows(env, "dataset", f"{name}/train", where)
    if train is None:
        raise ValueError(f"{where}: {type(env).__name__} has no dataset")
    evaluation = _rows(env, "eval_dataset", f"{name}/eval", where)
    if evaluation is not None:
        splits = {"train": train, "eval": evaluation}
    else:
        splits = {"train": [row for i, row in enumerate(train) if (i + 1) % EVALUATION_ONE_IN]}
        splits["eval"] = train[EVALUATION_ONE_IN - 1 :: EVALUATION_ONE_IN]
        if not splits["eval"]:
            raise ValueError(
                f"{where}: no eval_dataset, and {len(train)} rows are too few to hold one in {EVALUATION_ONE_IN} out; "
                "give it one"
            )
    parts = [function.name for function in reward_functions(env.rubric) if function.weight]
    return RowsTask(name, splits, lambda: VerifiersEnv(env), parts, seed=run.seed)


class VerifiersEnv:
    """Env of such an environment: responses become assistant messages, its messages become observations.

    The rubric pays at the end of an episode: Σ weight · function. An exception of a hook or a reward function fails the
    episode; the runner counts it as `env_failure`.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._tools = tool_schemas(env)

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode; `seed` is not used."""
        prompt = [Message(message) for message in row["messages"]]
        record = copy.deepcopy(row["record"])  # Hooks may write into it, and all episodes share the row.
        self._row, self._record, self._messages = row, record, list(prompt)
        self._state: dict[str, Any] = {
            **{"prompt": prompt, "completion": [], "answer": record.get("answer", ""), "info": _info(record)},
            **{"task": record.get("task", "default"), "input": record, "trajectory": [], "responses": []},
            **{"turn": 0, "is_completed": False, "error": None, "final_env_response": None},
        }
        if hasattr(self._env, "setup_state"):
            self._state = await _call(self._env.setup_state, self._state) or self._state
        self._metrics: dict[str, float] = {"em": 0.0}
        return Observation(messages=row["messages"], tools=self._tools, state_key=self._key())

    async def step(self, action: Action) -> Transition:
        """Apply one response."""
        calls = parse_tool_calls(action.text, lenient=action.lenient and not action.truncated) if self._tools else []
        unreadable = next((call for call in calls if isinstance(call, ParseError)), None)
        if unreadable:  # The library's clients never pass such a message on to an environment.
            error = Observation(text=unreadable.message, role="tool", state_key=self._key())
            return Transition(error, 0.0, info={"errors": {unreadable.kind: 1}})
        self._append_response(action.text, [call for call in calls if isinstance(call, ToolCall)])
        answer = [] if await self._is_completed() else await self._env_messages()
        self._messages += answer
        self._state["completion"] = self._messages[len(self._state["prompt"]) :]
        if not answer or self._state.get("final_env_response"):
            return await self._score()
        texts = [_text(message) for message in answer]
        role = "tool" if all(message["role"] == "tool" for message in answer) else "user"
        one, several = (texts[0], None) if len(texts) == 1 else (None, texts)
        observation = Observation(text=one, texts=several, role=role, state_key=self._key())
        return Transition(observation, 0.0, info={"errors": {}})

    def truncate(self) -> Mapping[str, float]:
        """Return the metrics of the episode so far; `em` is 0 where the budget ended it before it was scored."""
        return self._metrics

    def _append_response(self, text: str, calls: Sequence[ToolCall]) -> None:
        tool_calls = [_tool_call(call, f"call_{self._state['turn']}_{i}") for i, call in enumerate(calls)]
        content = text.partition("<tool_call>")[0].strip() if calls else text
        message = Message(role="assistant", content=content, tool_calls=tool_calls or None)
        self._state["trajectory"].append({"prompt": list(self._messages), "completion": [message], "extras": {}})
        self._messages.append(message)
        self._state["turn"] += 1
        self._state["completion"] = self._messages[len(self._state["prompt"]) :]

    async def _is_completed(self) -> bool:
        most = getattr(self._env, "max_turns", -1)
        if 0 < most <= self._state["turn"]:
            return True
        check = self._env.is_completed
        args = (self._messages, self._state) if "messages" in inspect.signature(check).parameters else (self._state,)
        return bool(await _call(check, *args))

    async def _env_messages(self) -> list[Message]:
        answer = await _call(self._env.env_response, self._messages, self._state)
        if isinstance(answer, tuple):  # Releases before 0.1.8 return the state as well.
            answer, self._state = answer
        messages = [{"role": "user", "content": answer}] if isinstance(answer, str) else answer
        return [_message(message) for message in messages]

    async def _score(self) -> Transition:
        state, rubric = self._state, self._env.rubric
        known = {**self._record, **state, **getattr(rubric, "class_objects", {}), "state": state}
        known.setdefault("parser", getattr(rubric, "parser", None))
        functions = reward_functions(rubric)
        values = {f.name: await _reward(f, known) for f in functions}
        parts = {f.name: f.weight * values[f.name] for f in functions if f.weight}
        reward, full_marks = sum(parts.values()), sum(f.weight for f in functions if f.weight > 0)
        self._metrics = {**values, "em": float(reward >= full_marks - 1e-9)}
        return Transition(
            observation=None,
            reward=reward,
            reward_parts=parts,
            terminated=True,
            outcome=Outcome.ENV_DONE,
            metrics=self._metrics,
            info={"errors": {}},
        )

    def _key(self) -> str:
        texts = [_text(message) for message in self._messages[len(self._state["prompt"]) :]]
        return f"{self._row['id']}|{json.dumps(texts)}"


def reward_functions(rubric: Any) -> list[RewardFunction]:
    """Return the functions of a rubric, or of a group of rubrics one after another, under unique names."""
    functions: dict[str, RewardFunction] = {}
    for function, weight in _weighted_functions(rubric):
        base = getattr(function, "__name__", type(function).__name__)
        names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in functions)
        functions[name] = RewardFunction(name, function, weight)
    return list(functions.values())


def tool_schemas(env: Any) -> list[dict[str, Any]]:
    """Return the schemas of an environment's tools: its own where it has them, else from signatures and docstrings."""
    schemas = getattr(env, "tool_defs", None) or getattr(env, "oai_tools", None)
    if schemas:
        return [_schema(tool) for tool in schemas]
    return [_schema_of_function(function) for function in getattr(env, "tools", None) or ()]


def _weighted_functions(rubric: Any) -> list[tuple[Callable[..., Any], float]]:
    if getattr(rubric, "rubrics", None):
        return [pair for inner in rubric.rubrics for pair in _weighted_functions(inner)]
    functions = getattr(rubric, "funcs", getattr(rubric, "reward_funcs", None))
    if callable(functions):
        functions = functions()
    weights = getattr(rubric, "weights", getattr(rubric, "reward_weights", None)) or [1.0] * len(functions or ())
    return list(zip(functions or (), map(float, weights), strict=True))


async def _reward(function: RewardFunction, known: Mapping[str, Any]) -> float:
    """Return the value of a reward function, which takes by name what it wants of `known`."""
    parameters = inspect.signature(function.function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kwargs = {key: value for key, value in known.items() if takes_all or key in parameters}
    value = float(await _call(function.function, **kwargs))
    if not math.isfinite(value):
        raise ValueError(f"reward function {function.name} returned {value}")
    return value


def _schema(tool: Any) -> dict[str, Any]:
    if isinstance(tool, Mapping) and "function" in tool:
        return dict(tool)
    fields = tool if isinstance(tool, Mapping) else vars(tool)
    function = {key: fields[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _schema_of_function(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = typing.get_origin(hints.get(name)) or hints.get(name)
        properties[name] = {"type": JSON_TYPES[kind]} if kind in JSON_TYPES else {}
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = inspect.getdoc(function) or ""
    return _schema({"name": function.__name__, "description": description, "parameters": parameters})


def _load_environment(source: str, args: str) -> Any:
    where = f"task.verifiers.source {source!r}"
    kwargs = read_arguments("task.verifiers.args", args)
    try:
        if source.endswith(".py"):
            name = f"agentr1_jax_verifiers_{os.path.splitext(os.path.basename(source))[0]}"
            spec = importlib.util.spec_from_file_location(name, os.path.expanduser(source))
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # Where dataclasses of the file look for themselves.
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except Exception as error:  # A user's file raises what it likes.
        raise ValueError(f"{where} cannot be imported ({type(error).__name__}: {error})") from error
    if not hasattr(module, "load_environment"):
        raise ValueError(f"{where} has no load_environment; tasksets of verifiers' v1 are not supported")
    try:
        return module.load_environment(**kwargs)
    except Exception as error:
        raise ValueError(f"{where}: load_environment raised {type(error).__name__}: {error}") from error


def _check_support(env: Any, where: str) -> None:
    kind = type(env).__name__
    unsupported = {
        "a group of environments": hasattr(env, "env_map") or hasattr(env, "envs"),
        "a sandbox": hasattr(env, "sandbox_client"),
        "tools of MCP servers (see docs/contrib/mcp.md)": hasattr(env, "mcp_servers"),
        "completions without chat": getattr(env, "message_type", "chat") == "completion",
    }
    for what, is_so in unsupported.items():
        if is_so:
            raise ValueError(f"{where}: {kind} needs {what}, which is not supported")
    if getattr(env, "rubric", None) is None:
        raise ValueError(f"{where}: {kind} has no rubric, which rewards come from")
    for hook in () if getattr(env, "max_turns", -1) == 1 else ("env_response", "is_completed"):
        if not callable(getattr(env, hook, None)):
            raise ValueError(f"{where}: {kind} has no {hook}, which more than one turn needs (max_turns is not 1)")
    for rubric in getattr(env.rubric, "rubrics", None) or [env.rubric]:
        if hasattr(rubric, "judge_client"):
            raise ValueError(f"{where}: {type(rubric).__name__} asks a judge model, which is not supported")
    for function in reward_functions(env.rubric):
        if GROUP_PARAMETERS & set(inspect.signature(function.function).parameters):
            raise ValueError(
                f"{where}: reward function {function.name} scores all rollouts of a row together, which is not "
                "supported"
            )


def _rows(env: Any, dataset: str, name: str, where: str) -> list[Row] | None:
    """Return the rows of a data set, which some environments build on demand; None where there is none."""
    build = getattr(env, f"build_{dataset}", None)
    records = build() if callable(build) else getattr(env, dataset, None)
    if records is None:
        return None
    return [_row(record, env, f"{name}/{i}", where) for i, record in enumerate(records)]


def _row(record: Any, env: Any, name: str, where: str) -> Row:
    if not isinstance(record, Mapping) or not ("prompt" in record or "question" in record):
        raise ValueError(f"{where}: row {name} has neither prompt nor question: {record!r:.100}")
    prompt = record.get("prompt", record.get("question"))
    system = getattr(env, "system_prompt", None)
    if isinstance(prompt, str):
        shots = getattr(env, "few_shot", None) or ()
        prompt = [*shots, {"role": "user", "content": prompt}]
    try:
        messages = [{"role": message["role"], "content": _text(message)} for message in map(_message, prompt)]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: the prompt of row {name} is no list of text messages ({error!r})") from error
    if not messages:
        raise ValueError(f"{where}: the prompt of row {name} is empty")
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    answers = [str(record["answer"])] if record.get("answer") not in (None, "") else []
    return {"id": name, "question": messages[-1]["content"], "answers": answers, "messages": messages, "record": record}


def _info(record: Mapping[str, Any]) -> Any:
    info = record.get("info", {})
    return json.loads(info) if isinstance(info, str) else info


def _message(message: Any) -> Message:
    fields = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    return Message(fields)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"content of type {part.get('type')!r} is not supported, only text")
    return "".join(part["text"] for part in content)


def _tool_call(call: ToolCall, name: str) -> Message:
    arguments = json.dumps(call.arguments)
    function = Message(name=call.name, arguments=arguments)
    return Message(id=name, type="function", function=function, name=call.name, arguments=arguments)


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a sync or async function; a sync one may block and runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await run_in_thread(function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value
