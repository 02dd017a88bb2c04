# Sourced by launch/tpu_vm.sh: creates slices, deletes them and reads their state, with gcloud.
# shellcheck shell=bash
# shellcheck disable=SC2154
tpu() {
  run gcloud ${release:+"$release"} compute tpus "$@" --zone="$zone" ${project:+"--project=$project"} --quiet
}

# Ends the launcher where gcloud reports a mistake of the user; other errors may be temporary.
fail_on_mistakes() {
  local mistakes="PERMISSION_DENIED|INVALID_ARGUMENT|does not have permission|Required '.*' permission|gcloud auth login"
  mistakes+="|active account|unrecognized arguments|not properly specified"
  if grep -qE "$mistakes" "$work/error"; then
    fail "gcloud refuses, see above: check the flags, the account (gcloud auth list), its roles and the project"
  fi
}

end_group() {
  kill "-$1" -- "-$2" 2>/dev/null || true
}

# run_to_end COMMAND...: runs a command of gcloud that only a second Ctrl-C interrupts, and shows its errors.
run_to_end() {
  local pid code=0
  if ((dry_run)); then
    "$@"
    return
  fi
  set -m
  "$@" </dev/null 2>"$work/error" &
  pid=$!
  set +m
  while :; do
    code=0
    wait "$pid" || code=$?
    kill -0 "$pid" 2>/dev/null || break
    if ((stopping > 1)); then end_group TERM "$pid"; fi
  done
  cat "$work/error" >&2
  if ((code)); then fail_on_mistakes; fi
  return "$code"
}

# Sets `state` to the state of the slices, ABSENT if there are none. Fails if gcloud cannot tell.
read_state() {
  local describe=(tpu-vm describe "$name" '--format=value(state)')
  if ((queued)); then describe=(queued-resources describe "$name" '--format=value(state.state)'); fi
  if ((dry_run)); then
    tpu "${describe[@]}"
  elif state=$(tpu "${describe[@]}" 2>"$work/error"); then
    [[ -n $state ]]
  elif grep -q NOT_FOUND "$work/error"; then
    state=ABSENT
  else
    return 1
  fi
}

create() {
  local flags=(--accelerator-type="$type") release='' resource=(--node-id="$name")
  if ((slices > 1)); then resource=(--node-count="$slices" --node-prefix="$name"); fi
  if ((spot)); then flags+=(--spot); fi
  if ((reserved)); then flags+=(--reserved); fi
  # Only the alpha release of gcloud can name a reservation.
  if [[ -n $reservation ]]; then release=alpha flags+=(--reservation="$reservation"); fi
  flags+=(${create_flags[@]+"${create_flags[@]}"})
  created=1
  if ((queued)); then
    run_to_end tpu queued-resources create "$name" "${resource[@]}" --runtime-version="$runtime" "${flags[@]}"
  else
    run_to_end tpu tpu-vm create "$name" --version="$runtime" "${flags[@]}"
  fi
}

remove() {
  if ((queued)); then
    run_to_end tpu queued-resources delete "$name" --force
  else
    run_to_end tpu tpu-vm delete "$name"
  fi
}

# pause SECONDS: sleeps; a signal, which sets `stopping`, ends it.
pause() {
  sleep "$1" &
  wait "$!" || true
}

# Returns when the slices are ready, which it creates if need be. Fails if that must be tried again from the start.
make_ready() {
  local unknown=0 last_state=
  created=0
  while ((!stopping)); do
    if ! read_state; then
      cat "$work/error" >&2
      fail_on_mistakes
      ((++unknown < 5)) || return 1
      pause "$poll_seconds"
      continue
    fi
    unknown=0
    if [[ $state != "$last_state" ]]; then say "$name is $state"; fi
    last_state=$state
    case $state in
      READY | ACTIVE) return 0 ;;
      ABSENT)
        ((!created)) || return 1
        create || return 1
        continue
        ;;
      PREEMPTED | TERMINATED | FAILED | SUSPENDED)
        remove || return 1
        ((!created)) || return 1
        continue
        ;;
      STOPPED | STOPPING | HIDDEN | HIDING)
        fail "$name is $state: start it (gcloud compute tpus tpu-vm start $name --zone=$zone) or delete it"
        ;;
    esac
    pause "$poll_seconds"
  done
  return 1
}
