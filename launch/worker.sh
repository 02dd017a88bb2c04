#!/usr/bin/env bash
# Runs one of several processes where another launcher starts it: on a TPU VM, in a pod, in a Slurm step.
#   bash launch/worker.sh [--attempt=NAME] [--status_dir=FOLDER] --config=FILE [flags of experiments.train]
# The process is described in the environment (agentr1_jax/runtime/processes.py), all of it explicit; VENV_PYTHON is the
# interpreter. Its status is this script's, with one exception: a process that was told to stop saves and leaves with 0,
# and this script then with 143, so that nobody takes a run that was preempted for one that came to its end.
# With --status_dir that status is written to FOLDER/AGENTR1_PROCESS_ID, and this script leaves with the process's own.
# An --attempt starts only once in a folder.
#   bash launch/worker.sh --stop [--attempt=NAME] [--seconds=10]
# ends the attempts that were started in this folder: they are told to stop, and killed after that time. The attempt
# that is named cannot start afterwards.
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
    *) no_such_flag "$1" "See the head of launch/worker.sh" ;;
  esac
  shift
done
whole_number --seconds "$seconds"

# The processes of attempts in this folder that are alive: this script's and, behind it, the training's.
# A number that another program has by now is not taken for one of them.
alive_attempts() {
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
  for pid in $(alive_attempts); do kill -TERM "$pid" 2>/dev/null || true; done
  while [[ -n $(alive_attempts) ]] && ((SECONDS < seconds)); do sleep 0.2; done
  for pid in $(alive_attempts); do kill -KILL "$pid" 2>/dev/null || true; done
  exit
fi

for name in AGENTR1_COORDINATOR AGENTR1_NUM_PROCESSES AGENTR1_PROCESS_ID VENV_PYTHON; do needed "$name" "${!name:-}"; done
pids=/dev/null
if [[ -n $attempt ]]; then
  pids=worker.$attempt.pids
  # gcloud starts a command again whose connection was lost; the others are in the middle of a run by then.
  (set -o noclobber && echo $$ >"$pids") 2>/dev/null || {
    echo "error: attempt $attempt was started or stopped here before; was the connection to it lost?" >&2
    exit 1
  }
fi

child=
stopped=0
interrupted=0
trap 'stopped=1; interrupted=1; if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi' TERM INT
# Large arrays in huge pages (agentr1_jax/runtime/memory.py); a setting of the user's own stands.
export PYTHONUNBUFFERED=1 GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
"$VENV_PYTHON" -m experiments.train "$@" </dev/null &
child=$!
echo "$child" >>"$pids"
if ((stopped)); then kill -TERM "$child" 2>/dev/null || true; fi
while :; do
  interrupted=0
  status=0
  wait "$child" || status=$?
  # A signal ends `wait`, not the training.
  ((interrupted)) || break
done
shown=$status
if ((stopped && status == 0)); then shown=143; fi
[[ -n $status_dir ]] || exit "$shown"
echo "$shown" >"$status_dir/$AGENTR1_PROCESS_ID"
exit "$status"
