#!/usr/bin/env bash
# Runs experiments.train on a TPU slice of a GKE cluster, as a JobSet:
#   bash launch/gke/run.sh --values=FILE [--context=CONTEXT] [--dry_run] \
#     --config=configs/agentr1_grpo.py --config.run_dir=/shared/runs/mine [flags of experiments.train]
#   bash launch/gke/run.sh --values=FILE [--context=CONTEXT] [--dry_run] --delete
# Requirements: kubectl with the cluster's credentials (`gcloud container clusters get-credentials`), Python 3.11, a
# node pool of that accelerator and topology (or Autopilot) with its quota, the JobSet controller
# (kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml),
# an image (launch/gke/Dockerfile), a PersistentVolumeClaim that all pods can write to (Filestore, or a bucket by Cloud
# Storage FUSE; runs may lie on gs:// instead), and FILE, a copy of launch/gke/values.env. Tested with a stand-in for
# kubectl only.
# The cluster restarts the pods. When a JobSet is deleted its pods save and exit, and the same command resumes the run.
# --dry_run prints the manifest and the command and runs nothing.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
hint="The flags are at the head of launch/gke/run.sh"
values=
context=()
delete=0
while (($#)); do
  case $1 in
    --config*) break ;;
    --values=*) values=${1#*=} ;;
    --context=*) context=("--context=${1#*=}") ;;
    --delete) delete=1 ;;
    --dry_run) dry_run=1 ;;
    *) fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --values "$values"
(($# || delete)) || fail "--config=FILE is missing. $hint"
((!$# || !delete)) || fail "--delete takes no flags of experiments.train"
python=$(command -v python3) || fail "no python3 found"
# The run's folder must outlive the pods.
durable=0
for argument; do
  case $argument in --config.run_dir=/shared/?* | --config.run_dir=gs://?*) durable=1 ;; esac
done
((durable || delete)) || fail "the disk of a pod is deleted with it: give --config.run_dir=/shared/FOLDER or gs://BUCKET/FOLDER"
manifest=$("$python" "$(dirname "${BASH_SOURCE[0]}")/render.py" "$values" -- "$@") || exit 2
name=$(sed -n 's/^  name: "\(.*\)"$/\1/p' <<<"$manifest")
namespace=$(sed -n 's/^  namespace: "\(.*\)"$/\1/p' <<<"$manifest")
require_program kubectl "install it: https://kubernetes.io/docs/tasks/tools/"

if ((delete)); then
  command=(kubectl delete jobset "$name" --ignore-not-found)
else
  command=(kubectl create --filename=-)
fi
command+=(--namespace="$namespace" ${context[@]+"${context[@]}"})
if ((dry_run)); then
  if ((!delete)); then echo "$manifest"; fi
  run "${command[@]}"
  exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
code=0
"${command[@]}" <<<"$manifest" 2>"$work/error" || code=$?
cat "$work/error" >&2
if ((code)); then
  case $(<"$work/error") in
    *"no matches for kind"*) fail "the cluster has no JobSet controller; the head of launch/gke/run.sh says how to install it" ;;
    *AlreadyExists* | *"already exists"*) fail "there is a JobSet $name; end it with: launch/gke/run.sh --values=$values --delete" ;;
    *Forbidden* | *forbidden* | *Unauthorized* | *"must be logged in"*) fail "no permission, see above" ;;
    *"connection refused"* | *"no configuration"* | *"does not exist"*) fail "kubectl knows no such cluster, see above" ;;
    *Invalid* | *invalid* | *"strict decoding"* | *"BadRequest"*) fail "the cluster refuses the manifest, see above" ;;
  esac
  exit "$code"
fi
if ((!delete)); then
  say "follow it with: kubectl logs --namespace=$namespace --selector=jobset.sigs.k8s.io/jobset-name=$name --follow --prefix" \
    "--max-log-requests=100"
  say "its state: kubectl get jobset $name --namespace=$namespace"
fi
