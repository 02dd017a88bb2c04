"""Write docs/config.md, the keys of a config, and docs/metrics.md, the metrics of a run; print the keys of one config.

python -m experiments.config_reference
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import pathlib
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from annotated_types import Ge, Gt, Le, Lt, MinLen
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentr1_jax.credit.scheme import SCHEMES, CreditConfig, arguments_class
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import PolicyConfig
from agentr1_jax.runtime import config as configs
from agentr1_jax.train import defaults, metrics
from agentr1_jax.train.settings import ROLLOUT, SECTIONS, RunConfig, TaskConfig
from agentr1_jax.validation import INT32, to_section
from configs import base
from experiments.setup import complete

WIDTH = 180
"""Columns of the table of keys where the output is no terminal."""
METRICS_PAGE = pathlib.Path(__file__).parent.parent / "docs" / "metrics.md"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "config.md"
CLASSES: Mapping[str, Iterable[type]] = {
    "": (RunConfig,),
    "task": (TaskConfig,),
    "policy": (PolicyConfig,),
    "rollout": tuple(ROLLOUT.values()),
    "credit": (CreditConfig,),
    **{section: (cls,) for section, cls in SECTIONS.items()},
}
"""Section -> dataclasses whose fields are its keys."""
NAMES: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    bool: "True or False",
    str: "text",
    Any: "anything",
    pathlib.Path: "path",
}
Fields = dict[str, tuple[Any, str]]
"""Name of a field -> its annotation and its meaning."""
BOUNDS = ((Ge, "≥", "ge"), (Gt, ">", "gt"), (Le, "≤", "le"), (Lt, "<", "lt"))
INTRODUCTION = """\
# Config reference

Generated from `configs/base.py` and the dataclasses of its sections by `python -m experiments.config_reference`.

Set a key in a config file (`c.optimizer.lr = 3e-4`) or behind the command (`--config.optimizer.lr=3e-4`);
`--keys[=section]` prints the keys of a config with their values, and where each was set.

- `--config.KEY=None` unsets a key that may have no value. What is *by hardware* then follows from `hardware`, what is
  *derived* from other keys: lengths from those in `budget`, so that a longer context is one key.
- `--config.credit='gigpo(gamma=.95)'` sets `credit.name` and `credit.args` at once.
- With another `credit.name`, arguments of the config's scheme that the new one lacks are left out; another `task.name`
  brings its own section with its defaults. The log says what was left out.

A config file starts from `base.get_config("task")` and is locked: a key that does not exist is an error that names the
nearest one, or the counterpart of another trainer's key. A value of another type or out of range is refused at the
start, and so are values that do not fit each other. Integers are less than 2^31.
"""

METRICS_INTRODUCTION = """\
# Metrics

Generated from `agentr1_jax/train/metrics.py` by `python -m experiments.config_reference`.

A run writes a record to `metrics.jsonl` for every RL update, every tenth update before RL, and every evaluation:

    tail -n 1 runs/quickstart/metrics.jsonl | python -m json.tool

Numbers that are not finite are the strings `nan`, `inf` and `-inf`. `*` stands for a name that the run gives.
A mean is over all processes where the table does not say otherwise. TensorBoard and W&B get the same names (`sinks`).
"""
HARDWARE_INTRODUCTION = """\
## Hardware

`hardware` fills these keys where they are unset; `auto` looks at the devices, and takes as many chips as there are. The
table is `HARDWARE` in `agentr1_jax/train/defaults.py`. For Qwen2.5-0.5B in contexts of 2048 tokens a nightly test
compiles update and decoding for v5e-8 and v6e-8, and for Qwen2.5-3B for v5e-16. Nobody has run it on a TPU yet.
`policy.attention` is `splash_tree` (on GPUs `xla`) with `learner.packing=prefix_tree`. Sizes below are for contexts of
4096 tokens.
"""
BUDGET_OF_TABLE = {
    "budget": {"max_steps": 5, "response_tokens": 256, "observation_tokens": 512, "context_tokens": 4096}
}


@dataclasses.dataclass(frozen=True)
class Key:
    """A row of the reference.

    Attributes:
      name: dotted, e.g. `loss.clip`.
      kind: type and range, or choices.
      default: as Python writes it.
      meaning: a sentence.
    """

    name: str
    kind: str
    default: str
    meaning: str


def render_page() -> str:
    """Return the text of docs/config.md."""
    comments = read_comments(inspect.getsource(base))
    order = {key: i for i, key in enumerate(comments)}
    values = base.get_config().to_dict()
    sections = [name for name, value in values.items() if isinstance(value, dict)]
    top = {name: value for name, value in values.items() if name not in sections}
    parts = [INTRODUCTION]
    first_key = {name: min(i for key, i in order.items() if key.startswith(f"{name}.")) for name in sections}
    for section in ["", *sorted(sections, key=first_key.__getitem__)]:
        heading, about = f"`{section}`" if section else "The run", comments.get(section, "")
        keys = section_keys(section, values[section] if section else top, read_fields(CLASSES[section]), comments)
        table = render_table(sorted(keys, key=lambda key: order[key.name]))
        parts.append("\n\n".join(filter(None, [f"## {heading}", link_pages(about), table])))
    parts.append(render_hardware())
    parts.append(
        "## Tasks\n\nKeys of a task are in the section of its name; a config has those of its own tasks alone.\n"
    )
    for name in sorted(base.TASK_MODULES):
        cls = base.find_task(name).config
        if cls is not None:
            of_task = section_keys(f"task.{name}", to_section(cls), read_fields([cls]), {})
            parts.append(f"### `task.{name}`\n\n{render_table(of_task)}")
    return "\n".join(parts)


def follows(key: str) -> str:
    """Return what decides a key that is unset; empty for one that nothing but its default decides."""
    return "by hardware" if key in defaults.BY_HARDWARE else "derived" if key in defaults.DERIVED else ""


def render_hardware() -> str:
    """Return the section on what the hardware decides."""
    rows, names = [], list(defaults.HARDWARE)
    for name in names:
        values = dict(configs.flatten(defaults.complete({**BUDGET_OF_TABLE, "hardware": name})))
        rows.append({key: f"`{values[key]}`" for key in defaults.BY_HARDWARE})
    lines = [f"| key | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| `{key}` | {' | '.join(row[key] for row in rows)} |" for key in defaults.BY_HARDWARE]
    return f"{HARDWARE_INTRODUCTION}\n" + "\n".join(lines) + "\n"


def section_keys(section: str, values: Mapping[str, Any], fields: Fields, comments: Mapping[str, str]) -> Iterator[Key]:
    """Yield the keys of a section and of the sections below it.

    Args:
      section: dotted name; empty for the top of the config.
      values: key -> default.
      fields: key -> its annotation and meaning.
      comments: dotted key -> its comment in `configs/base.py`, which comes before the meaning of the field.
    """
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        hint, meaning = fields.get(name, (Any, ""))
        if key == "credit.args":
            yield from section_keys(key, value, scheme_arguments(), comments)
        elif dataclasses.is_dataclass(hint):
            yield from section_keys(key, value, read_fields([hint]), comments)
        else:
            meaning = re.sub(r"^\([^()]*\|[^()]*\)\s*", "", comments.get(key, "")) or meaning  # Without the choices.
            default = "none" if value is None else f"`{value!r}`"
            yield Key(key, describe_kind(hint), follows(key) or default, link_pages(as_sentence(meaning)))


def read_fields(classes: Iterable[Any]) -> Fields:
    """Return annotation and meaning of each field of dataclasses."""
    fields: Fields = {}
    for cls in classes:
        meanings = field_meanings(cls)
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            fields[name] = (hint, meanings.get(name, ""))
    return fields


def scheme_arguments() -> Fields:
    """Return the arguments of all credit schemes; one that differs between schemes takes what any of them takes."""
    fields: Fields = {}
    for scheme in SCHEMES.values():
        for field in dataclasses.fields(arguments_class(scheme.function)):
            before = fields.get(field.name, (field.type, ""))[0]
            fields[field.name] = (before if before == field.type else before | field.type, "")
    return fields


def read_comments(source: str) -> dict[str, str]:
    """Return the comment of each key and section of `configs/base.py`: dotted name -> text, in order."""
    lines = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    targets = {
        node.lineno: ast.unparse(node.targets[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
    }
    return {targets[line].removeprefix("c."): lines[line] for line in sorted(targets.keys() & lines.keys())}


def field_meanings(cls: type) -> dict[str, str]:
    """Return what a dataclass and those it inherits from say of each field: in `Attributes:`, or below the field."""
    found: dict[str, str] = {}
    for base_class in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base_class):
            continue
        _, _, attributes = (inspect.getdoc(base_class) or "").partition("Attributes:\n")
        for match in re.finditer(r"^  ([\w, ]+): (.*(?:\n    .*)*)", attributes, re.MULTILINE):
            found |= dict.fromkeys(match[1].split(", "), " ".join(match[2].split()))
        body = ast.parse(textwrap.dedent(inspect.getsource(base_class))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, below in zip(statements, statements[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return found


def describe_kind(hint: Any) -> str:
    """Return type and range, or choices, of an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return " ".join([describe_kind(arguments[0]), ", ".join(filter(None, map(_bound, arguments[1:])))]).strip()
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_kind(part) for part in arguments)
    if origin is tuple:
        return f"tuple of: {describe_kind(arguments[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return "keys and values"
    return "none" if hint is types.NoneType else NAMES.get(hint, str(hint))


def _bound(limit: Any) -> str:
    if limit == Lt(INT32):  # Of all integers; the introduction says it.
        return ""
    for cls, sign, attribute in BOUNDS:
        if isinstance(limit, cls):
            return f"{sign} {getattr(limit, attribute)}"
    return "not empty" if isinstance(limit, MinLen) else ""


def as_sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop."""
    if not text:
        return ""
    is_name = re.match(r"[\w, ]{1,16}: ", text)  # As in "dense: tokens of a text".
    return (text[0] if is_name else text[0].upper()) + text[1:] + ("" if text.endswith(".") else ".")


def link_pages(text: str) -> str:
    """Turn names of pages into links."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def render_table(keys: Iterable[Key]) -> str:
    """Return a Markdown table."""
    rows = [(f"`{key.name}`", key.kind, key.default, key.meaning) for key in keys]
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def render_metrics() -> str:
    """Return the text of docs/metrics.md."""
    parts = [METRICS_INTRODUCTION]
    for heading, listed in metrics.sections():
        rows = [
            (f"`{m.name}`", m.unit, m.meaning, f"`{m.condition}`" if "." in m.condition else m.condition)
            for m in listed
        ]
        lines = ["| metric | unit | meaning | only with |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
        parts.append(f"## {heading}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def show_keys(given: configs.Given, section: str, console: Console | None = None) -> None:
    """Print every key of a config, or of a section, with its value, its default, where it was set, and its meaning.

    Args:
      given: config of a command.
      section: dotted name of a section, or of a key; empty for all.
      console: where to print; None for the standard output.

    Raises:
      UserError: no key begins so.
    """
    task = {**given.config.task}
    names = base.task_names(task)
    before = dict(configs.flatten(base.get_config(*names).to_dict()))
    config = dict(configs.flatten(given.config.to_dict()))
    devices = jax.devices() if given.config.hardware == defaults.AUTO else None
    values = dict(configs.flatten(configs.resolve(complete(given.config, devices))))
    comments = read_comments(inspect.getsource(base))
    for name in names:
        cls = base.find_task(name).config
        if cls is not None:
            of_task = section_keys(f"task.{name}", to_section(cls), read_fields([cls]), {})
            comments |= {key.name: key.meaning for key in of_task}
    chosen = [key for key in config if not section or key == section or key.startswith(f"{section}.")]
    if not chosen:
        sections = dict.fromkeys(key.partition(".")[0] for key in config if "." in key)
        raise UserError(f"--keys={section}: no such section; choose one of {', '.join(sections)}")
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, file=console.file)
    table = Table("key", "value", "default", "set by", "meaning", title=f"Keys of {given.path}", title_justify="left")
    order = {key: i for i, key in enumerate(comments)}
    for key in sorted(chosen, key=lambda key: order.get(key, len(order))):
        if config[key] is None and values.get(key) is not None:
            set_by = "hardware" if key in defaults.BY_HARDWARE else "lengths"
        elif key in given.overrides:
            set_by = "command line"
        else:
            set_by = "default" if config[key] == before.get(key) else "config file"
        value, default = (_show(x) for x in (values.get(key), before.get(key)))
        row = (key, value, follows(key) or default, set_by, comments.get(key, ""))
        table.add_row(*map(escape, row), style="" if set_by == "default" else "bold")
    console.print(table)


def _show(value: Any) -> str:
    return "none" if value is None else repr(value) if isinstance(value, str) else str(value)


def main() -> None:
    """Write the pages."""
    PAGE.write_text(render_page(), encoding="utf-8")
    METRICS_PAGE.write_text(render_metrics(), encoding="utf-8")


if __name__ == "__main__":
    main()
