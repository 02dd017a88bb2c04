#!/usr/bin/env bash
# Runs experiments.train in several processes on this machine's CPU, connected over loopback:
#   bash launch/local.sh [--dry_run] PROCESSES [--cpu_devices=2] [--restarts=0] --config=FILE [flags of experiments.train]
# Needs Python 3.11 or newer. --dry_run prints the commands and runs none.
# The lines of process k begin with [k]. On SIGTERM or Ctrl-C all processes save and exit, as a single process does.
# If a process fails, the others are ended, and all are started again up to --restarts times; they resume from the run's
# folder. After status 2, a mistake of the user, nothing is started again. The exit status is that of the process that
# failed first.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
usage="usage: bash launch/local.sh [--dry_run] PROCESSES [--cpu_devices=2] [--restarts=0] --config=FILE [flags]"
count=
cpu_devices=2
restarts=0
while (($#)); do
  case $1 in
    --config*) break ;;
    --dry_run) dry_run=1 ;;
    --cpu_devices=*) cpu_devices=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    -*) fail_unknown_flag "$1" "$usage" ;;
    *)
      [[ -z $count ]] || fail "two numbers of processes, '$count' and '$1'. $usage"
      count=$1
      ;;
  esac
  shift
done
[[ -n $count && $# -gt 0 ]] || fail "$usage"
require_whole_number PROCESSES "$count" 1
require_whole_number --cpu_devices "$cpu_devices" 1
require_whole_number --restarts "$restarts"
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# Time for the others to exit after a process failed; one that waits in a collective does not react to SIGTERM.
grace_seconds=10

# set_command K PORT FLAGS...: sets `command` to the command of process K.
set_command() {
  command=(env AGENTR1_COORDINATOR="127.0.0.1:$2" AGENTR1_NUM_PROCESSES="$count" AGENTR1_PROCESS_ID="$1"
    AGENTR1_CPU_DEVICES="$cpu_devices" PYTHONUNBUFFERED=1 "$VENV_PYTHON" -m experiments.train "${@:3}")
}

if ((dry_run)); then
  for ((k = 0; k < count; k++)); do
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
  for ((k = 0; k < count; k++)); do
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
