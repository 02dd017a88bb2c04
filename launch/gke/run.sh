#!/usr/bin/env bash
# Runs experiments.train on TPU slices of a GKE cluster, as a JobSet:
#   bash launch/gke/run.sh --name=mine --values=FILE [flags] \
#     --config=configs/agentr1_grpo.py --config.run_dir=/shared/runs/mine [flags of experiments.train]
#   bash launch/gke/run.sh status|logs|stop --name=mine --values=FILE [--context=CONTEXT]
# Requirements: kubectl with the cluster's credentials (`gcloud container clusters get-credentials`), Python 3.11, a
# node pool of that accelerator and topology for each slice (or Autopilot) with its quota, the JobSet controller
# (kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml),
# an image (launch/gke/Dockerfile), a PersistentVolumeClaim that all pods can write to (Filestore, or a bucket by Cloud
# Storage FUSE; runs may lie on gs:// instead), and FILE, a copy of launch/gke/values.env. Tested with a stand-in for
# kubectl only.
# Flags of all launchers (docs/pods.md): --name --restarts=3 --save_seconds=600 --data --env --secret --program --no_check
#   --dry_run. Those of this one:
#   --values=FILE         what there is to know of the cluster; required
#   --context=CONTEXT     of kubectl
#   --slices=1            slices that the run spans
#   --spot                use nodes of spot VMs, which give a pod 15 seconds to save, whatever --save_seconds says
# The cluster restarts the pods. When a JobSet is stopped its pods save and exit, and the same command resumes the run.
# --dry_run prints the manifest and the commands and runs nothing. Secrets are a Secret of the cluster, NAME-secrets.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
hint="The flags are at the head of launch/gke/run.sh"
values=
context=()
slices=1
spot=0
if take_action "${1:-}"; then shift; fi
while (($#)); do
  case $1 in
    --config*) break ;;
    --values=*) values=${1#*=} ;;
    --context=*) context=("--context=${1#*=}") ;;
    --slices=*) slices=${1#*=} ;;
    --spot) spot=1 ;;
    *) take_common_flag "$1" || fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --name "$name"
require --values "$values"
require_whole_number --slices "$slices" 1
if [[ $action == run ]]; then
  check_common_flags "$@"
  has_durable_folder /shared/ "$@" ||
    fail "the disk of a pod is deleted with it: give --config.run_dir=/shared/FOLDER or gs://BUCKET/FOLDER (a grid: --out=/shared/...)"
fi
python=$(command -v python3) || fail "no python3 found"
of_run=("name=$name" "restarts=$restarts" "save_seconds=$save_seconds" "slices=$slices" "spot=$spot" "secrets=${#secrets[@]}")
for variable in ${variables[@]+"${variables[@]}"}; do of_run+=("env=$variable"); done
manifest=$("$python" "$(dirname "${BASH_SOURCE[0]}")/render.py" "$values" "${of_run[@]}" -- \
  --program="$program" ${data:+"--data=$data"} "$@") || exit 2
# value KEY: prints a value of the cluster.
value() {
  sed -n "s/^$1 *= *//p" "$values"
}
namespace=(--namespace="$(value namespace)" ${context[@]+"${context[@]}"})
require_program kubectl "install it: https://kubernetes.io/docs/tasks/tools/"
selector=--selector=jobset.sigs.k8s.io/jobset-name=$name

case $action in
  status)
    run kubectl get jobset "$name" "${namespace[@]}"
    run kubectl get pods "$selector" --output=wide "${namespace[@]}"
    exit
    ;;
  logs) run kubectl logs "$selector" --follow --prefix --max-log-requests=100 "${namespace[@]}" && exit ;;
  stop)
    run kubectl delete jobset "$name" --ignore-not-found "${namespace[@]}"
    run kubectl delete secret "$name-secrets" --ignore-not-found "${namespace[@]}"
    exit
    ;;
esac
case $(value accelerator) in
  *v5p*) kind=v5p ;;
  *v6e*) kind=v6e ;;
  *v4*) kind=v4 ;;
  *) kind=v5e ;;
esac
shape=$(value hosts)x$(value chips_per_host)
if [[ $program == ablate ]]; then shape=1x$(value chips_per_host); elif ((slices > 1)); then shape="$slices*$shape"; fi
if ((check)); then
  # shellcheck source=launch/environment.sh
  source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
  check_run "$kind:$shape" "$@"
fi

if ((dry_run)); then
  work=FOLDER
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
if ((${#secrets[@]})); then
  ((dry_run)) || write_secrets "$work/secrets"
  run kubectl delete secret "$name-secrets" --ignore-not-found "${namespace[@]}"
  run kubectl create secret generic "$name-secrets" --from-env-file="$work/secrets" "${namespace[@]}"
fi
command=(kubectl create --filename=- "${namespace[@]}")
if ((dry_run)); then
  echo "$manifest"
  run "${command[@]}"
  exit
fi
code=0
"${command[@]}" <<<"$manifest" 2>"$work/error" || code=$?
cat "$work/error" >&2
if ((code)); then
  case $(<"$work/error") in
    *"no matches for kind"*) fail "the cluster has no JobSet controller; the head of launch/gke/run.sh says how to install it" ;;
    *AlreadyExists* | *"already exists"*) fail "there is a JobSet $name; end it with: launch/gke/run.sh stop --name=$name --values=$values" ;;
    *Forbidden* | *forbidden* | *Unauthorized* | *"must be logged in"*) fail "no permission, see above" ;;
    *"connection refused"* | *"no configuration"* | *"does not exist"*) fail "kubectl knows no such cluster, see above" ;;
    *Invalid* | *invalid* | *"strict decoding"* | *"BadRequest"*) fail "the cluster refuses the manifest, see above" ;;
  esac
  exit "$code"
fi
say "the run goes on without this launcher: launch/gke/run.sh status, logs or stop --name=$name --values=$values"
