"""Configs: what the command line and config files set, and how their mistakes are told."""

from __future__ import annotations

import errno
import json
import logging
import os
import pathlib
import subprocess
import sys

import ml_collections
import numpy as np
import pytest
from ml_collections import config_dict

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
            algo=dict(gamma=0.9, lam=placeholder(float), name=name),
        )
    )
    config.algo.lam = 0.5
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
from agentr1_jax.runtime.lock import lock_folder

CONFIG = config_lib.define_config_flag()
assert "jax" not in sys.modules

def main(argv):
    if CONFIG.value.algo.name == "mistake":
        raise UserError("main went wrong")
    if CONFIG.value.algo.name == "missing":
        open("no/such/file")
    if CONFIG.value.algo.name.startswith("at:"):
        lock_folder(CONFIG.value.algo.name.removeprefix("at:")).__enter__()
    if CONFIG.value.algo.name == "bug":
        raise RuntimeError("a bug")
    sys.stdout.write(json.dumps(config_lib.resolve(CONFIG.value)))

config_lib.run_main(main)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "configs").mkdir()
    (folder / "configs" / "base.py").write_text(BASE)
    (folder / "main.py").write_text(MAIN)
    return folder


def start(folder, *flags, program="main.py", **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, program, *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_overrides_reach_the_config(folder):
    flags = ["--config=configs/base.py:ppo", "--config.algo.gamma=1", "--config.data", "d", "--noconfig.evaluate"]
    result = start(folder, *flags, "--config.sizes=(3, 4)", "--config.algo.lam=0.25", "--config.algo.lam=none")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "seed": 0,
        "run_dir": "runs/x",
        "evaluate": False,
        "sizes": [3, 4],
        "data": "d",
        "algo": {"gamma": 1.0, "lam": None, "name": "ppo"},
    }
    # The last override counts; for text, none is a value, and None unsets.
    overrides = ["--config.algo.lam=none", "--config.algo.lam=0.25", "--config.data=none"]
    result = json.loads(start(folder, "--config=configs/base.py", *overrides).stdout)
    assert result["algo"]["lam"] == 0.25 and result["data"] == "none"
    overrides = ["--config.data=d", "--config.data=None", "--config.algo.lam=None", "--config", "configs/base.py"]
    result = json.loads(start(folder, *overrides).stdout)
    assert result["algo"]["lam"] is None and result["data"] is None


@pytest.mark.parametrize(("name", "status"), [("ppo", 0), ("mistake", 2), ("bug", 1)])
def test_threads_of_user_code_that_do_not_end_do_not_keep_a_program_from_its_end(folder, name, status):
    hangs = "import concurrent.futures, threading, time\n"
    hangs += "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 100)\n"
    hangs += "threading.Thread(target=time.sleep, args=(100,), name='mine').start()\n"
    (folder / "main_hangs.py").write_text(
        hangs + MAIN.replace("config_lib.run", "config_lib.EXIT_SECONDS = 0.3\nconfig_lib.run")
    )
    result = start(folder, f"--config=configs/base.py:{name}", program="main_hangs.py")
    assert result.returncode == status and "mine" in result.stderr
    assert status or json.loads(result.stdout)["algo"]["name"] == "ppo"


def test_a_section_is_set_by_one_call():
    values = {"name": "grpo", "args": {"lam": 0.9, "whiten": config_dict.placeholder(str)}}
    config = ml_collections.ConfigDict({"algo": values, "seed": 0}).lock()

    def change(text):
        return config_lib.override(config, {"algo": text, "seed": 1}, "here").to_dict()

    assert change("gae") == {"algo": {"name": "gae", "args": {"lam": 0.9, "whiten": None}}, "seed": 1}
    assert change("gae(lam=.5, whiten=none)")["algo"]["args"] == {"lam": 0.5, "whiten": "none"}
    assert change("gae(whiten='step')")["algo"]["args"] == {"lam": 0.9, "whiten": "step"}
    for text, message in (
        ("gae(lam=high)", "here: key 'algo.args.lam' takes a float, not 'high'"),
        ("gae(lamb=1)", "here: unknown key 'algo.args.lamb'; did you mean 'algo.args.lam'?"),
        ("gae(1)", r"here: algo=gae\(1\): name each argument, as in gae\(argument=value\)"),
        ("gae(lam", r"here: algo: cannot read 'gae\(lam'; write name, name\(value\)"),
    ):
        with pytest.raises(UserError, match=message):
            change(text)


def test_help_begins_with_how_to_set_and_list_keys(folder):
    said = start(folder, "--help").stdout.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["--config=FILE", "--config.a.b=value", "--keys[=section]"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.algoo.gamma=1", "configs/base.py: unknown key 'algoo.gamma'; did you mean 'algo.gamma'?"),
        ("--config.gamma=1", "configs/base.py: unknown key 'gamma'; did you mean 'algo.gamma'?"),
        ("--config.algo={'x': 1}", "configs/base.py: 'algo' is a section; set its keys one by one: "),
        ("--config.seed=1.5", "configs/base.py: key 'seed' takes an int, not '1.5'"),
        ("--config.run_dir=None", "configs/base.py: key 'run_dir' always has a value and cannot be unset"),
        ("--config.algo.gamma=none", "configs/base.py: key 'algo.gamma' takes a float, not 'none'"),
        ("--config.algo.name=mistake", "main went wrong"),
        ("--config.algo.name=missing", "no/such/file: no such file or folder"),
        ("--config.algo.name=at:/sys/run", "/sys/run: "),
        ("--config.algo.name=at:configs/base.py", "configs/base.py: File exists; choose another path"),
        ("--config.algo.name=at:configs/base.py/run", "configs/base.py/run: Not a directory; choose another path"),
        ("--sed=1", "Unknown command line flag 'sed'"),
        ("stray", "unexpected argument 'stray'"),
        ("https://a:secret@b", "unexpected argument 'https://***@b'"),
        ("--\x1b[2J=1", "Unknown command line flag '\ufffd[2J'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(folder, flag, message):
    result = start(folder, "--config=configs/base.py", flag)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"error: {message}")
    assert result.stdout == ""


def test_no_config_is_a_mistake(folder):
    result = start(folder)
    assert result.returncode == 2
    assert result.stderr.startswith("error: no config given")


def test_three_dots_stand_for_more_arguments():
    def parse(*argv, arguments):
        return config_lib.parse_flags(["main", *argv], arguments=arguments)[1:]

    assert parse("a", arguments=("RUN...",)) == ["a"]
    assert parse("a", "b", "c", arguments=("RUN", "[MORE...]")) == ["a", "b", "c"]
    with pytest.raises(UserError, match=r"RUN\.\.\. is missing; the command takes RUN\.\.\."):
        parse(arguments=("RUN...",))
    with pytest.raises(UserError, match="unexpected argument 'b'"):
        parse("a", "b", arguments=("RUN",))


@pytest.mark.parametrize("variables", [{}, {"AGENTR1_COORDINATOR": "127.0.0.1:1"}])
def test_a_bug_keeps_its_traceback(folder, variables):
    result = start(folder, "--config=configs/base.py", "--config.algo.name=bug", **variables)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "RuntimeError: a bug" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("config.algo.gama = 1.0", "line 9: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("config.update(dict(algo=dict(gama=1)))", "line 9: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("config.seed = config.algo.gama", "line 9: unknown key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("config.algo.gamma = 'high'", "line 9: key 'algo.gamma' takes a float, not another type"),
        ("config.seed = 1 / 0", "line 9: ZeroDivisionError: division by zero"),
        ("return 3", "get_config() returned a int; return an ml_collections.ConfigDict"),
    ],
)
def test_mistakes_in_a_config_file(folder, monkeypatch, change, message):
    monkeypatch.chdir(folder)
    pathlib.Path("configs/x.py").write_text(DERIVED.format(change=change))
    with pytest.raises(UserError) as caught:
        config_lib.load_config("configs/x.py")
    assert str(caught.value).replace("configs/x.py, ", "configs/x.py: ") == f"configs/x.py: {message}"


def test_a_config_is_locked_and_a_missing_one_is_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    pathlib.Path("open.py").write_text("import ml_collections\nget_config = ml_collections.ConfigDict")
    with pytest.raises(AttributeError):
        config_lib.load_config("open.py").anything = 1
    with pytest.raises(UserError, match=r"configs/bse\.py: no such config file; configs has base\.py"):
        config_lib.load_config("configs/bse.py")
    with pytest.raises(UserError, match="no such config file; there is no folder 'elsewhere' here"):
        config_lib.load_config("elsewhere/x.py")


def test_a_config_resolves_to_json():
    section = {"a": (1, [2.5, None]), "b": np.float32(0.5), "c": True, "d": {"e": "é"}}
    resolved = config_lib.resolve(ml_collections.ConfigDict({"algo": section}))
    assert resolved == {"algo": {"a": [1, [2.5, None]], "b": 0.5, "c": True, "d": {"e": "é"}}}
    assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
    for value in (float("nan"), {1, 2}, print):
        with pytest.raises(UserError, match=r"'algo\.x'"):
            config_lib.resolve(ml_collections.ConfigDict({"algo": {"x": value}}))


def message_of(error, monkeypatch, capsys):
    """What a program says on the end whose main raises an error."""

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.delenv("AGENTR1_COORDINATOR", raising=False)
    monkeypatch.setattr(config_lib.app, "run", fail)
    monkeypatch.setattr(logging.root.manager, "disable", 0)  # It turns logging off, and this process goes on.
    with pytest.raises(SystemExit) as left:
        config_lib.run_main(lambda argv: None)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("code", "said"), [("ENOSPC", "No space left on device"), ("EDQUOT", "quota")])
def test_a_full_disk_is_one_message(monkeypatch, capsys, code, said):
    number = getattr(errno, code)
    told = message_of(OSError(number, os.strerror(number), "runs/x/metrics.jsonl"), monkeypatch, capsys)
    assert said in told and "error: runs/x/metrics.jsonl: " in told and "checkpoint" in told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError("Unable to allocate 16.0 TiB for an array with shape (4, 1099511627776)"), "16.0 TiB"),
        (RuntimeError("INTERNAL: Error dispatching: Out of memory allocating 112589 bytes.\n..."), "112589 bytes"),
        (RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 15.75G hbm."), "20G of"),
    ],
)
def test_too_small_a_memory_is_one_message(monkeypatch, capsys, error, said):
    told = message_of(error, monkeypatch, capsys)
    assert told.startswith("error: memory is too small (") and said in told and "--dry_run" in told
    assert len(told.splitlines()) == 1
