# Sourced by launch/tpu_vm.sh: makes a slice, deletes it and looks at it, by gcloud.
# shellcheck shell=bash
# shellcheck disable=SC2154
tpu() {
  run gcloud compute tpus "$@" --zone="$zone" ${project:+"--project=$project"} --quiet
}

# A mistake of the user's ends the launcher; other errors of gcloud may pass.
refuse_mistakes() {
  local mistakes="PERMISSION_DENIED|INVALID_ARGUMENT|does not have permission|Required '.*' permission|gcloud auth login"
  mistakes+="|active account|unrecognized arguments|not properly specified"
  if grep -qE "$mistakes" "$work/error"; then
    fail "gcloud refuses, see above: check the flags, the account (gcloud auth list), its roles and the project"
  fi
}

end_group() {
  kill "-$1" -- "-$2" 2>/dev/null || true
}

# Runs something of gcloud's, which only a second Ctrl-C cuts short; its errors are shown.
attend() {
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
  if ((code)); then refuse_mistakes; fi
  return "$code"
}

# Leaves the slice's state in `state`, ABSENT if there is none. Fails if gcloud cannot tell.
look() {
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
  local flags=(--accelerator-type="$type")
  if ((spot)); then flags+=(--spot); fi
  flags+=(${create_flags[@]+"${create_flags[@]}"})
  created=1
  if ((queued)); then
    attend tpu queued-resources create "$name" --node-id="$name" --runtime-version="$runtime" "${flags[@]}"
  else
    attend tpu tpu-vm create "$name" --version="$runtime" "${flags[@]}"
  fi
}

remove() {
  if ((queued)); then
    attend tpu queued-resources delete "$name" --force
  else
    attend tpu tpu-vm delete "$name"
  fi
}

# Interrupted by a signal, which `stopping` then tells.
pause() {
  sleep "$1" &
  wait "$!" || true
}

# Comes back when there is a slice that can be used. Fails if it must be tried again from the start.
make_ready() {
  local unknown=0 shown=
  created=0
  while ((!stopping)); do
    if ! look; then
      cat "$work/error" >&2
      refuse_mistakes
      ((++unknown < 5)) || return 1
      pause "$poll_seconds"
      continue
    fi
    unknown=0
    if [[ $state != "$shown" ]]; then say "$name is $state"; fi
    shown=$state
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
