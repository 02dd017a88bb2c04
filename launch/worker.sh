#!/usr/bin/env bash
# Runs one process of experiments.train where another launcher starts it: on a TPU VM, in a pod, in a Slurm step.
#   bash launch/worker.sh [flags] --config=FILE [flags of experiments.train]
# The environment describes the process (agentr1_jax/runtime/processes.py); VENV_PYTHON is the interpreter.
#   --attempt=NAME        can be started only once in a folder
#   --status_dir=FOLDER   write the status to FOLDER/AGENTR1_PROCESS_ID, and exit with the process's own
#   --data=FOLDER         folder of real data; one of a bucket, gs://..., is copied to this machine first
#   --secrets=FILE        export its lines NAME=VALUE, and remove it
#   --program=ablate      run this process's share of a grid, on its own (experiments.ablate)
# The exit status is that of the process, except that it is 143 where the process was told to stop, saved and exited with
# 0: a run that was preempted must not be taken for one that has finished.
#   bash launch/worker.sh --stop [--attempt=NAME] [--seconds=10] [--unless_detached]
# tells the attempts of this folder to stop, and kills them after that time. The named attempt cannot start afterwards.
# With --unless_detached a detached run is left alone, and the status is 2.
#   bash launch/worker.sh --status
# says what runs in this folder.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
attempt=
status_dir=
secrets_file=
seconds=10
action=run
unless_detached=0
while (($#)); do
  case $1 in
    --attempt=*) attempt=${1#*=} ;;
    --status_dir=*) status_dir=${1#*=} ;;
    --data=* | --program=*) take_common_flag "$1" ;;
    --secrets=*) secrets_file=${1#*=} ;;
    --seconds=*) seconds=${1#*=} ;;
    --stop | --status) action=${1#--} ;;
    --unless_detached) unless_detached=1 ;;
    --config*) break ;;
    *) fail_unknown_flag "$1" "See the head of launch/worker.sh" ;;
  esac
  shift
done
require_whole_number --seconds "$seconds"

# live_processes PATTERN: prints the ids of the live processes of this folder's attempts and of its supervisor, whose command
# matches. An id that another program has by now is left out.
live_processes() {
  local file pid
  for file in worker.*.pids; do
    [[ -e $file ]] || continue
    while read -r pid; do
      if tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qE "$1"; then echo "$pid"; fi
    done <"$file" 2>/dev/null
  done
}

ours='launch/(worker|supervise)\.sh|experiments\.(train|ablate|fetch_data)'
if [[ $action == status ]]; then
  processes=$(live_processes "$ours")
  if [[ -e detached.state ]]; then
    echo "detached: $(<detached.state)$([[ -n $processes ]] || echo '; nothing runs any more')"
  else
    if [[ -n $processes ]]; then echo 'runs for a launcher'; else echo 'nothing runs'; fi
  fi
  exit
fi
if [[ $action == stop ]]; then
  if ((unless_detached)) && [[ -n $(live_processes 'launch/supervise\.sh') ]]; then
    fail "a detached run is at work on $(hostname): look at it with tpu_vm.sh status, end it with tpu_vm.sh stop"
  fi
  if [[ -n $attempt ]]; then (set -o noclobber && : >"worker.$attempt.pids") 2>/dev/null || true; fi
  for pid in $(live_processes "$ours"); do kill -TERM "$pid" 2>/dev/null || true; done
  while [[ -n $(live_processes "$ours") ]] && ((SECONDS < seconds)); do sleep 0.2; done
  for pid in $(live_processes "$ours"); do kill -KILL "$pid" 2>/dev/null || true; done
  exit
fi

for variable in AGENTR1_COORDINATOR AGENTR1_NUM_PROCESSES AGENTR1_PROCESS_ID VENV_PYTHON; do
  require "$variable" "${!variable:-}"
done
pids=/dev/null
if [[ -n $attempt ]]; then
  pids=worker.$attempt.pids
  # gcloud repeats a command whose connection was lost; the other processes are in the middle of a run by then.
  (set -o noclobber && echo $$ >"$pids") 2>/dev/null || {
    echo "error: attempt $attempt was started or stopped here before; was the connection to it lost?" >&2
    exit 1
  }
fi
if [[ -n $secrets_file ]]; then read_secrets "$secrets_file"; fi
process=$AGENTR1_PROCESS_ID
if [[ $program == ablate ]]; then
  set -- --share="$process/$AGENTR1_NUM_PROCESSES" "$@"
  unset AGENTR1_COORDINATOR AGENTR1_NUM_PROCESSES AGENTR1_PROCESS_ID
fi

child=
stopped=0
trap 'stopped=1; interrupted=1; if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi' TERM INT
# Huge pages for large arrays (agentr1_jax/runtime/processes.py), unless the user has set this variable.
export PYTHONUNBUFFERED=1 GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

# run_program NAME ARGUMENTS...: runs a program of experiments/, to which signals are passed on, and sets `status`.
run_program() {
  "$VENV_PYTHON" -m "experiments.$1" "${@:2}" </dev/null &
  child=$!
  echo "$child" >>"$pids"
  if ((stopped)); then kill -TERM "$child" 2>/dev/null || true; fi
  wait_through_signals "$child"
}

status=0
case $data in
  gs://*)
    copy=$(dirname "$PWD")/agentr1_data/${data#gs://}
    run_program fetch_data "$data" "$copy"
    export AGENTR1_DATA="$copy"
    ;;
  ?*) export AGENTR1_DATA="$data" ;;
esac
if ((!status)); then run_program "$program" "$@"; fi
report=$status
if ((stopped && status == 0)); then report=143; fi
[[ -n $status_dir ]] || exit "$report"
echo "$report" >"$status_dir/$process"
exit "$status"
