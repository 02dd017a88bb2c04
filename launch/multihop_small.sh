#!/usr/bin/env bash
# The learning result of docs/multihop.md on this machine's CPU: a warm start, reinforcement learning from it by four
# algorithms, an evaluation of each, one table. `bash launch/multihop_small.sh [FOLDER]`; the same command goes on where
# it was stopped. Needs the data folder (AGENTR1_DATA). CONFIG=multihop_medium is the same for one accelerator.
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
config=${CONFIG:-multihop_small}
out=${1:-runs/$config}
seed=${SEED:-0}
splits=held_out,eval

"$VENV_PYTHON" -m experiments.train --config="configs/$config.py" --config.run_dir="$out/warm_start" \
  --config.seed="$seed" --config.updates=0
"$VENV_PYTHON" -m experiments.evaluate --checkpoint="$out/warm_start" --modes=agent,rag --baselines=checkpoint \
  --splits="$splits"
rows=("Naive RAG=$out/warm_start/evaluation:rag" "warm start=$out/warm_start/evaluation:agent")

for name in grpo:GRPO ppo_token:PPO ppo_step:StepPO reinforce_pp:REINFORCE++; do
  run=$out/${name%%:*}
  "$VENV_PYTHON" -m experiments.train --config="configs/presets/${name%%:*}.py:$config" \
    --config.run_dir="$run" --config.seed="$seed" --config.warm_start.run="$out/warm_start"
  "$VENV_PYTHON" -m experiments.evaluate --checkpoint="$run" --modes=agent --splits="$splits"
  rows+=("${name#*:}=$run/evaluation:agent")
done
"$VENV_PYTHON" -m experiments.evaluation.table --base="warm start" --out="$out/table.md" "${rows[@]}"
