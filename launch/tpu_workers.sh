# Sourced by launch/tpu_vm.sh: sets up the workers of the slices, and starts, watches and stops their processes, over ssh.
# Processes are numbered slice by slice, as JAX numbers them: process p is worker p % hosts of slice p / hosts.
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154

# find_node PROCESS: sets `node` and `worker` to the TPU VM and its worker that a process runs on.
find_node() {
  node=$name
  if ((slices > 1)); then node=$name-$(($1 / hosts)); fi
  worker=$(($1 % hosts))
}

# ssh_to PROCESS COMMAND: never prompts, and fails when the connection is lost.
ssh_to() {
  local node worker
  find_node "$1"
  tpu tpu-vm ssh "$node" --worker="$worker" ${ssh_flags[@]+"${ssh_flags[@]}"} --ssh-flag=-oBatchMode=yes \
    --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 --command="$2"
}

# copy_to PROCESS FILE: copies a file of `work` to the home of a worker; it keeps its mode.
copy_to() {
  local node worker
  find_node "$1"
  tpu tpu-vm scp "$work/$2" "$node:$2" --worker="$worker" ${ssh_flags[@]+"${ssh_flags[@]}"} --scp-flag=-oBatchMode=yes
}

# On a worker: ends what is left of an earlier attempt, replaces the code and keeps the environment.
unpack='set -e; mkdir -p agentr1_jax'
unpack+='; if [ -e agentr1_jax/launch/worker.sh ]; then bash agentr1_jax/launch/worker.sh --stop --unless_detached; fi'
unpack+='; find agentr1_jax -mindepth 1 -maxdepth 1 ! -name .venv ! -name runs -exec rm -rf {} +'
unpack+='; tar -xzf agentr1_jax.tgz -C agentr1_jax'
unpack+="; bash agentr1_jax/launch/tpu_install.sh${packages[*]:+ $(quote "${packages[@]}")}"
if [[ -n $setup ]]; then unpack+="; bash -c $(quote "$setup")"; fi

set_up_worker() {
  copy_to "$1" agentr1_jax.tgz || return
  if ((${#secrets[@]})); then copy_to "$1" agentr1_jax.secrets || return; fi
  ssh_to "$1" "$unpack"
}

# on_set_up NUMBER STATUS
on_set_up() {
  if (($2 && set_up_failed != 2)); then set_up_failed=$(($2 == 2 ? 2 : 1)); fi
}

# Ends the set-up if the launcher is told to stop.
end_if_stopping() {
  local pid
  if ((stopping)); then
    for pid in ${running[@]+"${running[@]}"}; do end_group TERM "$pid"; done
  fi
}

# Copies the code to the workers and installs the requirements; on worker 0 first, where gcloud makes SSH keys if there are
# none. Returns 2 after a mistake of the user.
set_up() {
  local k
  run tar -czf "$work/agentr1_jax.tgz" --exclude='./.*' --exclude=./runs --exclude=__pycache__ . || return 1
  if ((dry_run)); then
    for ((k = 0; k < processes; k++)); do set_up_worker "$k"; done
    return
  fi
  if ((${#secrets[@]})); then write_secrets "$work/agentr1_jax.secrets"; fi
  say "copying the code to $processes workers and installing its requirements"
  set_up_failed=0
  start 0 set_up_worker 0
  running=("$started")
  wait_all on_set_up end_if_stopping
  for ((k = 1; k < processes && !set_up_failed; k++)); do
    start "$k" set_up_worker "$k"
    running+=("$started")
  done
  wait_all on_set_up end_if_stopping
  return "$set_up_failed"
}

# worker_command PROCESS FLAGS...: prints the command of a worker.
worker_command() {
  local script=(bash launch/worker.sh --attempt="$restart")
  local words=(env AGENTR1_COORDINATOR="${addresses[0]}:$coordinator_port" AGENTR1_NUM_PROCESSES="$processes"
    AGENTR1_PROCESS_ID="$1" VENV_PYTHON=.venv/bin/python)
  if ((slices > 1)) && [[ $program == train ]]; then
    words+=(MEGASCALE_COORDINATOR_ADDRESS="${addresses[0]}:$megascale_port" MEGASCALE_PORT="$megascale_port"
      MEGASCALE_NUM_SLICES="$slices" MEGASCALE_SLICE_ID="$(($1 / hosts))")
  fi
  if ((detach)); then script=(bash launch/supervise.sh --restarts="$restarts" --pause_seconds="$pause_seconds"); fi
  if ((${#secrets[@]})); then script+=(--secrets=../agentr1_jax.secrets); fi
  script+=(--program="$program" ${data:+"--data=$data"})
  words+=(${variables[@]+"${variables[@]}"} "${script[@]}" "${@:2}")
  if ((detach)); then
    echo "cd agentr1_jax && { setsid nohup $(quote "${words[@]}") >detached.log 2>&1 </dev/null & }"
  else
    echo "cd agentr1_jax && exec $(quote "${words[@]}")"
  fi
}

# stop_workers SECONDS: tells all workers to stop, also those that have yet to start; kills them after that time.
stop_workers() {
  local k
  for ((k = 0; k < processes; k++)); do
    set -m
    ssh_to "$k" "bash agentr1_jax/launch/worker.sh --stop --attempt=$restart --seconds=$1" \
      >/dev/null 2>&1 </dev/null &
    set +m
    helpers+=("$!")
  done
  deadline=$((SECONDS + $1 + 30))
}

# Sets `addresses` to the internal addresses of all workers, and `hosts` and `processes` to their numbers.
find_workers() {
  local listed own slice node
  addresses=()
  for ((slice = 0; slice < slices; slice++)); do
    node=$name
    if ((slices > 1)); then node=$name-$slice; fi
    if ((dry_run)); then
      tpu tpu-vm describe "$node" '--format=value(networkEndpoints[].ipAddress)'
      continue
    fi
    listed=$(tpu tpu-vm describe "$node" '--format=value(networkEndpoints[].ipAddress)') || return 1
    IFS=';' read -r -a own <<<"$listed"
    ((${#own[@]})) || return 1
    hosts=${#own[@]}
    addresses+=("${own[@]}")
  done
  if ((dry_run)); then addresses=(INTERNAL_ADDRESS_OF_WORKER_0); fi
  processes=$((hosts * slices))
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

# Passes signals on to the workers, kills them after the deadline, and watches the state of the slices.
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

# start_all FLAGS...: starts all processes; those of a detached run go on when this returns. Sets `status` and `reason` to
# those of the first failure.
start_all() {
  local k pid
  stops=0
  deadline=0
  status=0
  reason=
  if ((dry_run)); then
    for ((k = 0; k < processes; k++)); do ssh_to "$k" "$(worker_command "$k" "$@")"; done
    return
  fi
  for ((k = 0; k < processes; k++)); do
    start "$k" ssh_to "$k" "$(worker_command "$k" "$@")"
    running+=("$started")
  done
  begun=1
  next_look=$((SECONDS + poll_seconds))
  wait_all on_worker_exit watch_workers
  # A worker whose connection was lost is told to stop all the same.
  for pid in ${helpers[@]+"${helpers[@]}"}; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2 || true; done
    end_group TERM "$pid"
  done
  helpers=()
}

# tell_all COMMAND: runs a command on every worker at once and prefixes what they say; fails if one fails.
tell_all() {
  local k
  set_up_failed=0
  for ((k = 0; k < processes; k++)); do
    start "$k" ssh_to "$k" "$1"
    running+=("$started")
  done
  wait_all on_set_up :
  return "$set_up_failed"
}
