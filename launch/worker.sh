#!/usr/bin/env bash
# Runs one process of experiments.train where another launcher starts it: on a TPU VM, in a pod, in a Slurm step.
#   bash launch/worker.sh [--attempt=NAME] [--status_dir=FOLDER] --config=FILE [flags of experiments.train]
# The environment describes the process (agentr1_jax/runtime/processes.py); VENV_PYTHON is the interpreter.
# The exit status is that of the process, except that it is 143 where the process was told to stop, saved and exited with
# 0: a run that was preempted must not be taken for one that has finished.
# With --status_dir this status is written to FOLDER/AGENTR1_PROCESS_ID, and the exit status is the process's own.
# An --attempt can be started only once in a folder.
#   bash launch/worker.sh --stop [--attempt=NAME] [--seconds=10]
# tells the attempts of this folder to stop, and kills them after that time. The named attempt cannot start afterwards.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
attempt=
status_dir=
seconds=10
stop=0
while (($#)); do
  case $1 in
    --config*) break ;;
    --attempt=*) attempt=${1#*=} ;;
    --status_dir=*) status_dir=${1#*=} ;;
    --seconds=*) seconds=${1#*=} ;;
    --stop) stop=1 ;;
    *) fail_unknown_flag "$1" "See the head of launch/worker.sh" ;;
  esac
  shift
done
require_whole_number --seconds "$seconds"

# Prints the ids of the live processes of this folder's attempts: of this script and of the training. An id that another
# program has by now is left out.
live_attempts() {
  local file pid
  for file in worker.*.pids; do
    [[ -e $file ]] || continue
    while read -r pid; do
      if tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qE 'launch/worker\.sh|experiments\.train'; then echo "$pid"; fi
    done <"$file" 2>/dev/null
  done
}

if ((stop)); then
  if [[ -n $attempt ]]; then (set -o noclobber && : >"worker.$attempt.pids") 2>/dev/null || true; fi
  for pid in $(live_attempts); do kill -TERM "$pid" 2>/dev/null || true; done
  while [[ -n $(live_attempts) ]] && ((SECONDS < seconds)); do sleep 0.2; done
  for pid in $(live_attempts); do kill -KILL "$pid" 2>/dev/null || true; done
  exit
fi

for name in AGENTR1_COORDINATOR AGENTR1_NUM_PROCESSES AGENTR1_PROCESS_ID VENV_PYTHON; do require "$name" "${!name:-}"; done
pids=/dev/null
if [[ -n $attempt ]]; then
  pids=worker.$attempt.pids
  # gcloud repeats a command whose connection was lost; the other processes are in the middle of a run by then.
  (set -o noclobber && echo $$ >"$pids") 2>/dev/null || {
    echo "error: attempt $attempt was started or stopped here before; was the connection to it lost?" >&2
    exit 1
  }
fi

child=
stopped=0
trap 'stopped=1; interrupted=1; if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi' TERM INT
# Huge pages for large arrays (agentr1_jax/runtime/processes.py), unless the user has set this variable.
export PYTHONUNBUFFERED=1 GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
"$VENV_PYTHON" -m experiments.train "$@" </dev/null &
child=$!
echo "$child" >>"$pids"
if ((stopped)); then kill -TERM "$child" 2>/dev/null || true; fi
wait_through_signals "$child"
report=$status
if ((stopped && status == 0)); then report=143; fi
[[ -n $status_dir ]] || exit "$report"
echo "$report" >"$status_dir/$AGENTR1_PROCESS_ID"
exit "$status"
