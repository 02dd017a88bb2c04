"""Stand-ins for gcloud, kubectl and Slurm's programs, which record what they are asked for and play states.

Over ssh, in a Slurm step and in a pod the real `launch/worker.sh` runs, with a training script of a few lines.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTHON = os.path.join(sys.base_exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")

TRAIN = """
import json, os, pathlib, signal, sys, time
if sys.argv[1].startswith("--check="):  # The launcher's check, before anything is asked for.
    play = pathlib.Path(os.environ["PLAY"])
    (play / "checked").write_text(json.dumps([os.environ.get("AGENTR1_DATA"), *sys.argv[1:]]))
    sys.exit(int((play / "mistake").read_text()) if (play / "mistake").exists() else 0)
log = pathlib.Path(os.environ["PLAY"]) / "trained"
index = os.environ["AGENTR1_PROCESS_ID"]
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second one would come while the interpreter ends.
    sys.stdout.write(f"saved {index}\\n")  # At once: the other one writes to the same pipe.
    sys.stdout.flush()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
script = pathlib.Path(os.environ["PLAY"]) / f"train.{index}"
action = script.read_text().split() if script.exists() else []
script.write_text(" ".join(action[1:])) if action else None
names = [name for name in os.environ if name.startswith(("MEGASCALE_", "WANDB_", "AGENTR1_DATA", "NOTE"))]
(log.parent / f"environment.{index}").write_text(json.dumps({name: os.environ[name] for name in names}))
names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")
with log.open("a") as file:
    print(json.dumps([*(os.environ["AGENTR1_" + name] for name in names), *sys.argv[1:]]), file=file)
sys.stdout.write(f"hello from {index}\\n")
sys.stdout.flush()
while action and log.read_text().count("\\n") % 2:  # The other one must have begun.
    time.sleep(0.01)
if action and action[0] == "wait":
    time.sleep(60)
sys.exit(int(action[0]) if action else 0)
"""

RECORD = """#!/usr/bin/env bash
record() {
  local line
  printf -v line '%q ' "$@"
  echo "$line" >>"$PLAY/record"
}
# Takes the first line of a file of what to play; the last one stays.
play() {
  local first
  [[ -e $PLAY/$1 ]] || return 1
  first=$(head -n 1 "$PLAY/$1")
  if (($(wc -l <"$PLAY/$1") > 1)); then sed -i 1d "$PLAY/$1"; fi
  echo "$first"
}
"""

# A worker's home is a folder; its commands run there. `states` says what `describe` tells, one word after another.
# Where `slices` exists, NAME-0 and NAME-1 are slices of one worker.
GCLOUD = (
    RECORD
    + """
record gcloud "$@"
worker=0
for word; do
  case $word in
    --worker=*) worker=${word#*=} ;;
    --command=*) command=${word#*=} ;;
    *:agentr1_jax.tgz) target=1 ;;
    */agentr1_jax.tgz | */agentr1_jax.secrets) source=$word ;;
  esac
done
if [[ -e $PLAY/slices ]]; then worker=${5##*-}; worker=${worker%%:*}; fi
if [[ -e $PLAY/slices && $4 == scp ]]; then worker=${6##*-}; worker=${worker%%:*}; fi
if [[ -e $PLAY/refuse ]]; then
  cat "$PLAY/refuse" >&2
  exit 1
fi
case "$3 $4" in
  "queued-resources describe" | "tpu-vm describe")
    if [[ $* == *networkEndpoints* ]]; then
      if [[ -e $PLAY/slices ]]; then echo "10.0.0.$((2 + worker))"; else echo "10.0.0.2;10.0.0.3"; fi
      exit
    fi
    state=$(play states)
    if [[ $state == ABSENT ]]; then echo "ERROR: (gcloud) NOT_FOUND: no such resource" >&2; exit 1; fi
    echo "$state"
    ;;
  "tpu-vm scp") cp --preserve=mode "$source" "$PLAY/worker$worker/" ;;
  "tpu-vm ssh")
    # A connection that does not come back, as to a slice that was taken away.
    if [[ -e $PLAY/cut && $worker == 0 && $command == *--attempt=0* ]]; then exec sleep 60; fi
    cd "$PLAY/worker$worker" && exec bash -c "$command"
    ;;
esac
"""
)

KUBECTL = (
    RECORD
    + """
record kubectl "$@"
for word; do
  case $word in
    --filename=-) cat >"$PLAY/manifest" ;;
    --from-env-file=*) cp --preserve=mode "${word#*=}" "$PLAY/secrets" ;;
  esac
done
if [[ -e $PLAY/refuse ]]; then cat "$PLAY/refuse" >&2; exit 1; fi
"""
)

SBATCH = RECORD + 'record sbatch "$@"\n[[ ! -e $PLAY/refuse ]] || { cat "$PLAY/refuse" >&2; exit 1; }\n'
SCONTROL = (
    RECORD
    + """
record scontrol "$@"
case "$1 $2" in
  "show hostnames") printf 'gpu07\\ngpu09\\n' ;;
  "show job") echo "JobId=12 JobState=$(play job_state || echo RUNNING) Restarts=0" ;;
esac
"""
)
SQUEUE = RECORD + 'record squeue "$@"\necho 12\n'
SCANCEL = (
    RECORD
    + """
record scancel "$@"
[[ -e $PLAY/tasks ]] || exit 0
while read -r pid; do kill -TERM "$pid"; done <"$PLAY/tasks"
"""
)
# The greatest status is srun's; a task that fails ends the others, as --kill-on-bad-exit has it.
SRUN = """#!/usr/bin/env python3
import os, pathlib, subprocess, sys, time
play = pathlib.Path(os.environ["PLAY"])
with open(play / "record", "a") as file:
    print("srun", *map(__import__("shlex").quote, sys.argv[1:]), file=file)
command = sys.argv[sys.argv.index("bash"):]
tasks = [subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(k)}) for k in range(2)]
(play / "tasks").write_text("".join(f"{task.pid}\\n" for task in tasks))
while all(not task.poll() for task in tasks) and any(task.poll() is None for task in tasks):
    time.sleep(0.02)
if any(task.poll() for task in tasks):
    [task.terminate() for task in tasks]
[task.wait() for task in tasks]
sys.exit(max(task.returncode for task in tasks))
"""


def make_project(tmp_path: pathlib.Path) -> pathlib.Path:
    """A project with a space in its path, the stand-ins beside it, and two workers whose requirements are installed."""
    root, play, programs = tmp_path / "a project", tmp_path / "play", tmp_path / "bin"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "experiments").mkdir()
    (root / "experiments" / "train.py").write_text(TRAIN)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (root / name).write_text("")
    for name in (".git", "runs"):
        (root / name).mkdir()
    for k in range(2):
        venv = play / f"worker{k}" / "agentr1_jax" / ".venv"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(sys.executable)
        (venv / "requirements.installed").write_text("jax[tpu]\n")
    programs.mkdir()
    texts = {"gcloud": GCLOUD, "kubectl": KUBECTL, "sbatch": SBATCH, "scontrol": SCONTROL, "scancel": SCANCEL}
    for name, text in (texts | {"srun": SRUN, "squeue": SQUEUE}).items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return root


def play_path(project: pathlib.Path, name: str) -> pathlib.Path:
    return project.parent / "play" / name


def start(project: pathlib.Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a command with the stand-ins before, and nothing of the real clusters' behind them, on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTR1_", "SLURM_"))}
    kept |= {"PATH": f"{project.parent / 'bin'}:{os.environ['PATH']}", "PLAY": str(project.parent / "play")}
    kept |= {"VENV_PYTHON": PYTHON}
    return subprocess.Popen(
        command,
        cwd=project.parent,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(project: pathlib.Path, *command: str, **environment: str) -> tuple[int, str]:
    with start(project, *command, **environment) as process:
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


def bare_path(project: pathlib.Path) -> dict[str, str]:
    """A PATH without the clusters' programs, their stand-ins among them."""
    few = project.parent / "few"
    few.mkdir(exist_ok=True)
    # Python by its own path: what PATH calls python3 may be a script that looks for others there.
    found = {name: shutil.which(name) for name in ("bash", "dirname", "mktemp", "rm", "sed")} | {"python3": PYTHON}
    for name, program in found.items():
        if program and not (few / name).exists():
            (few / name).symlink_to(program)
    return {"PATH": str(few)}


def read_calls(project: pathlib.Path) -> list[list[str]]:
    path = play_path(project, "record")
    return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_check(project: pathlib.Path) -> list[str]:
    """Data folder and flags of the launcher's check."""
    return json.loads(play_path(project, "checked").read_text())


def read_environment(project: pathlib.Path, index: int) -> dict[str, str]:
    """Variables of a process that the launcher may set."""
    return json.loads(play_path(project, f"environment.{index}").read_text())


def read_starts(project: pathlib.Path) -> list[list[str]]:
    """Of every process of the training that was started: coordinator, count, index, arguments."""
    path = play_path(project, "trained")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path: pathlib.Path, lines: int) -> None:
    """Waits for lines of a file, but not for ever: what should write them may have failed."""
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} has less than {lines} lines"
        time.sleep(0.02)


CONFIG = ("--config=configs/x.py", "--config.run_dir=gs://bucket/it's mine")
