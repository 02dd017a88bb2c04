"""launch/tpu_vm.sh, launch/slurm.sh and launch/worker.sh with stand-ins for gcloud and Slurm's programs."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
from clusters import CONFIG, ROOT, bare_path, make_project, play_path, read_calls, read_starts, run, start, wait_for

DISKS = "the disks of a TPU VM are deleted with it"


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_project(tmp_path)


def tpu(project: pathlib.Path, *flags: str) -> list[str]:
    slice_flags = ["--name=mine", "--zone=us-west4-a", "--type=v5p-16", "--poll_seconds=1"]
    return ["bash", str(project / "launch" / "tpu_vm.sh"), *slice_flags, *flags]


def states(project: pathlib.Path, *words: str) -> None:
    play_path(project, "states").write_text("".join(word + "\n" for word in words))


def check_started_on_two(project: pathlib.Path) -> None:
    rows = sorted(read_starts(project))
    assert rows == [["10.0.0.2:8476", "2", str(k), *CONFIG] for k in range(2)]


@pytest.mark.parametrize("queued", [False, True])
def test_tpu_vm_starts_every_worker_as_its_dry_run_says(project: pathlib.Path, queued: bool) -> None:
    flags = ["--spot", "--delete", "--project=lab", "--env=NOTE=a 'b", "--create_flag=--network=inner", *CONFIG]
    flags.insert(0, "--setup=touch 'it is mounted'")
    if queued:
        flags.insert(0, "--queued")
    status, shown = run(project, *tpu(project, "--dry_run", *flags))
    assert status == 0 and not read_calls(project) and not read_starts(project)
    states(project, "ABSENT", *(["WAITING_FOR_RESOURCES", "ACTIVE"] if queued else ["READY"]))
    status, output = run(project, *tpu(project, *flags))
    assert status == 0, output
    check_started_on_two(project)
    assert all((play_path(project, f"worker{k}") / "it is mounted").exists() for k in range(2))
    assert {"[0] hello from 0", "[1] hello from 1"} <= set(output.splitlines())

    expected = [shlex.split(line) for line in shown.splitlines() if not line.startswith("tar ")]
    found: list[list[str]] = []
    for words in read_calls(project):
        words = [re.sub(r"^/.*/agentr1_jax.tgz", "FOLDER/agentr1_jax.tgz", word) for word in words]
        words = [word.replace("10.0.0.2:", "INTERNAL_ADDRESS_OF_WORKER_0:") for word in words]
        if words not in found:  # The state is looked at several times.
            found.append(words)
    assert sorted(found) == sorted(expected)
    kinds = [words[3:5] for words in found]
    kind = "queued-resources" if queued else "tpu-vm"
    assert kinds[:3] == [[kind, "describe"], [kind, "create"], ["tpu-vm", "describe"]]
    assert kinds[-1] == [kind, "delete"]


def test_tpu_vm_copies_neither_git_nor_runs(project: pathlib.Path) -> None:
    states(project, "READY")
    (play_path(project, "worker0") / "agentr1_jax" / "stale.py").touch()
    status, output = run(project, *tpu(project, *CONFIG))
    assert status == 0, output
    assert "create" not in {words[4] for words in read_calls(project)}
    copied = {path.name for path in (play_path(project, "worker0") / "agentr1_jax").iterdir()}
    assert copied == {".venv", "experiments", "launch", "requirements.txt", "worker.0.pids"}
    assert "delete it with: gcloud compute tpus tpu-vm delete mine --zone=us-west4-a" in output


@pytest.mark.parametrize(("queued", "taken"), [(False, "PREEMPTED"), (True, "SUSPENDED")])
def test_tpu_vm_makes_a_preempted_slice_again(project: pathlib.Path, queued: bool, taken: str) -> None:
    """The connection to one worker hangs; the state tells what happened."""
    ready = "ACTIVE" if queued else "READY"
    states(project, ready, *[taken] * 3, "ABSENT", ready)
    play_path(project, "cut").touch()
    status, output = run(project, *tpu(project, *(["--queued"] if queued else []), *CONFIG))
    assert status == 0, output
    assert f"launch: mine is {taken}\nlaunch: restart 1 of 3" in output
    kind = "queued-resources" if queued else "tpu-vm"
    made = [words[3:5] for words in read_calls(project) if words[4] in ("create", "delete")]
    assert made == [[kind, "delete"], [kind, "create"]]
    assert sorted(row[2] for row in read_starts(project)) in (["0", "1"], ["0", "1", "1"])


def test_tpu_vm_starts_the_processes_again_on_a_slice_that_is_there(project: pathlib.Path) -> None:
    """One fails; the other waits for it, and is told to leave."""
    states(project, "READY")
    play_path(project, "train.0").write_text("wait")
    play_path(project, "train.1").write_text("7")
    status, output = run(project, *tpu(project, *CONFIG))
    assert status == 0, output
    assert "[0] saved 0" in output
    assert "launch: worker 1 failed with status 7\nlaunch: restart 1 of 3" in output
    assert len(read_starts(project)) == 4
    assert "create" not in {words[4] for words in read_calls(project)}


def test_tpu_vm_takes_no_preempted_process_for_a_finished_one(project: pathlib.Path) -> None:
    """A host that shuts down tells its process, which saves and leaves with 0; so do the others."""
    states(project, "READY")
    play_path(project, "train.1").write_text("wait")
    with start(project, *tpu(project, "--restarts=1", *CONFIG)) as process:
        pids = play_path(project, "worker1") / "agentr1_jax" / "worker.0.pids"
        wait_for(play_path(project, "trained"), 2)
        os.kill(int(pids.read_text().split()[0]), signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "launch: worker 1 was ended by SIGTERM\nlaunch: restart 1 of 1" in output
    assert len(read_starts(project)) == 4


@pytest.mark.parametrize(("code", "starts"), [("2", 1), ("7", 2)])
def test_tpu_vm_ends_with_what_failed(project: pathlib.Path, code: str, starts: int) -> None:
    states(project, "READY")
    play_path(project, "train.1").write_text(" ".join([code] * 5))
    status, output = run(project, *tpu(project, "--restarts=1", *CONFIG))
    assert status == int(code)
    assert output.count(f"launch: worker 1 failed with status {code}") == starts
    assert len([row for row in read_starts(project) if row[2] == "1"]) == starts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_tpu_vm_passes_a_stop_on(project: pathlib.Path, number: signal.Signals) -> None:
    """Ctrl-C comes to the whole group of a terminal; the connections must outlive it."""
    states(project, "READY")
    for k in range(2):
        play_path(project, f"train.{k}").write_text("wait")
    with start(project, *tpu(project, "--delete", *CONFIG)) as process:
        wait_for(play_path(project, "trained"), 2)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert {"[0] saved 0", "[1] saved 1"} <= set(output.splitlines())
    assert "restart" not in output
    assert read_calls(project)[-1][3:6] == ["tpu-vm", "delete", "mine"]


def test_tpu_vm_does_not_make_again_what_somebody_deleted(project: pathlib.Path) -> None:
    states(project, "READY", "ABSENT")
    play_path(project, "train.1").write_text("1")
    status, output = run(project, *tpu(project, "--poll_seconds=60", *CONFIG))
    assert status == 1
    assert output.splitlines()[-1] == "launch: somebody deleted mine: not started again"


@pytest.mark.parametrize(
    "refusal",
    [
        "ERROR: (gcloud.compute.tpus.tpu-vm.describe) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied",
        "ERROR: (gcloud.compute.tpus.tpu-vm.describe) You do not currently have an active account selected.",
    ],
)
def test_tpu_vm_names_a_missing_permission(project: pathlib.Path, refusal: str) -> None:
    play_path(project, "refuse").write_text(refusal + "\n")
    status, output = run(project, *tpu(project, *CONFIG))
    assert status == 2
    assert output.startswith(f"{refusal}\nerror: gcloud refuses, see above")
    assert len(read_calls(project)) == 1


def test_tpu_vm_leaves_a_stopped_slice_alone(project: pathlib.Path) -> None:
    states(project, "STOPPED")
    status, output = run(project, *tpu(project, *CONFIG))
    assert status == 2
    assert "error: mine is STOPPED: start it (gcloud compute tpus tpu-vm start mine --zone=us-west4-a)" in output


@pytest.mark.parametrize(
    ("type_", "workers"),
    [("v5litepod-1", 1), ("v5litepod-8", 1), ("v5litepod-16", 4), ("v5p-8", 1), ("v5p-128", 16), ("v6e-32", 8)],
)
def test_tpu_vm_knows_the_hosts_of_a_type(project: pathlib.Path, type_: str, workers: int) -> None:
    """Chips and hosts as cloud.google.com/tpu/docs lists them for v5e, v5p and v6e (read 2026-11-22)."""
    status, output = run(project, *tpu(project, "--dry_run", f"--type={type_}", *CONFIG))
    assert status == 0
    assert output.count("--attempt=0") == workers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--name=", *CONFIG], "--name is missing"),
        (["--zone=", *CONFIG], "--zone is missing"),
        (["--type=", *CONFIG], "--type is missing"),
        (["--type=v99-8", *CONFIG], "--type=v99-8 is unknown; known are v5litepod-N"),
        (["--type=v5p", *CONFIG], "the number in --type=v5p is 'v5p'"),
        (["--zones=x", *CONFIG], "unknown flag '--zones=x'"),
        (["--env=x", *CONFIG], "--env=x: it must be --env=NAME=VALUE"),
        (["--restarts=many", *CONFIG], "--restarts is 'many'"),
        ([], "--config=FILE is missing"),
        (["--config=x.py"], DISKS),
        (
            ["--restarts=0", "--delete", "--config=x.py", "--config.run_dir=runs/x"],
            DISKS,
        ),
    ],
)
def test_tpu_vm_names_bad_flags(project: pathlib.Path, flags: list[str], message: str) -> None:
    status, output = run(project, *tpu(project, *flags))
    assert status == 2
    assert output.startswith(f"error: {message}") and output.count("\n") == 1
    assert not read_calls(project)


def test_a_worker_does_not_start_an_attempt_twice(project: pathlib.Path) -> None:
    """As gcloud would have it, which starts a command again whose connection was lost."""
    command = ["bash", str(project / "launch" / "worker.sh"), "--attempt=3", "--config=x.py"]
    names = {"AGENTR1_COORDINATOR": "h:1", "AGENTR1_NUM_PROCESSES": "1", "AGENTR1_PROCESS_ID": "0"}
    assert run(project, *command, VENV_PYTHON=sys.executable, **names)[0] == 0
    status, output = run(project, *command, VENV_PYTHON=sys.executable, **names)
    assert status == 1
    assert "error: attempt 3 was started or stopped here before" in output
    assert run(project, "bash", command[1], "--stop", "--attempt=4")[0] == 0
    command[2] = "--attempt=4"
    assert run(project, *command, VENV_PYTHON=sys.executable, **names)[0] == 1 and len(read_starts(project)) == 1
    status, output = run(project, *command)
    assert (status, output) == (2, "error: AGENTR1_COORDINATOR is missing\n")


def test_a_worker_that_does_not_leave_is_killed(project: pathlib.Path) -> None:
    (project / "experiments" / "train.py").write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(os.environ['PLAY'], 'trained').write_text('deaf\\n')\n"
        "time.sleep(60)\n"
    )
    names = {"AGENTR1_COORDINATOR": "h:1", "AGENTR1_NUM_PROCESSES": "1", "AGENTR1_PROCESS_ID": "0"}
    worker = str(project / "launch" / "worker.sh")
    with start(project, "bash", worker, "--attempt=0", "--config=x.py", VENV_PYTHON=sys.executable, **names) as process:
        wait_for(play_path(project, "trained"), 1)
        assert run(project, "bash", worker, "--stop", "--seconds=1")[0] == 0
        assert process.wait(timeout=60) != 0


def slurm(project: pathlib.Path, *flags: str) -> list[str]:
    asked = ["--nodes=2", "--gpus_per_node=8", "--time=24:00:00"]
    return ["bash", str(project / "launch" / "slurm.sh"), *asked, *flags]


def job(project: pathlib.Path, *flags: str) -> subprocess.Popen[str]:
    """Starts the batch script as Slurm does: a copy of it, on the first node, in the job's folder."""
    script = project.parent / "slurm_script"
    shutil.copy(project / "launch" / "slurm.sbatch", script)
    slurm_variables = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "gpu[07,09]", "SLURM_JOB_NUM_NODES": "2"}
    command = ["env", f"--chdir={project}", "bash", str(script), *flags]
    return start(project, *command, VENV_PYTHON=sys.executable, **slurm_variables)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


def is_requeued(project: pathlib.Path) -> bool:
    return ["scontrol", "requeue", "12"] in read_calls(project)


def test_slurm_submits_and_starts_what_its_dry_run_says(project: pathlib.Path) -> None:
    flags = ["--partition=gpu", "--restarts=5", "--sbatch_flag=--qos=low", *CONFIG]
    status, shown = run(project, *slurm(project, "--dry_run", *flags), VENV_PYTHON=sys.executable)
    assert status == 0 and not read_calls(project)
    making, submission, note, step = shown.splitlines()
    assert making == "mkdir -p runs/slurm" and note.startswith("#")
    assert run(project, *slurm(project, *flags), VENV_PYTHON=sys.executable)[0] == 0
    assert read_calls(project) == [shlex.split(submission)]
    assert (project / "runs" / "slurm").is_dir()

    arguments = shlex.split(submission)
    status, output = finish(job(project, *arguments[arguments.index("launch/slurm.sbatch") + 1 :]))
    assert status == 0, output
    assert sorted(read_starts(project)) == [["gpu07:8476", "2", str(k), *CONFIG] for k in range(2)]
    words = shlex.split(step)
    assert words[:3] == ["env", "AGENTR1_COORDINATOR=FIRST_HOST:8476", "AGENTR1_NUM_PROCESSES=2"]
    assert read_calls(project)[-1] == [word.replace("/JOB/", "/12/") for word in words[3:]]
    assert not is_requeued(project)


def test_slurm_saves_before_the_time_limit_and_requeues(project: pathlib.Path) -> None:
    for k in range(2):
        play_path(project, f"train.{k}").write_text("wait")
    process = job(project, "--restarts=0", *CONFIG)
    wait_for(play_path(project, "trained"), 2)
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == 0
    assert "saved 0" in output and "saved 1" in output
    assert "launch: stopped and saved; requeued, and the job resumes" in output
    assert ["scancel", "--signal=TERM", "12"] in read_calls(project) and is_requeued(project)


@pytest.mark.parametrize(("state", "again"), [("RUNNING", True), ("COMPLETING", False)])
def test_slurm_requeues_what_was_preempted_and_not_what_was_cancelled(
    project: pathlib.Path, state: str, again: bool
) -> None:
    """In both cases Slurm tells the step alone; the state of the job is what differs."""
    play_path(project, "job_state").write_text(state + "\n")
    for k in range(2):
        play_path(project, f"train.{k}").write_text("wait")
    process = job(project, *CONFIG)
    wait_for(play_path(project, "trained"), 2)
    wait_for(play_path(project, "tasks"), 2)
    for pid in play_path(project, "tasks").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    status, output = finish(process)
    assert status == 0, output
    assert is_requeued(project) == again


@pytest.mark.parametrize(("code", "again"), [("7", True), ("2", False)])
def test_slurm_requeues_after_a_failure_but_not_after_a_mistake(project: pathlib.Path, code: str, again: bool) -> None:
    """By then the other process is told to leave."""
    play_path(project, "train.0").write_text("wait")
    play_path(project, "train.1").write_text(" ".join([code] * 3))
    status, output = finish(job(project, "--restarts=1", *CONFIG))
    assert is_requeued(project) == again
    if not again:
        assert status == 2 and "error: a mistake of the user" in output
        return
    assert status == 0 and "launch: process 1 failed with status 7; restart 1 of 1" in output
    play_path(project, "record").unlink()
    status, output = finish(job(project, "--restarts=1", *CONFIG))
    assert status == 7 and not is_requeued(project)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes=", *CONFIG], "--nodes is missing"),
        (["--nodes=all", *CONFIG], "--nodes is 'all'"),
        (["--gpus_per_node=0", *CONFIG], "--gpus_per_node is '0'; it must be a whole number from 1"),
        (["--time=", *CONFIG], "--time is missing"),
        (["--gpus=8", *CONFIG], "unknown flag '--gpus=8'"),
        ([], "--config=FILE is missing"),
    ],
)
def test_slurm_names_bad_flags(project: pathlib.Path, flags: list[str], message: str) -> None:
    status, output = run(project, *slurm(project, *flags), VENV_PYTHON=sys.executable)
    assert status == 2
    assert output.startswith(f"error: {message}") and output.count("\n") == 1


def test_slurm_names_a_missing_environment_and_a_refusal(project: pathlib.Path) -> None:
    assert run(project, *slurm(project, *CONFIG), VENV_PYTHON="") == (2, "error: VENV_PYTHON is missing\n")
    status, output = run(project, *slurm(project, *CONFIG), VENV_PYTHON="python")
    assert status == 2 and "it must be a path from /" in output
    play_path(project, "refuse").write_text("sbatch: error: Invalid account\n")
    status, output = run(project, *slurm(project, *CONFIG), VENV_PYTHON=sys.executable)
    assert status == 2 and output.startswith("sbatch: error: Invalid account\nerror: sbatch refuses, see above")


@pytest.mark.parametrize(("command", "program"), [(tpu, "gcloud"), (slurm, "sbatch")], ids=["gcloud", "sbatch"])
def test_a_program_that_is_not_there_is_named(project: pathlib.Path, command: Any, program: str) -> None:
    """Not for a dry run, which does not need it."""
    environment = bare_path(project) | {"VENV_PYTHON": sys.executable}
    status, output = run(project, *command(project, *CONFIG), **environment)
    assert status == 2
    assert output.startswith(f"error: {program} is not on PATH; ")
    assert run(project, *command(project, "--dry_run", *CONFIG), **environment)[0] == 0


def test_the_scripts_pass_shellcheck() -> None:
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    try:
        subprocess.run([program or "shellcheck", "--version"], check=True, capture_output=True)
    except OSError as error:
        pytest.skip(f"shellcheck cannot be run: {error}")
    scripts = [str(p.relative_to(ROOT)) for p in (ROOT / "launch").rglob("*") if p.suffix in (".sh", ".sbatch")]
    assert len(scripts) > 8
    checked = subprocess.run([program, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
