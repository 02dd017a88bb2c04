"""The shell scripts, on a copy of the project with a training script of a few lines and no requirements."""

import ast
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from clusters import PYTHON

from agentr1_jax.registry import parse_call

ROOT = pathlib.Path(__file__).resolve().parents[2]
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
TRAIN = """
import os, pathlib, signal, sys, time
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("saved")
    sys.exit(0)

index, count = os.environ.get("AGENTR1_PROCESS_ID", "0"), os.environ.get("AGENTR1_NUM_PROCESSES", "1")
signal.signal(signal.SIGTERM, signal.SIG_IGN if "--deaf" in sys.argv else leave)
print("process", index, "of", count, os.environ.get("AGENTR1_CPU_DEVICES"))
print("arguments", sys.argv[1:])
attempt = len(list(pathlib.Path().glob(f"attempt.*.{index}")))
pathlib.Path(f"attempt.{attempt}.{index}").write_text(os.environ.get("AGENTR1_COORDINATOR", ""))
while len(list(pathlib.Path().glob(f"attempt.{attempt}.*"))) < int(count):
    time.sleep(0.01)
for word in sys.argv:
    if word.startswith(f"--fail={index},"):  # --fail=PROCESS,STATUS or -SIGNAL,TIMES
        _, status, times = word.split(",")
        if attempt < int(times):
            if int(status) < 0:
                os.kill(os.getpid(), -int(status))
            sys.exit(int(status))
if "--wait" in sys.argv:
    time.sleep(60)
sys.stdout.write("last line without an end")
"""


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    """A project with a space in its path, whose environment is ready: the bare interpreter, no requirements."""
    root = tmp_path / "a project"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "experiments").mkdir()
    (root / "experiments" / "train.py").write_text(TRAIN)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (root / name).write_text("")
    venv = root / ".venv" / MINOR
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(PYTHON)
    (venv / "requirements.installed").write_text("")
    return root


def start(
    project: pathlib.Path, script: str, *arguments: str, python: str = PYTHON, variable: str = "PYTHON"
) -> subprocess.Popen[str]:
    unset = [name for name in os.environ if name.startswith("AGENTR1_") or name == "VENV_PYTHON"]
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.Popen(
        ["bash", str(project / "launch" / script), *arguments],
        cwd=project.parent,
        env=environment | {variable: python},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(
    project: pathlib.Path, script: str, *arguments: str, python: str = PYTHON, variable: str = "PYTHON"
) -> tuple[int, str]:
    with start(project, script, *arguments, python=python, variable=variable) as process:
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


def executable(path: pathlib.Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_quickstart_passes_its_flags_on(project: pathlib.Path) -> None:
    status, output = run(project, "quickstart.sh", "--config.run_dir=with a space")
    assert status == 0
    assert "arguments ['--config=configs/quickstart.py', '--config.run_dir=with a space']" in output
    assert "making" not in output


def test_an_interrupted_install_is_taken_up_again(project: pathlib.Path) -> None:
    venv = project / ".venv" / MINOR
    (venv / "requirements.installed").unlink()
    (venv / "bin" / "python").unlink()
    executable(venv / "bin" / "python", '#!/bin/sh\ncase "$*" in *install*) exit 1;; esac\n')
    status, output = run(project, "quickstart.sh")
    assert (status, (venv / "requirements.installed").exists()) == (2, False)
    assert "could not install requirements.txt" in output

    executable(venv / "bin" / "python", f'#!/bin/sh\ncase "$*" in *install*) exit 0;; esac\nexec "{PYTHON}" "$@"\n')
    status, output = run(project, "quickstart.sh")
    assert (status, (venv / "requirements.installed").exists()) == (0, True)
    assert f"making .venv/{MINOR}" in output


def test_tests_add_their_requirements_to_the_same_environment(project: pathlib.Path) -> None:
    """And a run leaves them there."""
    venv = project / ".venv" / MINOR
    (venv / "bin" / "python").unlink()
    cases = 'case "$*" in *install*) echo "$@"; exit;; *pytest*) echo tests; exit;; esac'
    executable(venv / "bin" / "python", f'#!/bin/sh\n{cases}\nexec "{PYTHON}" "$@"\n')
    status, output = run(project, "test.sh")
    assert status == 0 and "-r requirements-dev.txt" in output and output.endswith("tests\n")
    assert (venv / "requirements-dev.installed").exists()
    for script in ("test.sh", "quickstart.sh"):
        assert "making" not in run(project, script)[1]
    (project / "requirements-dev.txt").write_text("pytest\n")
    assert "making" not in run(project, "quickstart.sh")[1] and "making" in run(project, "test.sh")[1]


def test_changed_requirements_are_installed(project: pathlib.Path) -> None:
    (project / "requirements.txt").write_text("./nowhere\n")
    status, output = run(project, "quickstart.sh")
    assert status == 2
    assert "could not install requirements.txt" in output
    assert not (project / ".venv" / MINOR / "requirements.installed").exists()


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ('#!/bin/sh\ncase "$2" in *print*) echo 3.8;; *) exit 1;; esac\n', "is Python 3.8; 3.11 or newer is needed"),
        ("#!/bin/sh\nexit 127\n", "does not run; set PYTHON="),
        (f'#!/bin/sh\ncase "$2" in *venv*) exit 1;; *) exec "{PYTHON}" "$@";; esac\n', "has no venv module"),
    ],
)
def test_an_unfit_python_is_named(project: pathlib.Path, python: str, message: str) -> None:
    shutil.rmtree(project / ".venv")
    status, output = run(project, "quickstart.sh", python=executable(project / "python", python))
    assert status == 2
    assert message in output
    assert output.splitlines()[-1].startswith(f"error: {project / 'python'} ")


@pytest.mark.parametrize("variable", ["PYTHON", "VENV_PYTHON"])
def test_a_missing_python_is_named(project: pathlib.Path, variable: str) -> None:
    status, output = run(project, "quickstart.sh", python="no-such-python", variable=variable)
    assert status == 2
    assert output == f"error: no no-such-python found; set {variable}=/path/to/python3 (3.11 or newer)\n"


def test_an_environment_of_ones_own_is_used_as_it_is(project: pathlib.Path) -> None:
    shutil.rmtree(project / ".venv")
    status, output = run(project, "local.sh", "--processes=2", "--config=x.py", variable="VENV_PYTHON")
    assert status == 0
    assert "[1] process 1 of 2 2" in output and "making" not in output
    assert not (project / ".venv").exists()


def test_local_starts_all_processes_and_prefixes_their_lines(project: pathlib.Path) -> None:
    status, output = run(project, "local.sh", "--processes=3", "--config=x.py")
    assert status == 0
    for k in range(3):
        own = [line for line in output.splitlines() if line.startswith(f"[{k}] ")]
        assert own == [f"[{k}] process {k} of 3 2", f"[{k}] arguments ['--config=x.py']", own[-1]]
        assert own[-1] == f"[{k}] last line without an end"


def test_local_ends_the_others_when_one_fails(project: pathlib.Path) -> None:
    status, output = run(project, "local.sh", "--processes=2", "--config=x.py", "--fail=1,7,1", "--wait")
    assert status == 7
    assert "[0] saved" in output
    assert "restart" not in output


def test_local_kills_who_does_not_leave(project: pathlib.Path) -> None:
    script = project / "launch" / "local.sh"
    script.write_text(script.read_text().replace("grace_seconds=10", "grace_seconds=1"))
    status, output = run(project, "local.sh", "--processes=2", "--config=x.py", "--fail=0,7,1", "--wait", "--deaf")
    assert status == 7
    assert "saved" not in output and "last line" not in output


def test_local_starts_all_again_after_a_failure(project: pathlib.Path) -> None:
    """With another port each time; a process that is ended by a signal is named with it."""
    flags = ("--config=x.py", "--fail=1,7,1", "--fail=0,-9,2")
    status, output = run(project, "local.sh", "--processes=2", "--restarts=2", *flags)
    said = [line for line in output.splitlines() if line.startswith("launch:")]
    assert said[1:] == ["launch: process 0 was ended by SIGKILL; restart 2 of 2"]
    assert said[0] in (
        "launch: process 0 was ended by SIGKILL; restart 1 of 2",
        "launch: process 1 failed with status 7; restart 1 of 2",
    )
    assert status == 0
    attempts = [{(project / f"attempt.{attempt}.{k}").read_text() for k in range(2)} for attempt in range(3)]
    assert all(len(ports) == 1 for ports in attempts)
    assert len(set.union(*attempts)) == 3


def test_local_gives_up_when_restarts_are_used_up(project: pathlib.Path) -> None:
    status, output = run(
        project, "local.sh", "--restarts=1", "--processes=2", "--config=x.py", "--fail=1,7,9", "--wait"
    )
    assert status == 7
    assert output.count("launch: process 1 failed with status 7; restart 1 of 1") == output.count("launch:") == 1


def test_local_does_not_repeat_a_mistake(project: pathlib.Path) -> None:
    status, output = run(
        project, "local.sh", "--processes=2", "--restarts=3", "--config=x.py", "--fail=1,2,9", "--wait"
    )
    assert status == 2
    assert "launch:" not in output and output.count("arguments") == 2


def test_local_dry_run_prints_the_commands_and_makes_nothing(project: pathlib.Path) -> None:
    shutil.rmtree(project / ".venv")
    flags = ("--cpu_devices=3", "--config=x.py", "--config.note=it's")
    status, output = run(project, "local.sh", "--dry_run", "--processes=2", *flags)
    assert status == 0 and not (project / ".venv").exists()
    python = str(project / ".venv" / MINOR / "bin" / "python")
    lines = output.splitlines()
    assert len(lines) == 2
    for k, line in enumerate(lines):
        assert shlex.split(line) == [
            *("env", "AGENTR1_COORDINATOR=127.0.0.1:PORT", "AGENTR1_NUM_PROCESSES=2", f"AGENTR1_PROCESS_ID={k}"),
            *("AGENTR1_CPU_DEVICES=3", "PYTHONUNBUFFERED=1", python, "-m", "experiments.train"),
            *("--config=x.py", "--config.note=it's"),
        ]


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_local_passes_a_signal_on(project: pathlib.Path, number: signal.Signals, whole_group: bool) -> None:
    """To the script alone, as `kill` sends it, and to all of its processes, as a terminal does on Ctrl-C."""
    with start(project, "local.sh", "--processes=2", "--restarts=3", "--config=x.py", "--wait") as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        while len(list(project.glob("attempt.0.*"))) < 2:
            time.sleep(0.01)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "[0] saved" in output
    assert "[1] saved" in output
    assert "launch:" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=x.py"], "--processes is missing"),
        (["--processes=2"], "--config=FILE is missing"),
        (["--processes=0", "--config=x.py"], "--processes is '0'; it must be a whole number from 1"),
        (["--processes=two", "--config=x.py"], "--processes is 'two'"),
        (["2", "--config=x.py"], "unknown flag '2'"),
        (["--processes=2", "--cpu_devices=", "--config=x.py"], "--cpu_devices is ''"),
        (["--processes=2", "--restarts=-1", "--config=x.py"], "--restarts is '-1'; it must be a whole number from 0"),
        (["--processes=2", "--seed=1", "--config=x.py"], "unknown flag '--seed=1'; flags of the program come after"),
        (["--processes=2", "--data=gs://b/d", "--config=x.py"], "--data=gs://b/d: copy it to this machine"),
        (
            ["--processes=2", "--data=here", "--config=x.py"],
            "--data=here: it must be gs://BUCKET/FOLDER, or a folder /",
        ),
        (["--processes=2", "--secret=NOT_SET", "--config=x.py"], "--secret=NOT_SET: the environment here has no such"),
    ],
)
def test_local_names_bad_flags(project: pathlib.Path, arguments: list[str], message: str) -> None:
    status, output = run(project, "local.sh", *arguments)
    assert status == 2
    assert output.startswith(f"error: {message}") and output.count("\n") == 1


@pytest.mark.slow
def test_an_environment_is_made_and_reused(project: pathlib.Path) -> None:
    shutil.rmtree(project / ".venv")
    status, output = run(project, "quickstart.sh")
    assert status == 0
    assert f"making .venv/{MINOR}" in output
    status, output = run(project, "quickstart.sh")
    assert status == 0
    assert "making" not in output

    (project / ".venv" / MINOR / "bin" / "python").unlink()
    status, output = run(project, "quickstart.sh")
    assert status == 0
    assert f"making .venv/{MINOR}" in output


STAGE = """
import json, os, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
kind = pathlib.Path(__file__).stem
run = pathlib.Path(flags.get("config.run_dir") or flags.get("checkpoint") or flags["out"])
with open(os.environ["LOG"], "a") as log:
    log.write(f"{kind} {run.name}\\n")
done = {"train": run / "summary.json", "evaluate": run / "evaluation" / "evaluation.json", "table": run}[kind]
done.parent.mkdir(parents=True, exist_ok=True)
if kind == "evaluate":
    (done.parent / "request.json").touch()
if os.environ.get("STOP") != f"{kind} {run.name}":
    done.write_text('{"seconds": 9.5}')
if mixture := flags.get("config.task.multihop.mixture"):
    (run / "mixture").write_text(mixture)
if kind == "train" and run.name == "more_imitation":
    assert flags["config.warm_start.control_seconds"] == "9.5" and flags["config.warm_start.init_from"]
"""


def test_a_stopped_stage_of_the_small_result_starts_no_other(project: pathlib.Path, monkeypatch) -> None:
    """Neither does a stopped evaluation whose folder holds the figures of an earlier one."""
    for name in ("train.py", "evaluate.py", "evaluation/table.py"):
        (project / "experiments" / name).parent.mkdir(exist_ok=True)
        (project / "experiments" / name).write_text(STAGE)
    out, log = project / "out", project / "log"
    monkeypatch.setenv("LOG", str(log))
    earlier = out / "warm_start" / "evaluation" / "evaluation.json"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    os.utime(earlier, (1, 1))
    for stage in ("train warm_start", "evaluate warm_start", "train ppo_token", "evaluate reinforce_pp"):
        monkeypatch.setenv("STOP", stage)
        status, output = run(project, "multihop_small.sh", str(out))
        assert status == 1 and output.startswith("stopped in ") and "the same command resumes it" in output, stage
        assert log.read_text().splitlines()[-1] == stage
    monkeypatch.delenv("STOP")
    log.unlink()
    assert run(project, "multihop_small.sh", str(out)) == (0, "")
    names = ("warm_start", "grpo", "ppo_token", "ppo_step", "reinforce_pp", "gigpo", "more_imitation")
    stages = [f"{kind} {name}" for name in names for kind in ("train", "evaluate")]
    assert log.read_text().splitlines() == [*stages, "table table.md"]
    mixture = ast.literal_eval((out / "grpo" / "mixture").read_text())
    assert [parse_call(text, "mixture").name for text in mixture] == ["hotpotqa", "2wikimultihopqa"]

    monkeypatch.setenv("ALGORITHMS", "ppo_step")
    log.unlink()
    assert run(project, "multihop_small.sh", str(project / "other")) == (0, "")
    begun = [line for line in log.read_text().splitlines() if line.startswith("train")]
    assert begun == ["train warm_start", "train ppo_step", "train more_imitation"]
