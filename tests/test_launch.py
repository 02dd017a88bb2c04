"""The shell scripts, on a copy of the project with a training script of a few lines and no requirements."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = os.path.join(sys.base_exec_prefix, "bin", f"python{MINOR}")
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
pathlib.Path("started." + index).touch()
while len(list(pathlib.Path().glob("started.*"))) < int(count):
    time.sleep(0.01)
if f"--fail={index}" in sys.argv:
    sys.exit(7)
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
    (root / "requirements.txt").write_text("")
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
    status, output = run(project, "local.sh", "2", "--config=x.py", variable="VENV_PYTHON")
    assert status == 0
    assert "[1] process 1 of 2 2" in output and "making" not in output
    assert not (project / ".venv").exists()


def test_local_starts_all_processes_and_prefixes_their_lines(project: pathlib.Path) -> None:
    status, output = run(project, "local.sh", "3", "--config=x.py")
    assert status == 0
    for k in range(3):
        own = [line for line in output.splitlines() if line.startswith(f"[{k}] ")]
        assert own == [f"[{k}] process {k} of 3 2", f"[{k}] arguments ['--config=x.py']", own[-1]]
        assert own[-1] == f"[{k}] last line without an end"


def test_local_ends_the_others_when_one_fails(project: pathlib.Path) -> None:
    begin = time.monotonic()
    status, output = run(project, "local.sh", "2", "--fail=1", "--wait")
    assert status == 7
    assert "[0] saved" in output
    assert time.monotonic() - begin < 30


def test_local_kills_who_does_not_leave(project: pathlib.Path) -> None:
    script = project / "launch" / "local.sh"
    script.write_text(script.read_text().replace("grace_seconds=10", "grace_seconds=1"))
    begin = time.monotonic()
    status, _ = run(project, "local.sh", "2", "--fail=0", "--wait", "--deaf")
    assert status == 7
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_local_passes_a_signal_on(project: pathlib.Path, number: signal.Signals, whole_group: bool) -> None:
    """To the script alone, as `kill` sends it, and to all of its processes, as a terminal does on Ctrl-C."""
    with start(project, "local.sh", "2", "--wait") as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        while len(list(project.glob("started.*"))) < 2:
            time.sleep(0.01)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "[0] saved" in output
    assert "[1] saved" in output


def test_local_wants_a_number(project: pathlib.Path) -> None:
    status, output = run(project, "local.sh", "--config=x.py")
    assert status == 2
    assert "usage" in output


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
    done.touch()
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
        assert status == 1 and output.startswith("stopped in ") and "the same command goes on" in output, stage
        assert log.read_text().splitlines()[-1] == stage
    monkeypatch.delenv("STOP")
    log.unlink()
    assert run(project, "multihop_small.sh", str(out)) == (0, "")
    names = ("warm_start", "grpo", "ppo_token", "ppo_step", "reinforce_pp")
    stages = [f"{kind} {name}" for name in names for kind in ("train", "evaluate")]
    assert log.read_text().splitlines() == [*stages, "table table.md"]
