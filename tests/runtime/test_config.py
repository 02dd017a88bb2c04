import errno
import json
import logging
import os
import pathlib
import subprocess
import sys

import ml_collections
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

def get_config(name="grpo"):
    config = ConfigDict(
        dict(
            seed=0,
            run_dir="runs/x",
            evaluate=True,
            sizes=(1, 2),
            data=placeholder(str),
            algo=dict(gamma=0.9, lam=1.0, name=name),
        )
    )
    return config.lock()
"""
DERIVED = """
import importlib.util

def get_config():
    spec = importlib.util.spec_from_file_location("base", "configs/base.py")
    base = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(base)
    config = base.get_config()
    {change}
    return config
"""
MAIN = """
import json, sys
from agentr1_jax.runtime import config as config_lib
from agentr1_jax.errors import UserError

CONFIG = config_lib.define_config_flag()
assert "jax" not in sys.modules

def main(argv):
    if CONFIG.value.algo.name == "mistake":
        raise UserError("main went wrong")
    if CONFIG.value.algo.name == "missing":
        open("no/such/file")
    if CONFIG.value.algo.name == "bug":
        raise RuntimeError("a bug")
    sys.stdout.write(json.dumps(config_lib.resolve(CONFIG.value)))

config_lib.run_main(main)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.py").write_text(BASE)
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path


def start(folder: pathlib.Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "main.py", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_overrides_reach_the_config(folder: pathlib.Path) -> None:
    flags = ["--config=configs/base.py:ppo", "--config.algo.gamma=1", "--config.data", "d", "--noconfig.evaluate"]
    result = start(folder, *flags, "--config.sizes=(3, 4)")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "seed": 0,
        "run_dir": "runs/x",
        "evaluate": False,
        "sizes": [3, 4],
        "data": "d",
        "algo": {"gamma": 1.0, "lam": 1.0, "name": "ppo"},
    }


def test_none_unsets_numbers_that_have_no_value_in_the_base_config(folder: pathlib.Path) -> None:
    (folder / "configs" / "x.py").write_text(
        BASE.replace("lam=1.0", "lam=placeholder(float)").replace("return", "config.algo.lam = 0.5\n    return")
    )

    def resolved(*overrides: str) -> dict[str, object]:
        result = start(folder, "--config=configs/x.py", *(f"--config.{override}" for override in overrides))
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    unset = resolved("algo.lam=none", "data=none")
    assert unset["algo"]["lam"] is None and unset["data"] == "none"
    assert resolved("algo.lam=none", "algo.lam=0.25")["algo"]["lam"] == 0.25
    assert resolved("algo.lam=0.25", "algo.lam=none")["algo"]["lam"] is None
    result = start(folder, "--config=configs/x.py", "--config.algo.gamma=none")
    assert result.returncode == 2 and "'algo.gamma' takes a float, not 'none'" in result.stderr


def test_help_begins_with_how_to_set_keys(folder: pathlib.Path) -> None:
    first = start(folder, "--help").stdout.splitlines()[0]
    assert "--config=FILE --config.a.b=value" in first and "docs/config.md list every key" in first


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.algo.gama=1"], "configs/base.py: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        (["--config.algoo.gamma=1"], "configs/base.py: unknown key 'algoo.gamma'; did you mean 'algo.gamma'?"),
        (["--config.gamma", "1"], "configs/base.py: unknown key 'gamma'; did you mean 'algo.gamma'?"),
        (["--config.zzzz=1"], "configs/base.py: unknown key 'zzzz'; configs/base.py lists the keys"),
        (["--config.algo={'x': 1}"], "configs/base.py: 'algo' is a section; set its keys one by one: "),
        (["--config.seed=1.5"], "configs/base.py: key 'seed' takes an int, not '1.5'"),
        (["--config.algo.lam=a b"], "configs/base.py: key 'algo.lam' takes a float, not 'a b'"),
        (["--config.evaluate=maybe"], "configs/base.py: key 'evaluate' takes a bool, not 'maybe'"),
        (["--config.algo.name=mistake"], "main went wrong"),
        (["--config.algo.name=missing"], "no/such/file: no such file or folder"),
        (["--sed=1"], "Unknown command line flag 'sed'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config=configs/bse.py"], "configs/bse.py: no such config file; configs has base.py"),
        (["--config=elsewhere/x.py"], "elsewhere/x.py: no such config file; there is no folder 'elsewhere' here"),
    ],
)
def test_mistakes_are_one_line_and_status_2(folder: pathlib.Path, flags: list[str], message: str) -> None:
    result = start(folder, "--config=configs/base.py", *flags)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"error: {message}")
    assert result.stdout == ""


def test_no_config_is_a_mistake(folder: pathlib.Path) -> None:
    result = start(folder)
    assert result.returncode == 2
    assert result.stderr.startswith("error: no config given")


def test_three_dots_stand_for_more_arguments() -> None:
    def parsed(*argv: str, arguments: tuple[str, ...]) -> list[str]:
        return config_lib.parse_flags(["main", *argv], arguments=arguments)[1:]

    assert parsed("a", arguments=("RUN...",)) == ["a"]
    assert parsed("a", "b", "c", arguments=("RUN", "[MORE...]")) == ["a", "b", "c"]
    with pytest.raises(UserError, match=r"RUN\.\.\. is missing; the command takes RUN\.\.\."):
        parsed(arguments=("RUN...",))
    with pytest.raises(UserError, match="unexpected argument 'b'"):
        parsed("a", "b", arguments=("RUN",))


def test_a_bug_keeps_its_traceback(folder: pathlib.Path) -> None:
    flags = ["--config=configs/base.py", "--config.algo.name=bug"]
    for variables in ({}, {"AGENTR1_COORDINATOR": "127.0.0.1:1"}):
        result = start(folder, *flags, **variables)
        assert result.returncode == 1
        assert "Traceback" in result.stderr
        assert "RuntimeError: a bug" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("config.algo.gama = 1.0", "line 9: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("config.sed = 1", "line 9: unknown key 'sed'; did you mean 'seed'?"),
        ("config.update(dict(algo=dict(gama=1)))", "line 9: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("config.seed = config.algo.gama", "line 9: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("config.algo.gamma = 'high'", "line 9: key 'algo.gamma' takes a float, not another type"),
        ("config.seed = 1 / 0", "line 9: ZeroDivisionError: division by zero"),
        ("return 3", "get_config() returned a int; return an ml_collections.ConfigDict"),
    ],
)
def test_mistakes_in_a_config_file(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    pathlib.Path("configs/x.py").write_text(DERIVED.format(change=change))
    with pytest.raises(UserError) as caught:
        config_lib.load_config("configs/x.py")
    assert str(caught.value).replace("configs/x.py, ", "configs/x.py: ") == f"configs/x.py: {message}"


def test_a_loaded_config_is_locked(folder: pathlib.Path) -> None:
    (folder / "open.py").write_text(
        "import ml_collections\n\ndef get_config():\n    return ml_collections.ConfigDict()"
    )
    with pytest.raises(AttributeError):
        config_lib.load_config(str(folder / "open.py")).anything = 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3),
    max_leaves=5,
)
configs = st.dictionaries(
    st.sampled_from(["seed", "lr", "name"]), values | st.dictionaries(st.sampled_from(["a", "b"]), values)
)


@given(configs)
def test_resolved_configs_are_json(fields: dict[str, object]) -> None:
    resolved = config_lib.resolve(ml_collections.ConfigDict(fields))
    assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved == fields


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, print])
def test_resolve_names_a_key_that_is_not_json(value: object) -> None:
    with pytest.raises(UserError, match=r"'algo\.x'"):
        config_lib.resolve(ml_collections.ConfigDict({"algo": {"x": value}}))


@pytest.mark.parametrize(("code", "said"), [("ENOSPC", "No space left on device"), ("EDQUOT", "quota")])
def test_a_full_disk_is_one_message(monkeypatch, capsys, code: str, said: str) -> None:
    number = getattr(errno, code)

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number), "runs/x/metrics.jsonl")

    monkeypatch.delenv("AGENTR1_COORDINATOR", raising=False)
    monkeypatch.setattr(config_lib.app, "run", full)
    monkeypatch.setattr(logging.root.manager, "disable", 0)  # It turns logging off, and this process goes on.
    with pytest.raises(SystemExit) as left:
        config_lib.run_main(lambda argv: None)
    told = capsys.readouterr().err
    assert left.value.code == 2 and said in told and "error: runs/x/metrics.jsonl: " in told and "checkpoint" in told
