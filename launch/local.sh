#!/usr/bin/env bash
# Runs experiments.train in N processes with 2 CPU devices each, joined over loopback:
#   bash launch/local.sh 2 --config=configs/quickstart.py --config.updates=2
# Lines of process k begin with [k]. SIGTERM and Ctrl-C end the run as they end a single process: it saves and leaves.
# If a process fails the others are ended, and its exit status is this script's.
usage="usage: bash launch/local.sh PROCESSES --config=FILE [flags of experiments.train]"
if [[ ! ${1:-} =~ ^[1-9][0-9]*$ ]]; then
  echo "error: $usage" >&2
  exit 2
fi
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
count=$1
shift
# How long a process may take to leave after another one failed; one that waits in a collective never hears of it.
grace_seconds=10

port=$("$VENV_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export AGENTR1_COORDINATOR=127.0.0.1:$port AGENTR1_NUM_PROCESSES=$count AGENTR1_CPU_DEVICES=2 PYTHONUNBUFFERED=1

# Deaf to signals, so that the last words of a process that is ended are still shown.
prefix_lines() {
  trap '' INT TERM
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

pipes=$(mktemp -d)
running=()
prefixers=()
trap 'rm -rf "$pipes"' EXIT
# A terminal sends Ctrl-C to the processes as well, and a second SIGINT would cut them short: pass it on as SIGTERM.
trap 'kill -TERM "${running[@]}" 2>/dev/null || true' INT TERM

for ((k = 0; k < count; k++)); do
  mkfifo "$pipes/$k"
  prefix_lines "$k" <"$pipes/$k" &
  prefixers+=("$!")
  AGENTR1_PROCESS_ID=$k "$VENV_PYTHON" -m experiments.train "$@" >"$pipes/$k" 2>&1 </dev/null &
  running+=("$!")
done

status=0
deadline=0
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
      deadline=$((SECONDS + grace_seconds))
      kill -TERM "${running[@]}" 2>/dev/null || true
    fi
  done
  running=(${alive[@]+"${alive[@]}"})
  if ((deadline && SECONDS >= deadline && ${#running[@]})); then kill -KILL "${running[@]}" 2>/dev/null || true; fi
  sleep 0.2 || true
done
wait "${prefixers[@]}" || true
exit "$status"
