# Sourced by the launchers: messages, checks of flags, commands that --dry_run prints, and waiting for processes.
# All launchers take their own flags first; --config=FILE and everything after it goes to experiments.train, or to
# experiments.ablate with --program=ablate.
# shellcheck shell=bash
# shellcheck disable=SC2034
# launch/environment.sh sources this file after the launcher has read its flags.
if ((${common_is_sourced:-0})); then return; fi
common_is_sourced=1
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
  fail "unknown flag '$1'; flags of the program come after --config=FILE. $2"
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

# Flags that mean the same for all launchers; docs/pods.md describes them.
name=
restarts=3
save_seconds=600
data=
program=train
check=1
variables=()
secrets=()

# take_action WORD: takes what is asked of a run that is there; fails where the word is none of these, and the action is to run.
action=run
take_action() {
  case $1 in status | logs | stop) action=$1 ;; *) return 1 ;; esac
}

# take_common_flag FLAG: fails where the launcher has to know the flag itself.
take_common_flag() {
  case $1 in
    --name=*) name=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --save_seconds=*) save_seconds=${1#*=} ;;
    --data=*) data=${1#*=} ;;
    --program=*) program=${1#*=} ;;
    --env=[A-Za-z_]*=*) variables+=("${1#*=}") ;;
    --env=*) fail "$1: it must be --env=NAME=VALUE" ;;
    --secret=*) secrets+=("${1#*=}") ;;
    --no_check) check=0 ;;
    --dry_run) dry_run=1 ;;
    *) return 1 ;;
  esac
}

# check_common_flags FLAGS...: checks what take_common_flag took; FLAGS are those of the program.
check_common_flags() {
  local secret
  (($#)) || fail "--config=FILE is missing. ${hint:-}"
  require_whole_number --restarts "$restarts"
  require_whole_number --save_seconds "$save_seconds"
  case $program in train | ablate) ;; *) fail "--program=$program: it must be train or ablate" ;; esac
  case $data in
    '' | gs://?* | /?*) ;;
    *) fail "--data=$data: it must be gs://BUCKET/FOLDER, or a folder /... that every process sees" ;;
  esac
  for secret in ${secrets[@]+"${secrets[@]}"}; do
    [[ $secret =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--secret=$secret: it must be the name of an environment variable"
    [[ -n ${!secret:-} ]] || fail "--secret=$secret: the environment here has no such variable; export $secret=... first"
    [[ ${!secret} != *$'\n'* ]] || fail "--secret=$secret: it has several lines; put it into a file that --setup fetches"
  done
}

# has_durable_folder ROOT FLAGS...: whether the run's folder (of a grid, --out) is in a bucket or below ROOT.
has_durable_folder() {
  local root=$1 argument key=--config.run_dir
  if [[ $program == ablate ]]; then key=--out; fi
  for argument in "${@:2}"; do
    case $argument in "$key=gs://"?* | "$key=$root"?*) return 0 ;; esac
  done
  return 1
}

# check_run SHAPE FLAGS...: ends the launcher where the program would refuse its flags or data on the workers, before there
# are any. SHAPE describes their devices; see experiments/preflight.py.
check_run() {
  ((check)) || return 0
  run env AGENTR1_DATA="$data" JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=2 \
    "$VENV_PYTHON" -m "experiments.$program" --check="$1" "${@:2}" ||
    fail "the check of the run failed, see above: nothing was asked for, nothing has started"
}

# write_secrets FILE: writes NAME=VALUE lines that only the user can read. No value is in an argument of a process.
write_secrets() {
  local secret
  (umask 077 && for secret in "${secrets[@]}"; do printf '%s=%s\n' "$secret" "${!secret}"; done >"$1")
}

# read_secrets FILE: exports what write_secrets wrote, and removes the file.
read_secrets() {
  local line
  while IFS= read -r line; do export "${line%%=*}=${line#*=}"; done <"$1"
  rm -f "$1"
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
