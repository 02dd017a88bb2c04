"""Files of users: what they may import, what two of them share, and the config for a task of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentr1_jax import agents
from agentr1_jax.agents.context import RULES
from agentr1_jax.envs.registry import TASKS
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder
from experiments.setup import read_run, read_settings

ROOT = Path(__file__).parents[2]
RULE = """
from agentr1_jax.agents.context import join, register
{imports}
@register("{name}")
def rule(history):
    {inside}
    return join(history.opening, history.turns)
value = {value}
"""
TASK = """
from pydantic.dataclasses import dataclass
from agentr1_jax.envs.datasets import RowsTask
from agentr1_jax.envs.registry import register
from agentr1_jax.validation import STRICT, Count
from numbers_beside import MOST

@dataclass(frozen=True, config=STRICT)
class Config:
    most: Count = MOST

@register("mine", Config)
def make(config, run):
    return RowsTask("mine", {"train": [{"id": "0", "question": str(config.most)}]}, dict)
"""


pytestmark = pytest.mark.usefixtures("user_files")


def write(folder, file, *, name="rule_of_mine", imports="", inside="pass", value="None"):
    folder.mkdir(exist_ok=True)
    path = folder / file
    path.write_text(RULE.format(name=name, imports=imports, inside=inside, value=value))
    return str(path)


def test_a_neighbour_is_imported_at_once_and_within_a_function(tmp_path):
    (tmp_path / "beside_now.py").write_text("from beside_too import X")
    (tmp_path / "beside_too.py").write_text("X = 7")
    (tmp_path / "beside_later.py").write_text("Y = 8")
    inside = "import beside_later; return beside_later.Y"
    RULES.load(write(tmp_path, "with_neighbours.py", imports="import beside_now", inside=inside, value="beside_now.X"))
    module = sys.modules["with_neighbours"]
    assert module.value == 7 and module.rule(None) == 8
    assert sys.path[-1] == str(tmp_path)
    RULES.load(str(tmp_path / "with_neighbours.py"))
    assert sys.path.count(str(tmp_path)) == 1


def test_a_neighbour_hides_nothing_that_is_installed(tmp_path, caplog):
    for name in ("random", "configs", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    path = write(tmp_path, "random_rules.py", imports="import random, numpy\nfrom configs import base")
    RULES.load(path)
    assert sys.modules["random_rules"].random.random() < 1
    assert "imports 'random', which is" in caplog.text and f"not {tmp_path}/random.py" in caplog.text


@pytest.mark.parametrize("later", [False, True])
def test_neighbours_of_one_name_in_two_folders_do_not_mix(tmp_path, later):
    how = {"inside": "import helper; return helper.X"} if later else {"imports": "import helper", "value": "helper.X"}
    paths = []
    for folder in ("a", "b"):
        paths.append(write(tmp_path / folder, f"{folder}_rules.py", name=f"rule_{folder}", **how))
        (tmp_path / folder / "helper.py").write_text(f"X = {folder!r}")
    RULES.load(paths[0])
    message = r"b_rules\.py: ImportError: it imports 'helper', and both .*/b/helper\.py and .*/a/helper\.py have that"
    with pytest.raises(ValueError, match=message):
        RULES.load(paths[1])
    assert "rule_a" in RULES and "rule_b" not in RULES


def test_two_files_may_have_one_name_and_one_file_two_registries(tmp_path):
    for folder in ("a", "b"):
        RULES.load(write(tmp_path / folder, "mine.py", name=f"rule_{folder}", value=repr(folder)))
    assert {"rule_a", "rule_b"} <= set(RULES)
    path = Path(write(tmp_path / "c", "both.py", name="rule_c"))
    (tmp_path / "c" / "numbers_beside.py").write_text("MOST = 3")
    path.write_text(path.read_text() + TASK)
    for entries in (TASKS, RULES, TASKS):
        entries.load(str(path))
    assert "rule_c" in RULES and "mine" in TASKS


def test_what_a_neighbour_registers_outlives_another_load(tmp_path):
    write(tmp_path, "more_rules.py", name="rule_beside")
    path = write(tmp_path, "mine.py", imports="import more_rules")
    for _ in range(2):
        RULES.load(path)
        assert {"rule_of_mine", "rule_beside"} <= set(RULES)


def test_a_module_of_ours_that_a_file_is_the_first_to_import_outlives_another_load(tmp_path, monkeypatch):
    module = "agentr1_jax.agents.rule_of_ours"
    write(tmp_path / "ours", "rule_of_ours.py", name="rule_of_ours")
    monkeypatch.setattr("agentr1_jax.agents.__path__", [*agents.__path__, str(tmp_path / "ours")])
    path = write(tmp_path / "users", "mine.py", name="rule_of_a_user", imports=f"import {module}")
    for _ in range(2):
        RULES.load(path)
        assert {"rule_of_a_user", "rule_of_ours"} <= set(RULES)


@pytest.fixture
def task_file(tmp_path):
    (tmp_path / "numbers_beside.py").write_text("MOST = 3")
    (tmp_path / "my_tasks.py").write_text(TASK)
    return tmp_path / "my_tasks.py"


@pytest.mark.parametrize("name", [":mine", ""])
def test_a_blank_config_has_the_keys_of_ones_own_task(task_file, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    config = configs.load_config(f"{ROOT}/configs/blank.py:{task_file}{name}")
    assert config.task.name == "mine" and config.task.args.most == 3 and config.run_dir == "runs/mine"
    config.policy.preset, config.task.args.most, config.run_dir = "tiny", 5, str(tmp_path / "run")
    assert read_settings(config).task.sections["mine"].most == 5
    # A run of it is read again: evaluate, ask and export start from its config.json.
    RunFolder(str(tmp_path / "run")).write_config(configs.resolve(config))
    assert read_settings(read_run(str(tmp_path / "run"))).task.sections["mine"].most == 5


def test_mistakes_in_the_name_of_ones_own_task(task_file):
    for argument, message in (
        ("", "name your task behind the config"),
        (f":{task_file}:other", "my_tasks.py:other: no such task; .* the file registers mine"),
        (":nowhere.py:x", "nowhere.py: no such file"),
        (":hopwrld", "unknown task 'hopwrld'; choose one of"),
    ):
        with pytest.raises(UserError, match=message):
            configs.load_config(f"{ROOT}/configs/blank.py{argument}")
    assert configs.load_config(f"{ROOT}/configs/blank.py:countdown").task.name == "countdown"


def test_keys_of_ones_own_task_are_set_on_the_command_line(task_file):
    config = configs.load_config(f"{ROOT}/configs/blank.py:{task_file}:mine")
    changed = configs.override(config, {"task.args.most": "0", "policy.preset": "tiny"}, "the command line")
    with pytest.raises(UserError, match="task.args.most is 0; it must be greater than or equal to 1"):
        read_settings(changed)
