#!/usr/bin/env bash
# Runs experiments.train in several processes on this machine's CPU, connected over loopback:
#   bash launch/local.sh --processes=2 [--cpu_devices=2] [flags] --config=FILE [flags of experiments.train]
# Needs Python 3.11 or newer. Flags of all launchers (docs/pods.md) that it has: --restarts=0 --data --env --secret --dry_run.
# The lines of process k begin with [k]. On SIGTERM or Ctrl-C all processes save and exit, as a single process does.
# If a process fails, the others are ended, and all are started again up to --restarts times; they resume from the run's
# folder. After status 2, a mistake of the user, nothing is started again. The exit status is that of the process that
# failed first.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
hint="The flags are at the head of launch/local.sh"
processes=
cpu_devices=2
restarts=0
while (($#)); do
  case $1 in
    --config*) break ;;
    --processes=*) processes=${1#*=} ;;
    --cpu_devices=*) cpu_devices=${1#*=} ;;
    --restarts=* | --data=* | --env=* | --secret=* | --dry_run) take_common_flag "$1" ;;
    *) fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --processes "$processes"
require_whole_number --processes "$processes" 1
require_whole_number --cpu_devices "$cpu_devices" 1
check_common_flags "$@"
[[ $data != gs://* ]] || fail "--data=$data: copy it to this machine, and give that folder"
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# Time for the others to exit after a process failed; one that waits in a collective does not react to SIGTERM.
grace_seconds=10

# set_command K PORT FLAGS...: sets `command` to the command of process K.
set_command() {
  command=(env AGENTR1_COORDINATOR="127.0.0.1:$2" AGENTR1_NUM_PROCESSES="$processes" AGENTR1_PROCESS_ID="$1"
    AGENTR1_CPU_DEVICES="$cpu_devices" PYTHONUNBUFFERED=1 ${data:+"AGENTR1_DATA=$data"} ${variables[@]+"${variables[@]}"}
    "$VENV_PYTHON" -m experiments.train "${@:3}")
}

if ((dry_run)); then
  for ((k = 0; k < processes; k++)); do
    set_command "$k" PORT "$@"
    run "${command[@]}"
  done
  exit
fi

signal_all() {
  if ((${#running[@]})); then kill "-$1" "${running[@]}" 2>/dev/null || true; fi
}

# on_exit NUMBER STATUS
on_exit() {
  if (($2 && !status)); then
    failed=$1
    status=$2
    deadline=$((SECONDS + grace_seconds))
    signal_all TERM
  fi
}

kill_after_deadline() {
  if ((deadline && SECONDS >= deadline)); then signal_all KILL; fi
}

# attempt FLAGS...: starts all processes and waits for them. Sets `status` and `failed` to those of the first failure.
attempt() {
  local port k
  port=$("$VENV_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  work=$(mktemp -d)
  status=0
  deadline=0
  for ((k = 0; k < processes; k++)); do
    set_command "$k" "$port" "$@"
    start "$k" "${command[@]}"
    running+=("$started")
  done
  if ((stopping)); then signal_all TERM; fi
  wait_all on_exit kill_after_deadline
  rm -rf "$work"
}

work=
stopping=0
trap 'rm -rf "$work"' EXIT
# A terminal sends Ctrl-C to the processes as well, and a second SIGINT would end them unsaved: pass it on as SIGTERM.
trap 'stopping=1; signal_all TERM' INT TERM
for ((restart = 1; ; restart++)); do
  attempt "$@"
  ((status && status != 2 && !stopping && restart <= restarts)) || exit "$status"
  say "process $failed $(describe_status "$status"); restart $restart of $restarts"
done
