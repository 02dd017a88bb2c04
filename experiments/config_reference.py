"""Write docs/config.md: every config key with its type and range, its default and its meaning.

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

from annotated_types import Ge, Gt, Le, Lt, MinLen

from agentr1_jax.credit.scheme import SCHEMES, CreditConfig, arguments_class
from agentr1_jax.policy.config import PolicyConfig
from agentr1_jax.train.settings import ROLLOUT, SECTIONS, RunConfig, TaskConfig
from agentr1_jax.validation import to_section
from configs import base

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
`--config.KEY=None` unsets a key whose default is none, and `--config.credit='gigpo(gamma=.95)'` sets `credit.name` and
`credit.args` at once. With another `credit.name`, arguments of the config's scheme that the new one lacks are left out,
and another `task.name` brings its own section with its defaults; the log says so. A config file starts from `base.get_config("task")` and is
locked: a key that does not exist is an error that names the nearest one. A value of another type or out of range is
refused at the start, and so are values that do not fit each other.
"""


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
    parts.append(
        "## Tasks\n\nKeys of a task are in the section of its name; a config has those of its own tasks alone.\n"
    )
    for name in sorted(base.TASK_MODULES):
        cls = base.find_task(name).config
        if cls is not None:
            of_task = section_keys(f"task.{name}", to_section(cls), read_fields([cls]), {})
            parts.append(f"### `task.{name}`\n\n{render_table(of_task)}")
    return "\n".join(parts)


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
            yield Key(key, describe_kind(hint), default, link_pages(as_sentence(meaning)))


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


def main() -> None:
    """Write the page."""
    PAGE.write_text(render_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
