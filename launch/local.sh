#!/usr/bin/env bash
# Runs experiments.train in several processes on this machine's CPU, joined over loopback:
#   bash launch/local.sh [--dry_run] PROCESSES [--cpu_devices=2] [--restarts=0] --config=FILE [flags of experiments.train]
# Needs Python >= 3.11, as launch/quickstart.sh. --dry_run prints the commands and runs none.
# Lines of process k begin with [k]. SIGTERM and Ctrl-C end the run as they end a single process: it saves and leaves.
# If a process fails the others are ended, and all are started again while --restarts lasts; they resume from the run's
# folder. Not after status 2, a user's mistake. The status of the process that failed first is this script's.
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
    -*) no_such_flag "$1" "$usage" ;;
    *)
      [[ -z $count ]] || fail "two numbers of processes, '$count' and '$1'. $usage"
      count=$1
      ;;
  esac
  shift
done
[[ -n $count && $# -gt 0 ]] || fail "$usage"
whole_number PROCESSES "$count" 1
whole_number --cpu_devices "$cpu_devices" 1
whole_number --restarts "$restarts"
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# How long a process may take to leave after another one failed; one that waits in a collective never hears of it.
grace_seconds=10

# Leaves in `command` how process K is started, joined at a port: set_command K PORT FLAGS...
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

# Deaf to signals, so that the last words of a process that is ended are still shown.
prefix_lines() {
  trap '' INT TERM
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

signal_all() {
  if ((${#running[@]})); then kill "-$1" "${running[@]}" 2>/dev/null || true; fi
}

# Starts all and waits for all; leaves in `status` and `failed` what failed first.
attempt() {
  local port k pid code deadline=0 alive prefixers=() numbers=()
  port=$("$VENV_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  pipes=$(mktemp -d)
  status=0
  for ((k = 0; k < count; k++)); do
    mkfifo "$pipes/$k"
    prefix_lines "$k" <"$pipes/$k" &
    prefixers+=("$!")
    set_command "$k" "$port" "$@"
    "${command[@]}" >"$pipes/$k" 2>&1 </dev/null &
    running+=("$!")
    numbers[$!]=$k
  done
  if ((stopping)); then signal_all TERM; fi
  while ((${#running[@]})); do
    alive=()
    for pid in "${running[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then
        alive+=("$pid")
        continue
      fi
      code=0
      wait "$pid" || code=$?
      if ((code && !status)); then
        status=$code
        failed=${numbers[pid]}
        deadline=$((SECONDS + grace_seconds))
        signal_all TERM
      fi
    done
    running=(${alive[@]+"${alive[@]}"})
    if ((deadline && SECONDS >= deadline)); then signal_all KILL; fi
    sleep 0.2 || true
  done
  wait "${prefixers[@]}" || true
  rm -rf "$pipes"
}

pipes=
stopping=0
running=()
trap 'rm -rf "$pipes"' EXIT
# A terminal sends Ctrl-C to the processes as well, and a second SIGINT would cut them short: pass it on as SIGTERM.
trap 'stopping=1; signal_all TERM' INT TERM
for ((restart = 1; ; restart++)); do
  attempt "$@"
  ((status && status != 2 && !stopping && restart <= restarts)) || exit "$status"
  say "process $failed $(described "$status"); restart $restart of $restarts"
done
