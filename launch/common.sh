# Sourced by the launchers: messages, checks of flags, commands that --dry_run prints, and waiting for processes.
# All launchers take their own flags first; --config=FILE and everything after it goes to experiments.train.
# shellcheck shell=bash
set -euo pipefail
unset CDPATH
dry_run=${dry_run:-0}
# Port of process 0; nothing else on a TPU VM, in a pod or on a cluster node uses it.
# shellcheck disable=SC2034
coordinator_port=8476

fail() {
  echo "error: $*" >&2
  exit 2
}

say() {
  echo "launch: $*" >&2
}

# require_program NAME HINT
require_program() {
  ((dry_run)) || command -v "$1" >/dev/null || fail "$1 is not on PATH; $2"
}

# require_whole_number FLAG VALUE [LEAST]
require_whole_number() {
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < ${3:-0})); then
    fail "$1 is '$2'; it must be a whole number from ${3:-0}"
  fi
}

# require FLAG VALUE
require() {
  [[ -n $2 ]] || fail "$1 is missing"
}

# fail_unknown_flag FLAG HINT
fail_unknown_flag() {
  fail "unknown flag '$1'; flags of experiments.train come after --config=FILE. $2"
}

# quote WORD...: prints the words as one would type them in a shell.
quote() {
  local word between='' mark="'\"'\"'"
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then word="'${word//\'/$mark}'"; fi
    printf '%s%s' "$between" "$word"
    between=' '
  done
}

# run COMMAND...: prints the command with --dry_run, else runs it.
run() {
  if ((dry_run)); then
    quote "$@"
    echo
  else
    "$@"
  fi
}

# describe_status STATUS: prints in words how a process ended.
describe_status() {
  local signal
  if (($1 > 128)) && signal=$(kill -l $(($1 - 128)) 2>/dev/null); then
    echo "was ended by SIG$signal"
  else
    echo "failed with status $1"
  fi
}

# wait_through_signals PID: waits for a process and leaves its status in `status`. A signal ends `wait` but not the
# process: the traps of the caller set `interrupted`.
wait_through_signals() {
  while :; do
    interrupted=0
    # shellcheck disable=SC2034
    status=0
    # shellcheck disable=SC2034
    wait "$1" || status=$?
    ((interrupted)) || return 0
  done
}

# Processes that run side by side: `start` starts them, the caller puts them into `running`, `wait_all` waits for them.
running=()   # process ids
numbers=()   # process id -> number of the process
prefixers=() # process ids of the readers that prefix lines
pipes=0

# prefix_lines NUMBER: prefixes lines with [NUMBER]; ignores signals, so that the last lines of a process are shown.
prefix_lines() {
  trap '' INT TERM
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

# start NUMBER COMMAND...: starts a process whose lines are prefixed, and leaves its id in `started`. Needs a folder `work`.
# With own_groups=1 it has a process group of its own, which Ctrl-C at a terminal does not reach.
start() {
  # shellcheck disable=SC2154
  local pipe=$work/pipe.$((++pipes))
  mkfifo "$pipe"
  prefix_lines "$1" <"$pipe" &
  prefixers+=("$!")
  if ((${own_groups:-0})); then set -m; fi
  "${@:2}" >"$pipe" 2>&1 </dev/null &
  set +m
  # shellcheck disable=SC2034
  started=$!
  numbers[$!]=$1
}

# wait_all ON_EXIT TICK: waits for all of `running` and for their last lines. Calls ON_EXIT NUMBER STATUS for each process
# that ends, and TICK after every look at them.
wait_all() {
  local pid code alive
  while ((${#running[@]})); do
    alive=()
    for pid in "${running[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then
        alive+=("$pid")
        continue
      fi
      code=0
      wait "$pid" 2>/dev/null || code=$?
      "$1" "${numbers[pid]}" "$code"
    done
    running=(${alive[@]+"${alive[@]}"})
    "$2"
    sleep 0.2 || true
  done
  wait ${prefixers[@]+"${prefixers[@]}"} || true
  prefixers=()
}
