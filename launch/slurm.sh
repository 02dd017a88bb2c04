#!/usr/bin/env bash
# Runs experiments.train on GPU nodes of a Slurm cluster, one process per node with all its GPUs:
#   bash launch/slurm.sh --nodes=2 --gpus_per_node=8 --time=24:00:00 [flags] \
#     --config=configs/agentr1_grpo.py:h100x8 --config.run_dir=/shared/runs/mine [flags of experiments.train]
# Requirements: an account and a partition of the cluster; port 8476 open between the nodes; on a file system that all nodes
# share: this folder, the run's folder and VENV_PYTHON, the interpreter of an environment with requirements.txt and
# 'jax[cuda13]'. Tested with stand-ins for Slurm's programs only.
#   --nodes=N             required
#   --gpus_per_node=N     required
#   --time=LIMIT          required; the job saves before this limit, is requeued and resumes
#   --partition=NAME, --account=NAME
#   --restarts=3          how often the job may be requeued after a failure
#   --save_seconds=600    time before the time limit at which the job begins to save
#   --sbatch_flag=FLAG    further flag of sbatch, e.g. --sbatch_flag=--constraint=h100; may be repeated
#   --dry_run             print the commands and run none
# The log of the job is runs/slurm/JOB.log. `scancel JOB` ends it for good. launch/slurm.sbatch is the job.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
hint="The flags are at the head of launch/slurm.sh"
nodes=
gpus=
time=
restarts=3
save_seconds=600
further=()
while (($#)); do
  case $1 in
    --config*) break ;;
    --nodes=*) nodes=${1#*=} ;;
    --gpus_per_node=*) gpus=${1#*=} ;;
    --time=*) time=${1#*=} ;;
    --partition=?* | --account=?*) further+=("$1") ;;
    --restarts=*) restarts=${1#*=} ;;
    --save_seconds=*) save_seconds=${1#*=} ;;
    --sbatch_flag=*) further+=("${1#*=}") ;;
    --dry_run) dry_run=1 ;;
    *) fail_unknown_flag "$1" "$hint" ;;
  esac
  shift
done
require --nodes "$nodes"
require --gpus_per_node "$gpus"
require --time "$time"
(($#)) || fail "--config=FILE is missing. $hint"
require_whole_number --nodes "$nodes" 1
require_whole_number --gpus_per_node "$gpus" 1
require_whole_number --restarts "$restarts"
require_whole_number --save_seconds "$save_seconds" 1
require VENV_PYTHON "${VENV_PYTHON:-}"
[[ $VENV_PYTHON == /* ]] || fail "VENV_PYTHON is $VENV_PYTHON; it must be a path from /, which is the same on all nodes"
require_program sbatch "start this on a login node of the cluster"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run mkdir -p runs/slurm
code=0
run sbatch --nodes="$nodes" --gpus-per-node="$gpus" --time="$time" --signal="B:TERM@$save_seconds" --chdir="$PWD" \
  --export=ALL ${further[@]+"${further[@]}"} launch/slurm.sbatch --restarts="$restarts" "$@" || code=$?
# sbatch has status 1 where it rejects the request: nothing has run.
((!code)) || fail "sbatch refuses, see above: check account, partition, nodes and time"
if ((dry_run)); then
  echo "# In the job, on its first node:"
  DRY_RUN=1 SLURM_JOB_NUM_NODES=$nodes bash launch/slurm.sbatch --restarts="$restarts" "$@"
fi
