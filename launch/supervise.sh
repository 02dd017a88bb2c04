#!/usr/bin/env bash
# Keeps one process of a detached run going after its launcher has left (launch/tpu_vm.sh --detach):
#   bash launch/supervise.sh [--restarts=3] [--pause_seconds=60] [--secrets=FILE] [flags of worker.sh] --config=FILE [flags]
# After a failure the process is started again. The pause is for the other processes, which notice the loss of this one by
# its missing heartbeat and are started again as well. detached.state says how it stands; the caller keeps the output.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pause_seconds=60
flags=()
while (($#)); do
  case $1 in
    --restarts=*) take_common_flag "$1" ;;
    --pause_seconds=*) pause_seconds=${1#*=} ;;
    --secrets=*) read_secrets "${1#*=}" ;;
    --config*) break ;;
    *) flags+=("$1") ;;
  esac
  shift
done
require_whole_number --restarts "$restarts"
require_whole_number --pause_seconds "$pause_seconds"

# tell STATE...: says how the run stands, and since when.
tell() {
  say "$*"
  echo "$* ($(date -u +%Y-%m-%dT%H:%M:%SZ))" >detached.state
}

echo $$ >worker.supervisor.pids
child=
stopping=0
# worker.sh --stop tells the worker, too, which saves.
trap 'stopping=1; interrupted=1; if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi' TERM INT
for ((restart = 0; ; restart++)); do
  tell "running, restart $restart of $restarts"
  bash launch/worker.sh --attempt="detached.$restart" ${flags[@]+"${flags[@]}"} "$@" &
  child=$!
  wait_through_signals "$child"
  child=
  if ((status == 0)); then tell "finished"; exit; fi
  if ((stopping || status == 143)); then tell "stopped; the run can be resumed"; exit; fi
  reason="worker $AGENTR1_PROCESS_ID $(describe_status "$status")"
  if ((status == 2)); then tell "$reason, a mistake of the user: see the log"; exit 2; fi
  if ((restart >= restarts)); then tell "$reason; no restart is left: see the log"; exit "$status"; fi
  tell "$reason; starts again in $pause_seconds s"
  for ((waited = 0; waited < pause_seconds && !stopping; waited++)); do sleep 1 || true; done
  if ((stopping)); then tell "stopped; the run can be resumed"; exit; fi
done
