#!/usr/bin/env bash
# Runs experiments.train on GPU nodes of a Slurm cluster, one process per node with all its GPUs:
#   bash launch/slurm.sh --nodes=2 --gpus_per_node=8 --time=24:00:00 [flags] \
#     --config=configs/agentr1_grpo.py:h100x8 --config.run_dir=/shared/runs/mine [flags of experiments.train]
# Requirements: an account and a partition of the cluster; port 8476 open between the nodes; on a file system that all nodes
# share: this folder, the run's folder and VENV_PYTHON, the interpreter of an environment with requirements.txt and
# 'jax[cuda13]'. Tested with stand-ins for Slurm's programs only.
#   bash launch/slurm.sh status|logs|stop --name=mine
# Flags of all launchers (docs/pods.md): --name=agentr1 --restarts=3 --save_seconds=600 --data --env --secret --program
#   --no_check --dry_run. Those of this one:
#   --nodes=N --gpus_per_node=N   required
#   --time=LIMIT          required; the job saves --save_seconds before this limit, is requeued and resumes
#   --partition=NAME --account=NAME
#   --sbatch_flag=FLAG    further flag of sbatch, e.g. --sbatch_flag=--constraint=h100; may be repeated
# The log of the job is runs/slurm/JOB.log. `scancel JOB` ends it for good. launch/slurm.sbatch is the job.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
hint="The flags are at the head of launch/slurm.sh"
name=agentr1
nodes=
gpus=
time=
further=()
if take_action "${1:-}"; then shift; fi
while (($#)); do
  case $1 in
    --config*) break ;;
    --nodes=*) nodes=${1#*=} ;;
    --gpus_per_node=*) gpus=${1#*=} ;;
    --time=*) time=${1#*=} ;;
    --partition=?* | --account=?*) further+=("$1") ;;
    --sbatch_flag=*) further+=("${1#*=}") ;;
    *) take_common_flag "$1" || fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --name "$name"
case $action in
  status) run squeue --me --name="$name" && exit ;;
  stop) run scancel --me --name="$name" && exit ;;
  logs)
    job=$(squeue --me --name="$name" --noheader --format=%A | head -n 1)
    [[ -n $job ]] || fail "no job $name waits or runs; the logs of all jobs are in runs/slurm"
    exec tail -n 100 -F "$(dirname "${BASH_SOURCE[0]}")/../runs/slurm/$job.log"
    ;;
esac
require --nodes "$nodes"
require --gpus_per_node "$gpus"
require --time "$time"
check_common_flags "$@"
require_whole_number --nodes "$nodes" 1
require_whole_number --gpus_per_node "$gpus" 1
require_whole_number --save_seconds "$save_seconds" 1
require VENV_PYTHON "${VENV_PYTHON:-}"
[[ $VENV_PYTHON == /* ]] || fail "VENV_PYTHON is $VENV_PYTHON; it must be a path from /, which is the same on all nodes"
require_program sbatch "start this on a login node of the cluster"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data=${data:-${AGENTR1_DATA:-}}
shape=${nodes}x$gpus
if [[ $program == ablate ]]; then shape=1x$gpus; fi
check_run "gpu:$shape" "$@"
run mkdir -p runs/slurm
# The job has this environment, and so the variables and secrets.
for variable in ${variables[@]+"${variables[@]}"}; do export "${variable?}"; done
job_flags=(--restarts="$restarts" --program="$program" ${data:+"--data=$data"})
code=0
run sbatch --job-name="$name" --nodes="$nodes" --gpus-per-node="$gpus" --time="$time" --signal="B:TERM@$save_seconds" --chdir="$PWD" \
  --export=ALL ${further[@]+"${further[@]}"} launch/slurm.sbatch "${job_flags[@]}" "$@" || code=$?
# sbatch has status 1 where it rejects the request: nothing has run.
((!code)) || fail "sbatch refuses, see above: check account, partition, nodes and time"
if ((dry_run)); then
  echo "# In the job, on its first node:"
  DRY_RUN=1 SLURM_JOB_NUM_NODES=$nodes bash launch/slurm.sbatch "${job_flags[@]}" "$@"
fi
