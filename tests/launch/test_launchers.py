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
import time
from typing import Any

import pytest
from clusters import (
    CONFIG,
    ROOT,
    bare_path,
    make_project,
    play_path,
    read_calls,
    read_check,
    read_environment,
    read_starts,
    run,
    start,
    wait_for,
)

ABLATE = """
import os, sys
if sys.argv[1] != "--check=v5p:1x4":
    sys.stdout.write(f"{sys.argv[1:]} {[name for name in os.environ if name.startswith('AGENTR1_')]}\\n")
"""
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

    assert shown.startswith("env AGENTR1_DATA= ") and read_check(project) == ["", "--check=v5p:2x4", *CONFIG]
    expected = [shlex.split(line) for line in shown.splitlines() if line.startswith("gcloud ")]
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
    assert copied == {".venv", "experiments", "launch", "requirements.txt", "requirements-dev.txt", "worker.0.pids"}
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


def test_tpu_vm_asks_for_nothing_when_the_run_would_be_refused(project: pathlib.Path) -> None:
    """Its settings and data are checked here, with what the workers will have."""
    play_path(project, "mistake").write_text("2")
    status, output = run(project, *tpu(project, "--delete", "--data=gs://bucket/data", *CONFIG))
    assert status == 2 and output.endswith("nothing was asked for, nothing has started\n")
    assert read_check(project) == ["gs://bucket/data", "--check=v5p:2x4", *CONFIG] and not read_calls(project)


def test_tpu_vm_does_not_delete_after_a_mistake(project: pathlib.Path) -> None:
    """It says what is left, and how to delete it."""
    states(project, "READY")
    play_path(project, "train.0").write_text("2")
    play_path(project, "train.1").write_text("2")
    status, output = run(project, *tpu(project, "--delete", *CONFIG))
    assert status == 2 and "delete" not in {words[4] for words in read_calls(project)}
    left = "launch: mine is left as it is, and billed; delete it with: gcloud compute tpus tpu-vm delete mine"
    assert output.splitlines()[-1].startswith(left)


@pytest.mark.parametrize(("code", "restarts"), [("7", 1), ("2", 0)])
def test_tpu_vm_does_not_delete_before_a_run_has_begun(project: pathlib.Path, code: str, restarts: int) -> None:
    states(project, "READY")
    status, output = run(project, *tpu(project, "--delete", "--restarts=1", f"--setup=exit {code}", *CONFIG))
    assert status == (2 if code == "2" else 1), output
    assert output.count("launch: restart") == restarts and not read_starts(project)
    assert "mine is left as it is, and billed" in output
    assert "delete" not in {words[4] for words in read_calls(project)}


def test_tpu_vm_hands_secrets_on_unseen(project: pathlib.Path) -> None:
    """In no command and no output; in the environment of the processes, and in no file afterwards."""
    states(project, "READY")
    flags = ["--secret=WANDB_API_KEY", "--env=NOTE=open", "--data=/shared/data", *CONFIG]
    status, output = run(project, *tpu(project, *flags), WANDB_API_KEY="hush 'x'=1")
    assert status == 0, output
    assert "hush" not in output + play_path(project, "record").read_text()
    for k in range(2):
        found = {"WANDB_API_KEY": "hush 'x'=1", "NOTE": "open", "AGENTR1_DATA": "/shared/data"}
        assert read_environment(project, k) == found
        assert not list(play_path(project, f"worker{k}").rglob("*secrets"))


def test_tpu_vm_runs_over_several_slices(project: pathlib.Path) -> None:
    """Slices of one host each: one queued resource, processes numbered slice by slice, libtpu told of the slices."""
    play_path(project, "slices").touch()
    states(project, "ABSENT", "ACTIVE")
    flags = ["--type=v5p-8", "--slices=2", "--spot", "--delete", *CONFIG]
    status, output = run(project, *tpu(project, *flags))
    assert status == 0, output
    check_started_on_two(project)
    assert read_check(project)[1] == "--check=v5p:2*1x4"
    made = next(words for words in read_calls(project) if words[4] == "create")
    assert {"--node-count=2", "--node-prefix=mine", "--spot"} <= set(made) and made[3] == "queued-resources"
    assert read_calls(project)[-1][3:6] == ["queued-resources", "delete", "mine"]
    for k in range(2):
        address = {"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.2:8081", "MEGASCALE_PORT": "8081"}
        slices = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": str(k)}
        assert read_environment(project, k) == address | slices


def test_tpu_vm_uses_reservations(project: pathlib.Path) -> None:
    status, output = run(project, *tpu(project, "--dry_run", "--reserved", *CONFIG))
    assert status == 0 and "tpus tpu-vm create mine" in output and "--reserved" in output
    status, output = run(project, *tpu(project, "--dry_run", "--reservation=ours", *CONFIG))
    assert status == 0 and "gcloud alpha compute tpus queued-resources create mine --node-id=mine" in output
    assert "--reservation=ours" in output and "gcloud alpha compute tpus tpu-vm" not in output


def test_tpu_vm_spreads_a_grid_over_slices(project: pathlib.Path) -> None:
    """Each runs its share on its own, so that no process is told of the others."""
    (project / "experiments" / "ablate.py").write_text(ABLATE)
    play_path(project, "slices").touch()
    states(project, "ACTIVE")
    flags = ["--type=v5p-8", "--slices=2", "--program=ablate", "--config=x.py", "--schemes=grpo", "--out=/shared/grid"]
    status, output = run(project, *tpu(project, *flags))
    assert status == 0, output
    for k in range(2):
        said = f"[{k}] ['--share={k}/2', '--config=x.py', '--schemes=grpo', '--out=/shared/grid'] []"
        assert said in output.splitlines()


def control(project: pathlib.Path, action: str, *flags: str) -> tuple[int, str]:
    script = str(project / "launch" / "tpu_vm.sh")
    return run(project, "bash", script, action, "--name=mine", "--zone=us-west4-a", *flags)


def wait_for_state(project: pathlib.Path, word: str) -> list[str]:
    """Waits until both supervisors say so."""
    paths = [play_path(project, f"worker{k}") / "agentr1_jax" / "detached.state" for k in range(2)]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text().startswith(word) for path in paths):
        assert time.monotonic() < deadline, [path.read_text() for path in paths if path.exists()]
        time.sleep(0.02)
    return [path.read_text() for path in paths]


def test_tpu_vm_detaches_and_the_run_restarts_by_itself(project: pathlib.Path) -> None:
    """The launcher leaves at once; after a failure each worker starts its process again, with its secrets."""
    states(project, "READY")
    play_path(project, "train.0").write_text("7")
    play_path(project, "train.1").write_text("7")
    flags = ["--detach", "--pause_seconds=0", "--restarts=2", "--secret=WANDB_API_KEY", *CONFIG]
    status, output = run(project, *tpu(project, *flags), WANDB_API_KEY="hush")
    assert status == 0, output
    assert "the run goes on without this launcher; mine is billed until you delete it" in output
    assert "launch: bash launch/tpu_vm.sh stop --name=mine --zone=us-west4-a --delete" in output
    wait_for_state(project, "finished")
    assert len(read_starts(project)) == 4
    assert all(read_environment(project, k) == {"WANDB_API_KEY": "hush"} for k in range(2))
    assert "hush" not in play_path(project, "record").read_text()
    status, output = control(project, "logs", "--worker=1")
    assert status == 0 and "hello from 1" in output
    assert "launch: worker 1 failed with status 7; starts again in 0 s" in output
    status, output = control(project, "status")
    assert status == 0 and output.startswith("launch: mine is READY\n")
    assert all(f"[{k}] detached: finished (" in output for k in range(2))


def test_tpu_vm_stops_a_detached_run(project: pathlib.Path) -> None:
    """It saves and is not started again; another run cannot end it by accident."""
    states(project, "READY")
    for k in range(2):
        play_path(project, f"train.{k}").write_text("wait")
    assert run(project, *tpu(project, "--detach", *CONFIG))[0] == 0
    wait_for(play_path(project, "trained"), 2)
    status, output = run(project, *tpu(project, *CONFIG))
    assert status == 2 and "error: a detached run is at work on " in output
    assert "running, restart 0 of 3" in control(project, "status")[1]
    status, output = control(project, "stop", "--delete")
    assert status == 0, output
    assert all("saved" in state or state.startswith("stopped") for state in wait_for_state(project, "stopped"))
    assert len(read_starts(project)) == 2 and read_calls(project)[-1][3:6] == ["tpu-vm", "delete", "mine"]
    assert "saved 0" in (play_path(project, "worker0") / "agentr1_jax" / "detached.log").read_text()


def test_a_detached_run_is_not_repeated_after_a_mistake(project: pathlib.Path) -> None:
    states(project, "READY")
    for k in range(2):
        play_path(project, f"train.{k}").write_text("2")
    assert run(project, *tpu(project, "--detach", "--pause_seconds=0", *CONFIG))[0] == 0
    wait_for(play_path(project, "trained"), 2)
    deadline = time.monotonic() + 120
    while "mistake" not in (status := control(project, "status"))[1]:
        assert time.monotonic() < deadline, status
    assert len(read_starts(project)) == 2
    states(project, "ABSENT")
    status, output = control(project, "status")
    assert status == 2 and "error: there is no mine; was it a queued resource" in output


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
        (["--secret=A-B", *CONFIG], "--secret=A-B: it must be the name of an environment variable"),
        (["--secret=NOT_SET", *CONFIG], "--secret=NOT_SET: the environment here has no such variable; export NOT_SET="),
        (["--data=data", *CONFIG], "--data=data: it must be gs://BUCKET/FOLDER, or a folder /"),
        (["--detach", "--delete", *CONFIG], "a detached run cannot delete its slice"),
        (["--slices=0", *CONFIG], "--slices is '0'"),
        (["--program=evaluate", *CONFIG], "--program=evaluate: it must be train or ablate"),
        (
            ["--program=ablate", *CONFIG, "--out=/shared/grid"],
            "a run of a grid is one process, and --type=v5p-16 has 2",
        ),
        (["--program=ablate", "--type=v5p-8", *CONFIG], DISKS),
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
    flags = [
        "--name=mine",
        "--partition=gpu",
        "--restarts=5",
        "--sbatch_flag=--qos=low",
        "--data=/shared/data",
        *CONFIG,
    ]
    status, shown = run(project, *slurm(project, "--dry_run", *flags), VENV_PYTHON=sys.executable)
    assert status == 0 and not read_calls(project)
    check, making, submission, note, step = shown.splitlines()
    assert "--check=gpu:2x8" in check
    assert making == "mkdir -p runs/slurm" and note.startswith("#")
    assert run(project, *slurm(project, *flags), VENV_PYTHON=sys.executable)[0] == 0
    assert read_calls(project) == [shlex.split(submission)]
    assert (project / "runs" / "slurm").is_dir()

    arguments = shlex.split(submission)
    status, output = finish(job(project, *arguments[arguments.index("launch/slurm.sbatch") + 1 :]))
    assert status == 0, output
    assert sorted(read_starts(project)) == [["gpu07:8476", "2", str(k), *CONFIG] for k in range(2)]
    assert read_environment(project, 1) == {"AGENTR1_DATA": "/shared/data"} and "--job-name=mine" in arguments
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


def test_slurm_submits_no_run_that_would_be_refused(project: pathlib.Path) -> None:
    play_path(project, "mistake").write_text("2")
    status, output = run(project, *slurm(project, *CONFIG), VENV_PYTHON=sys.executable)
    assert status == 2 and "nothing was asked for" in output and not read_calls(project)


@pytest.mark.parametrize(("action", "program"), [("status", "squeue"), ("stop", "scancel")])
def test_slurm_looks_after_a_run(project: pathlib.Path, action: str, program: str) -> None:
    status, _ = run(project, "bash", str(project / "launch" / "slurm.sh"), action, "--name=mine")
    assert status == 0 and read_calls(project) == [[program, "--me", "--name=mine"]]


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
