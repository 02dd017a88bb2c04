#!/usr/bin/env bash
# Runs experiments.train on all workers of a Cloud TPU slice, which it creates or uses again:
#   bash launch/tpu_vm.sh --name=mine --zone=us-west4-a --type=v5litepod-16 [flags] \
#     --config=configs/agentr1_grpo.py --config.run_dir=/shared/runs/mine [flags of experiments.train]
# What it needs: the gcloud CLI (`gcloud auth login`), a project with the TPU API enabled and quota for that type in that
# zone (of spot chips for --spot), the roles TPU Admin and Service Account User, an SSH key without a passphrase or in
# ssh-agent, workers that reach the internet, and storage for the run that outlives the slice and that all workers see:
# gs://, if their service account may use the bucket, or a file system that --setup mounts. Workers talk to worker 0 on
# port 8476; the default network lets them.
# Tested with a stand-in for gcloud only.
# Flags:
#   --name=NAME --zone=ZONE      of the TPU VM, or of the queued resource and its TPU VM; needed
#   --type=TYPE                  v5litepod-N, v5p-N, v6e-N or v4-N; needed
#   --project=PROJECT            default: gcloud's own
#   --runtime=VERSION            default: the one that Google names for the type
#   --queued                     ask for a queued resource instead of a TPU VM at once
#   --spot                       chips that may be taken away
#   --restarts=3                 how often to start again, after a failure or on a new slice after a preemption
#   --delete                     delete the slice at the end, whatever the end
#   --env=NAME=VALUE             a variable for the workers, may be repeated; it can be seen in their process lists
#   --setup=COMMAND              run on each worker before the training, every time, e.g. to mount /shared
#   --create_flag=FLAG           a further flag of gcloud's create, may be repeated, e.g. --create_flag=--network=lab
#   --internal_ip                reach the workers by their internal addresses
#   --poll_seconds=30            how often to look at the slice
#   --save_seconds=600           how long the workers may take to save when told to stop
#   --dry_run                    print the commands, run none
# Lines of worker k begin with [k]. The same command again uses the slice again and resumes the run. Ctrl-C or SIGTERM has
# all workers save and leave; a second one does not wait for them.
# Status 0: came to its end, or stopped and saved; 2: a user's mistake, never started again; 1 and others: failed.
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
    *) no_such_flag "$1" "$hint" ;;
  esac
  shift
done
needed --name "$name"
needed --zone "$zone"
needed --type "$type"
(($#)) || fail "--config=FILE is missing. $hint"
whole_number --restarts "$restarts"
whole_number --poll_seconds "$poll_seconds" 1
whole_number --save_seconds "$save_seconds"

# Runtime versions: cloud.google.com/tpu/docs/runtimes. The number in a type counts chips (v5litepod, v6e; up to 8 of
# them in one host) or cores, two a chip (v4, v5p); more chips are four to a host.
number=${type##*-}
whole_number "the number in --type=$type" "$number" 1
case $type in
  v5litepod-*) default=v2-alpha-tpuv5-lite chips=$number most=8 ;;
  v6e-*) default=v2-alpha-tpuv6e chips=$number most=8 ;;
  v5p-*) default=v2-alpha-tpuv5 chips=$((number / 2)) most=4 ;;
  v4-*) default=tpu-ubuntu2204-base chips=$((number / 2)) most=4 ;;
  *) fail "--type=$type is unknown; known are v5litepod-N, v5p-N, v6e-N and v4-N" ;;
esac
runtime=${runtime:-$default}
workers=$((chips <= most ? 1 : chips / 4))

kept=0
for argument; do
  case $argument in --config.run_dir=gs://?* | --config.run_dir=/?*) kept=1 ;; esac
done
if ((!kept && (restarts || delete))); then
  fail "the disks of a TPU VM end with it, and a run resumes from its folder: give --config.run_dir=gs://BUCKET/FOLDER" \
    "or a folder that --setup mounts, /..., or --restarts=0 without --delete"
fi
need_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ((dry_run)); then
  work=FOLDER
else
  work=$(mktemp -d)
fi
stopping=0
pipes=0
running=()
helpers=()
created=0

# shellcheck source=launch/tpu_slice.sh
source launch/tpu_slice.sh

# ssh WORKER COMMAND: without questions, and not for longer than the connection lasts.
ssh_to() {
  tpu tpu-vm ssh "$name" --worker="$1" ${ssh_flags[@]+"${ssh_flags[@]}"} --ssh-flag=-oBatchMode=yes \
    --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 --command="$2"
}

copy_to() {
  tpu tpu-vm scp "$work/agentr1_jax.tgz" "$name:agentr1_jax.tgz" --worker="$1" \
    ${ssh_flags[@]+"${ssh_flags[@]}"} --scp-flag=-oBatchMode=yes
}

# Ends what may be left of an earlier attempt, replaces the code, keeps the environment.
unpack='set -e; mkdir -p agentr1_jax'
unpack+='; if [ -e agentr1_jax/launch/worker.sh ]; then bash agentr1_jax/launch/worker.sh --stop; fi'
unpack+='; find agentr1_jax -mindepth 1 -maxdepth 1 ! -name .venv ! -name runs -exec rm -rf {} +'
unpack+='; tar -xzf agentr1_jax.tgz -C agentr1_jax; bash agentr1_jax/launch/tpu_install.sh'
if [[ -n $setup ]]; then unpack+="; bash -c $(quoted "$setup")"; fi

set_up_worker() {
  copy_to "$1" && ssh_to "$1" "$unpack"
}

# Prefixes lines; deaf to signals, so that the last words are still shown.
prefix_lines() {
  trap '' INT TERM
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

# start WORKER COMMAND...: in a process group of its own, which Ctrl-C at a terminal does not reach.
start() {
  local pipe=$work/pipe.$((++pipes))
  mkfifo "$pipe"
  prefix_lines "$1" <"$pipe" &
  prefixers+=("$!")
  set -m
  "${@:2}" >"$pipe" 2>&1 </dev/null &
  set +m
  started=$!
  numbers[started]=$1
}

# Copies the code and installs the requirements: on worker 0 first, where gcloud makes SSH keys if there are none.
set_up() {
  local k code=0
  run tar -czf "$work/agentr1_jax.tgz" --exclude='./.*' --exclude=./runs --exclude=__pycache__ . || return 1
  if ((dry_run)); then
    for ((k = 0; k < workers; k++)); do set_up_worker "$k"; done
    return
  fi
  say "copying the code to $workers workers and installing its requirements"
  prefixers=()
  start 0 set_up_worker 0
  await "$started" || code=1
  running=()
  for ((k = 1; k < workers && !code; k++)); do
    start "$k" set_up_worker "$k"
    running+=("$started")
  done
  for k in ${running[@]+"${running[@]}"}; do await "$k" || code=1; done
  running=()
  wait "${prefixers[@]}" || true
  return "$code"
}

# Waits for a process that `start` started; ends it if a signal comes.
await() {
  while kill -0 "$1" 2>/dev/null && ((!stopping)); do sleep 0.2 || true; done
  if ((stopping)); then end_group TERM "$1"; fi
  wait "$1" 2>/dev/null
}

# worker_command K ADDRESS FLAGS...: what worker K runs.
worker_command() {
  local words=(env AGENTR1_COORDINATOR="$2:$coordinator_port" AGENTR1_NUM_PROCESSES="$workers" AGENTR1_PROCESS_ID="$1"
    VENV_PYTHON=.venv/bin/python ${variables[@]+"${variables[@]}"} bash launch/worker.sh --attempt="$restart" "${@:3}")
  echo "cd agentr1_jax && exec $(quoted "${words[@]}")"
}

# Has all workers told to stop, and those that are not there yet not start; they are killed after so many seconds.
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

# Leaves in `addresses` the internal addresses of the workers.
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

# Starts all workers and waits for all. Leaves in `status` what failed first, and in `reason` what that was.
train() {
  local k pid code next alive told=0
  deadline=0
  status=0
  reason=
  prefixers=()
  numbers=()
  if ((dry_run)); then
    for ((k = 0; k < workers; k++)); do ssh_to "$k" "$(worker_command "$k" "${addresses[0]}" "$@")"; done
    return
  fi
  for ((k = 0; k < workers; k++)); do
    start "$k" ssh_to "$k" "$(worker_command "$k" "${addresses[0]}" "$@")"
    running+=("$started")
  done
  next=$((SECONDS + poll_seconds))
  while ((${#running[@]})); do
    if ((stopping > told)); then
      told=$stopping
      if ((told == 1)); then
        say "telling the workers to save and leave"
        stop_workers "$save_seconds"
      else
        deadline=$SECONDS
      fi
    fi
    alive=()
    for pid in "${running[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then
        alive+=("$pid")
        continue
      fi
      code=0
      wait "$pid" 2>/dev/null || code=$?
      # Told by this launcher to stop, it saved.
      if ((code == 143 && stopping)); then code=0; fi
      if ((code && !status)); then
        status=$code
        reason="worker ${numbers[pid]} $(described "$code")"
        ((stopping)) || stop_workers 10
      fi
    done
    running=(${alive[@]+"${alive[@]}"})
    if ((deadline && SECONDS >= deadline)); then
      for pid in ${running[@]+"${running[@]}"}; do end_group KILL "$pid"; done
    elif ((!deadline && SECONDS >= next && ${#running[@]})); then
      next=$((SECONDS + poll_seconds))
      if look && [[ $state != READY && $state != ACTIVE && $state != REPAIRING ]]; then
        status=1
        reason="$name is $state"
        deadline=$SECONDS
      fi
    fi
    sleep 0.2 || true
  done
  # A worker whose connection was lost is told all the same.
  for pid in ${helpers[@]+"${helpers[@]}"}; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2 || true; done
  done
  for pid in ${helpers[@]+"${helpers[@]}"}; do end_group TERM "$pid"; done
  helpers=()
  wait "${prefixers[@]}" || true
}

leave() {
  local pid
  for pid in ${running[@]+"${running[@]}"} ${helpers[@]+"${helpers[@]}"}; do end_group TERM "$pid"; done
  rm -rf "$work"
}

finish() {
  if ((delete)); then
    stopping=0
    remove || say "could not delete $name, see above; it goes on costing"
  elif ((!dry_run)); then
    say "$name is left as it is; delete it with: $(dry_run=1 remove)"
  fi
  exit "$1"
}

if ((dry_run)); then
  restart=0
  look
  create
  find_workers
  set_up
  train "$@"
  if ((delete)); then remove; fi
  exit
fi

trap leave EXIT
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
  # Nobody but a user deletes a slice that was not preempted.
  if look && [[ $reason != "could not make"* && ($state == ABSENT || $state == DELETING) ]]; then
    say "somebody deleted $name: not started again"
    exit 1
  fi
  say "restart $((restart + 1)) of $restarts"
  if [[ $reason == "could not make"* ]]; then pause "$poll_seconds"; fi
done
