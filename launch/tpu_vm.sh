#!/usr/bin/env bash
# Runs experiments.train on all workers of a Cloud TPU slice, or of several, which it creates or reuses:
#   bash launch/tpu_vm.sh --name=mine --zone=us-west4-a --type=v5litepod-16 --data=gs://BUCKET/data [flags] \
#     --config=configs/agentr1_grpo.py --config.run_dir=gs://BUCKET/runs/mine [flags of experiments.train]
#   bash launch/tpu_vm.sh status|logs|stop --name=mine --zone=us-west4-a [--project=PROJECT] [--queued] [--slices=N]
# Requirements: the gcloud CLI (`gcloud auth login`); Python 3.11 here, for the check of the run; a project with the TPU API
# enabled and quota for the type in the zone (spot quota for --spot); the roles TPU Admin and Service Account User; an SSH key
# without a passphrase or in ssh-agent; internet access of the workers; storage for the run that outlives the slice and that
# all workers see: gs://, if their service account may use the bucket, or a file system that --setup mounts. Workers connect
# to worker 0 on ports 8476 and, of several slices, 8081, which the default network allows.
# Tested with a stand-in for gcloud only.
# Flags of all launchers (docs/pods.md): --name --restarts=3 --save_seconds=600 --data --env --secret --program --no_check
#   --dry_run. Those of this one:
#   --zone=ZONE                  zone of the TPU VM, or of the queued resource and its TPU VMs; required
#   --type=TYPE                  v5litepod-N, v5p-N, v6e-N or v4-N; required
#   --slices=1                   slices of that type that one run spans; more than one are a queued resource
#   --project=PROJECT            default: that of gcloud
#   --runtime=VERSION            default: the version that Google recommends for the type
#   --queued                     request a queued resource instead of a TPU VM
#   --spot                       use preemptible chips
#   --reserved                   use a reservation of the project
#   --reservation=NAME           use this reservation; a queued resource, by the alpha release of gcloud
#   --detach                     leave when all workers have started; each restarts its process by itself
#   --delete                     delete the slices at the end of a run that had begun; never after a mistake of the user
#   --setup=COMMAND              command to run on each worker before every start, e.g. to mount /shared
#   --package=NAME               further package of the workers, e.g. wandb; may be repeated
#   --create_flag=FLAG           further flag of gcloud's create, e.g. --create_flag=--network=lab; may be repeated
#   --internal_ip                connect to the workers by their internal addresses
#   --poll_seconds=30            seconds between reads of the state
#   --pause_seconds=60           with --detach: seconds before a restart
# Of logs: --worker=0, --lines=100, --follow. Of stop: --delete.
# The lines of process k begin with [k]. The same command reuses the slice and resumes the run. On Ctrl-C or SIGTERM all
# workers save and exit; a second one ends them at once.
# Exit status 0: finished, stopped and saved, or detached; 2: mistake of the user, nothing is started again; others: failed.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck disable=SC2034
hint="The flags are at the head of launch/tpu_vm.sh"
megascale_port=8081
zone=
type=
slices=1
project=
runtime=
queued=0
spot=0
reserved=0
reservation=
detach=0
delete=0
setup=
packages=()
create_flags=()
ssh_flags=()
poll_seconds=30
pause_seconds=60
of_worker=0
lines=100
follow=()
if take_action "${1:-}"; then shift; fi
while (($#)); do
  case $1 in
    --config*) break ;;
    --zone=*) zone=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --runtime=*) runtime=${1#*=} ;;
    --queued) queued=1 ;;
    --spot) spot=1 ;;
    --reserved) reserved=1 ;;
    --reservation=*) reservation=${1#*=} ;;
    --detach) detach=1 ;;
    --delete) delete=1 ;;
    --setup=*) setup=${1#*=} ;;
    --package=*) packages+=("${1#*=}") ;;
    --create_flag=*) create_flags+=("${1#*=}") ;;
    --internal_ip) ssh_flags+=(--internal-ip) ;;
    --poll_seconds=*) poll_seconds=${1#*=} ;;
    --pause_seconds=*) pause_seconds=${1#*=} ;;
    --worker=*) of_worker=${1#*=} ;;
    --lines=*) lines=${1#*=} ;;
    --follow) follow=(-F) ;;
    *) take_common_flag "$1" || fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --name "$name"
require --zone "$zone"
require_whole_number --slices "$slices" 1
require_whole_number --poll_seconds "$poll_seconds" 1
require_whole_number --pause_seconds "$pause_seconds"
require_whole_number --worker "$of_worker"
require_whole_number --lines "$lines"
if ((slices > 1)) || [[ -n $reservation ]]; then queued=1; fi

if [[ $action == run ]]; then
  require --type "$type"
  check_common_flags "$@"
  # Runtime versions: cloud.google.com/tpu/docs/runtimes. The number in a type counts chips (v5litepod, v6e) or cores, two
  # per chip (v4, v5p). A host has 4 chips; a v5litepod or v6e slice of at most 8 chips is one host.
  number=${type##*-}
  require_whole_number "the number in --type=$type" "$number" 1
  case $type in
    v5litepod-*) default=v2-alpha-tpuv5-lite kind=v5e chips=$number most=8 ;;
    v6e-*) default=v2-alpha-tpuv6e kind=v6e chips=$number most=8 ;;
    v5p-*) default=v2-alpha-tpuv5 kind=v5p chips=$((number / 2)) most=4 ;;
    v4-*) default=tpu-ubuntu2204-base kind=v4 chips=$((number / 2)) most=4 ;;
    *) fail "--type=$type is unknown; known are v5litepod-N, v5p-N, v6e-N and v4-N" ;;
  esac
  runtime=${runtime:-$default}
  hosts=$((chips <= most ? 1 : chips / 4))
  shape=${hosts}x$((chips / hosts))
  if ((slices > 1)); then shape="$slices*$shape"; fi
  if [[ $program == ablate ]]; then
    ((hosts == 1)) || fail "a run of a grid is one process, and --type=$type has $hosts hosts; take one with a single host"
    shape=1x$chips
  fi
  if ((detach && delete)); then
    fail "a detached run cannot delete its slice: leave --delete out, and give it to tpu_vm.sh stop when the run has ended"
  fi
  if ((restarts || delete)) && ! has_durable_folder / "$@"; then
    fail "the disks of a TPU VM are deleted with it, and a run resumes from its folder: give --config.run_dir=gs://BUCKET/FOLDER" \
      "or a folder that --setup mounts, /... (a grid: --out=/...), or --restarts=0 without --delete"
  fi
fi
require_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
if [[ $action == run ]] && ((check)); then
  # shellcheck source=launch/environment.sh
  source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
  check_run "$kind:$shape" "$@"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ((dry_run)); then
  work=FOLDER
else
  work=$(mktemp -d)
fi
stopping=0
helpers=()
# shellcheck disable=SC2034
created=0
begun=0
processes=$((${hosts:-1} * slices))
# Ctrl-C at a terminal reaches this script only, which passes it on to the workers.
# shellcheck disable=SC2034
own_groups=1

# shellcheck source=launch/tpu_slice.sh
source launch/tpu_slice.sh
# shellcheck source=launch/tpu_workers.sh
source launch/tpu_workers.sh

clean_up() {
  local pid
  for pid in ${running[@]+"${running[@]}"} ${helpers[@]+"${helpers[@]}"}; do end_group TERM "$pid"; done
  rm -rf "$work"
}

# control: what this command does for a run that is there, with the flags that find it.
control() {
  local words=(bash launch/tpu_vm.sh "$1" --name="$name" --zone="$zone" ${project:+"--project=$project"})
  if ((slices > 1)); then words+=(--slices="$slices"); elif ((queued)); then words+=(--queued); fi
  quote "${words[@]}" "${@:2}"
}

# finish STATUS: deletes the slices if that was asked for, and the run had begun, and it was no mistake of the user; says
# what is left otherwise.
finish() {
  if ((delete && begun && $1 != 2)); then
    stopping=0
    remove || say "could not delete $name, see above; it is still billed"
  elif ! read_state || [[ $state != ABSENT ]]; then
    say "$name is left as it is, and billed; delete it with: $(dry_run=1 remove)"
  fi
  exit "$1"
}

if [[ $action != run ]]; then
  trap clean_up EXIT
  if ((!dry_run)); then
    read_state || { cat "$work/error" >&2 && fail "gcloud cannot tell the state of $name, see above"; }
    say "$name is $state"
    case $state in
      READY | ACTIVE) ;;
      ABSENT) fail "there is no $name; was it a queued resource (--queued, --slices=N)?" ;;
      *) if [[ $action == stop ]] && ((delete)); then remove; fi && exit ;;
    esac
  fi
  hosts=1
  find_workers || fail "gcloud cannot tell the workers of $name"
  case $action in
    status) tell_all 'bash agentr1_jax/launch/worker.sh --status' ;;
    logs) ssh_to "$of_worker" "tail -n $lines ${follow[*]} agentr1_jax/detached.log" ;;
    stop)
      tell_all "bash agentr1_jax/launch/worker.sh --stop --seconds=$save_seconds" ||
        fail "a worker cannot be told to stop, see above; $name is left as it is"
      if ((delete)); then remove; else say "$name is still billed; delete it with: $(dry_run=1 remove)"; fi
      ;;
  esac
  exit
fi

if ((dry_run)); then
  restart=0
  read_state
  create
  find_workers
  set_up
  start_all "$@"
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
    if find_workers; then
      code=0
      set_up || code=$?
      if ((code)); then status=$code; else start_all "$@"; fi
    fi
  fi
  if ((stopping)); then
    if ((status)); then say "stopped; what was not saved is lost: $reason"; fi
    finish "$status"
  fi
  if ((status == 0 && detach)); then
    say "the run goes on without this launcher; $name is billed until you delete it"
    for verb in status 'logs --follow' 'stop --delete'; do
      read -r -a words <<<"$verb"
      say "$(control "${words[@]}")"
    done
    exit
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
