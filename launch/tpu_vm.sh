#!/usr/bin/env bash
# Runs experiments.train on all workers of a Cloud TPU slice, which it creates or reuses:
#   bash launch/tpu_vm.sh --name=mine --zone=us-west4-a --type=v5litepod-16 [flags] \
#     --config=configs/agentr1_grpo.py --config.run_dir=/shared/runs/mine [flags of experiments.train]
# Requirements: the gcloud CLI (`gcloud auth login`); a project with the TPU API enabled and quota for the type in the zone
# (spot quota for --spot); the roles TPU Admin and Service Account User; an SSH key without a passphrase or in ssh-agent;
# internet access of the workers; storage for the run that outlives the slice and that all workers see: gs://, if their
# service account may use the bucket, or a file system that --setup mounts. Workers connect to worker 0 on port 8476, which
# the default network allows.
# Tested with a stand-in for gcloud only.
# Flags:
#   --name=NAME --zone=ZONE      name and zone of the TPU VM, or of the queued resource and its TPU VM; required
#   --type=TYPE                  v5litepod-N, v5p-N, v6e-N or v4-N; required
#   --project=PROJECT            default: that of gcloud
#   --runtime=VERSION            default: the version that Google recommends for the type
#   --queued                     request a queued resource instead of a TPU VM
#   --spot                       use preemptible chips
#   --restarts=3                 most restarts, after a failure or, on a new slice, after a preemption
#   --delete                     delete the slice at the end, also after a failure
#   --env=NAME=VALUE             environment variable of the workers, visible in their process lists; may be repeated
#   --setup=COMMAND              command to run on each worker before every start, e.g. to mount /shared
#   --create_flag=FLAG           further flag of gcloud's create, e.g. --create_flag=--network=lab; may be repeated
#   --internal_ip                connect to the workers by their internal addresses
#   --poll_seconds=30            seconds between reads of the slice's state
#   --save_seconds=600           time for the workers to save when they are told to stop
#   --dry_run                    print the commands and run none
# The lines of worker k begin with [k]. The same command reuses the slice and resumes the run. On Ctrl-C or SIGTERM all
# workers save and exit; a second one ends them at once.
# Exit status 0: finished, or stopped and saved; 2: mistake of the user, nothing is started again; others: failed.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
hint="The flags are at the head of launch/tpu_vm.sh"
name=
zone=
type=
project=
runtime=
queued=0
spot=0
restarts=3
delete=0
variables=()
setup=
create_flags=()
ssh_flags=()
poll_seconds=30
save_seconds=600
while (($#)); do
  case $1 in
    --config*) break ;;
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --runtime=*) runtime=${1#*=} ;;
    --queued) queued=1 ;;
    --spot) spot=1 ;;
    --restarts=*) restarts=${1#*=} ;;
    --delete) delete=1 ;;
    --env=[A-Za-z_]*=*) variables+=("${1#*=}") ;;
    --env=*) fail "$1: it must be --env=NAME=VALUE" ;;
    --setup=*) setup=${1#*=} ;;
    --create_flag=*) create_flags+=("${1#*=}") ;;
    --internal_ip) ssh_flags+=(--internal-ip) ;;
    --poll_seconds=*) poll_seconds=${1#*=} ;;
    --save_seconds=*) save_seconds=${1#*=} ;;
    --dry_run) dry_run=1 ;;
    *) fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --name "$name"
require --zone "$zone"
require --type "$type"
(($#)) || fail "--config=FILE is missing. $hint"
require_whole_number --restarts "$restarts"
require_whole_number --poll_seconds "$poll_seconds" 1
require_whole_number --save_seconds "$save_seconds"

# Runtime versions: cloud.google.com/tpu/docs/runtimes. The number in a type counts chips (v5litepod, v6e) or cores, two
# per chip (v4, v5p). A host has 4 chips; a v5litepod or v6e slice of at most 8 chips is one host.
number=${type##*-}
require_whole_number "the number in --type=$type" "$number" 1
case $type in
  v5litepod-*) default=v2-alpha-tpuv5-lite chips=$number most=8 ;;
  v6e-*) default=v2-alpha-tpuv6e chips=$number most=8 ;;
  v5p-*) default=v2-alpha-tpuv5 chips=$((number / 2)) most=4 ;;
  v4-*) default=tpu-ubuntu2204-base chips=$((number / 2)) most=4 ;;
  *) fail "--type=$type is unknown; known are v5litepod-N, v5p-N, v6e-N and v4-N" ;;
esac
runtime=${runtime:-$default}
workers=$((chips <= most ? 1 : chips / 4))

durable=0
for argument; do
  case $argument in --config.run_dir=gs://?* | --config.run_dir=/?*) durable=1 ;; esac
done
if ((!durable && (restarts || delete))); then
  fail "the disks of a TPU VM are deleted with it, and a run resumes from its folder: give --config.run_dir=gs://BUCKET/FOLDER" \
    "or a folder that --setup mounts, /..., or --restarts=0 without --delete"
fi
require_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ((dry_run)); then
  work=FOLDER
else
  work=$(mktemp -d)
fi
stopping=0
helpers=()
created=0
# Ctrl-C at a terminal reaches this script only, which passes it on to the workers.
# shellcheck disable=SC2034
own_groups=1

# shellcheck source=launch/tpu_slice.sh
source launch/tpu_slice.sh

# ssh_to WORKER COMMAND: never prompts, and fails when the connection is lost.
ssh_to() {
  tpu tpu-vm ssh "$name" --worker="$1" ${ssh_flags[@]+"${ssh_flags[@]}"} --ssh-flag=-oBatchMode=yes \
    --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 --command="$2"
}

copy_to() {
  tpu tpu-vm scp "$work/agentr1_jax.tgz" "$name:agentr1_jax.tgz" --worker="$1" \
    ${ssh_flags[@]+"${ssh_flags[@]}"} --scp-flag=-oBatchMode=yes
}

# On a worker: ends what is left of an earlier attempt, replaces the code and keeps the environment.
unpack='set -e; mkdir -p agentr1_jax'
unpack+='; if [ -e agentr1_jax/launch/worker.sh ]; then bash agentr1_jax/launch/worker.sh --stop; fi'
unpack+='; find agentr1_jax -mindepth 1 -maxdepth 1 ! -name .venv ! -name runs -exec rm -rf {} +'
unpack+='; tar -xzf agentr1_jax.tgz -C agentr1_jax; bash agentr1_jax/launch/tpu_install.sh'
if [[ -n $setup ]]; then unpack+="; bash -c $(quote "$setup")"; fi

set_up_worker() {
  copy_to "$1" && ssh_to "$1" "$unpack"
}

# on_set_up NUMBER STATUS
on_set_up() {
  if (($2)); then set_up_failed=1; fi
}

# Ends the set-up if the launcher is told to stop.
end_if_stopping() {
  local pid
  if ((stopping)); then
    for pid in ${running[@]+"${running[@]}"}; do end_group TERM "$pid"; done
  fi
}

# Copies the code to the workers and installs the requirements; on worker 0 first, where gcloud makes SSH keys if there are
# none.
set_up() {
  local k
  run tar -czf "$work/agentr1_jax.tgz" --exclude='./.*' --exclude=./runs --exclude=__pycache__ . || return 1
  if ((dry_run)); then
    for ((k = 0; k < workers; k++)); do set_up_worker "$k"; done
    return
  fi
  say "copying the code to $workers workers and installing its requirements"
  set_up_failed=0
  start 0 set_up_worker 0
  running=("$started")
  wait_all on_set_up end_if_stopping
  for ((k = 1; k < workers && !set_up_failed; k++)); do
    start "$k" set_up_worker "$k"
    running+=("$started")
  done
  wait_all on_set_up end_if_stopping
  return "$set_up_failed"
}

# worker_command K ADDRESS FLAGS...: prints the command of worker K; ADDRESS is that of worker 0.
worker_command() {
  local words=(env AGENTR1_COORDINATOR="$2:$coordinator_port" AGENTR1_NUM_PROCESSES="$workers" AGENTR1_PROCESS_ID="$1"
    VENV_PYTHON=.venv/bin/python ${variables[@]+"${variables[@]}"} bash launch/worker.sh --attempt="$restart" "${@:3}")
  echo "cd agentr1_jax && exec $(quote "${words[@]}")"
}

# stop_workers SECONDS: tells all workers to stop, also those that have yet to start; kills them after that time.
stop_workers() {
  local k
  for ((k = 0; k < workers; k++)); do
    set -m
    ssh_to "$k" "bash agentr1_jax/launch/worker.sh --stop --attempt=$restart --seconds=$1" \
      >/dev/null 2>&1 </dev/null &
    set +m
    helpers+=("$!")
  done
  deadline=$((SECONDS + $1 + 30))
}

# Sets `addresses` to the internal addresses of the workers.
find_workers() {
  local listed
  if ((dry_run)); then
    tpu tpu-vm describe "$name" '--format=value(networkEndpoints[].ipAddress)'
    addresses=(INTERNAL_ADDRESS_OF_WORKER_0)
    return
  fi
  listed=$(tpu tpu-vm describe "$name" '--format=value(networkEndpoints[].ipAddress)') || return 1
  IFS=';' read -r -a addresses <<<"$listed"
  workers=${#addresses[@]}
  ((workers))
}

# on_worker_exit NUMBER STATUS
on_worker_exit() {
  # Told to stop by this launcher, the worker has saved.
  if (($2 == 143 && stopping)); then return; fi
  if (($2 && !status)); then
    status=$2
    reason="worker $1 $(describe_status "$2")"
    ((stopping)) || stop_workers 10
  fi
}

# Passes signals on to the workers, kills them after the deadline, and watches the state of the slice.
watch_workers() {
  local pid
  if ((stopping > stops)); then
    stops=$stopping
    if ((stops == 1)); then
      say "telling the workers to save and exit"
      stop_workers "$save_seconds"
    else
      deadline=$SECONDS
    fi
  fi
  if ((deadline && SECONDS >= deadline)); then
    for pid in ${running[@]+"${running[@]}"}; do end_group KILL "$pid"; done
  elif ((!deadline && SECONDS >= next_look && ${#running[@]})); then
    next_look=$((SECONDS + poll_seconds))
    if read_state && [[ $state != READY && $state != ACTIVE && $state != REPAIRING ]]; then
      status=1
      reason="$name is $state"
      deadline=$SECONDS
    fi
  fi
}

# train FLAGS...: starts all workers and waits for them. Sets `status` and `reason` to those of the first failure.
train() {
  local k pid
  stops=0
  deadline=0
  status=0
  reason=
  if ((dry_run)); then
    for ((k = 0; k < workers; k++)); do ssh_to "$k" "$(worker_command "$k" "${addresses[0]}" "$@")"; done
    return
  fi
  for ((k = 0; k < workers; k++)); do
    start "$k" ssh_to "$k" "$(worker_command "$k" "${addresses[0]}" "$@")"
    running+=("$started")
  done
  next_look=$((SECONDS + poll_seconds))
  wait_all on_worker_exit watch_workers
  # A worker whose connection was lost is told to stop all the same.
  for pid in ${helpers[@]+"${helpers[@]}"}; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2 || true; done
    end_group TERM "$pid"
  done
  helpers=()
}

clean_up() {
  local pid
  for pid in ${running[@]+"${running[@]}"} ${helpers[@]+"${helpers[@]}"}; do end_group TERM "$pid"; done
  rm -rf "$work"
}

finish() {
  if ((delete)); then
    stopping=0
    remove || say "could not delete $name, see above; it is still billed"
  elif ((!dry_run)); then
    say "$name is left as it is; delete it with: $(dry_run=1 remove)"
  fi
  exit "$1"
}

if ((dry_run)); then
  restart=0
  read_state
  create
  find_workers
  set_up
  train "$@"
  if ((delete)); then remove; fi
  exit
fi

trap clean_up EXIT
trap 'stopping=$((stopping + 1))' INT TERM
for ((restart = 0; ; restart++)); do
  status=1
  reason="could not make $name ready"
  if make_ready; then
    reason="could not set up the workers of $name"
    if find_workers && set_up; then train "$@"; fi
  fi
  if ((stopping)); then
    if ((status)); then say "stopped; what was not saved is lost: $reason"; fi
    finish "$status"
  fi
  if ((status == 0)); then finish 0; fi
  say "$reason"
  if ((status == 2 || restart >= restarts)); then finish "$status"; fi
  # A slice that was not preempted and is gone was deleted by a user.
  if read_state && [[ $reason != "could not make"* && ($state == ABSENT || $state == DELETING) ]]; then
    say "somebody deleted $name: not started again"
    exit 1
  fi
  say "restart $((restart + 1)) of $restarts"
  if [[ $reason == "could not make"* ]]; then pause "$poll_seconds"; fi
done
