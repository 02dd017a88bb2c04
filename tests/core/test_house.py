"""Rules of the house: layers, one reader of the config, short parameter lists, names in the field's words."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentr1_jax.train.metrics import METRICS

ROOT = Path(__file__).parents[2]
ORDER = "runtime text tools envs tasks agents policy rollout credit learner report train notebook contrib".split()
"""Packages in the order in which they may import each other; the other modules at the top of agentr1_jax come first."""
READERS = {"agentr1_jax/runtime/config.py", "experiments/setup.py"}
MOST_PARAMETERS = 8
NOT_PARTICIPLES = set("embed exceed feed need proceed seed shed speed succeed".split())
IRREGULAR = set(
    "begun bought brought built caught chosen dealt done drawn driven fed found given gone held hidden kept known "
    "laid learnt led lost made met paid seen sent shown sold spent stolen taken taught thought thrown told worn "
    "written".split()
)
LEFT_OUT = {
    "": "capped circle dealt dialect dull inherited journal kept meter moments parked parking refill refills scored "
    "seat seats shortened team teams ticket tickets visits",
    "agentr1_jax/rollout/": "line lines moves stages",
    "agentr1_jax/learner/": "node nodes reads src streams",
    "agentr1_jax/credit/": "classes deviations streams",
}
"""Folder -> words that its names do not use; names of BFCL's functions are given."""
METRIC_READERS = (
    "agentr1_jax/report/",
    "agentr1_jax/runtime/",
    "agentr1_jax/train/",
    "experiments/ablat",
    "experiments/credit",
    "experiments/kill_test",
    "experiments/train",
)
"""Beginnings of the paths of code that reads or writes metrics of a run."""
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("agentr1_jax", "configs", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its file and line."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.lineno} {node.name}", node


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(tree: ast.Module) -> Iterator[str]:
    """Names that a file defines: classes, functions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def literals(tree: ast.Module) -> Iterator[str]:
    """Texts in a file, with `*` for what is formatted into them."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def split_words(name: str) -> list[str]:
    """Words of an identifier in snake or camel case, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)]


def is_participle(name: str) -> bool:
    """Whether the last word of a function's or file's name is a participle; `is_closed` and `has_ended` ask."""
    *_, last = words = split_words(name) or [""]
    return words[0] not in ("has", "is", "was") and (
        last in IRREGULAR or (last.endswith("ed") and len(last) > 3 and last not in NOT_PARTICIPLES)
    )


def rank(module: str) -> int:
    """Place of a module `agentr1_jax.a.b` in the order; 0 for those at the top."""
    package = (module.split(".") + [""])[1]
    return ORDER.index(package) + 1 if package in ORDER else 0


def test_packages_import_only_those_above_them() -> None:
    wrong = []
    for path, tree in TREES.items():
        if path.startswith("agentr1_jax/") and path != "agentr1_jax/__init__.py":
            own = rank(path.removesuffix(".py").replace("/", "."))
            wrong += [f"{path}: {m}" for m in imports(tree) if m.split(".")[0] in ("configs", "experiments", "tests")]
            wrong += [f"{path}: {m}" for m in imports(tree) if m.startswith("agentr1_jax.") and rank(m) > own]
    assert wrong == []


def test_one_reader_of_the_config() -> None:
    readers = {path for path, tree in TREES.items() if any(m.startswith("ml_collections") for m in imports(tree))}
    assert {path for path in readers if not path.startswith("configs/")} <= READERS


def test_parameter_lists_are_short() -> None:
    long = []
    for where, node in functions():
        a = node.args
        parameters = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
        if len(parameters) > MOST_PARAMETERS:
            long.append(f"{where}: {len(parameters)}")
    assert long == []


def test_functions_and_files_are_named_by_nouns_or_verbs() -> None:
    assert [where for where, node in functions() if is_participle(node.name) and "/bfcl/" not in where] == []
    assert [path for path in TREES if is_participle(Path(path).stem) and not path.startswith("configs/")] == []


@pytest.mark.parametrize("folder", LEFT_OUT)
def test_left_out_words(folder: str) -> None:
    words = set(LEFT_OUT[folder].split())
    found = {
        f"{path}: {name}"
        for path, tree in TREES.items()
        if path.startswith(folder) and not path.startswith("agentr1_jax/contrib/bfcl/")
        for name in (*names(tree), Path(path).stem)
        if words & set(split_words(name))
    }
    assert found == set()


def test_metrics_that_are_read_are_among_those_that_are_written() -> None:
    """Every text of the form `rollout/...` in code is a metric of the table, or the beginning of one."""
    sections = {name.partition("/")[0] for name in METRICS if "/" in name}
    named = re.compile(rf"({'|'.join(sections)})/[\w/*]*")
    reading = {path: tree for path, tree in TREES.items() if path.startswith(METRIC_READERS)}
    texts = {(path, text) for path, tree in reading.items() for text in literals(tree) if named.fullmatch(text)}
    assert {("agentr1_jax/report/curves.py", "rollout/em"), ("experiments/train.py", "rollout/em")} <= texts
    unknown = {
        f"{path}: {text}"
        for path, text in texts
        if not any(fnmatch.fnmatchcase(text, m) or fnmatch.fnmatchcase(m, f"{text}*") for m in METRICS)
    }
    assert unknown == set()
