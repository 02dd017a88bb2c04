#!/usr/bin/env bash
# The learning result of docs/results/multihop.md on this machine's CPU: a warm start, reinforcement learning from it by five
# algorithms (ALGORITHMS="grpo ppo_step" names others), two controls, an evaluation of each, one table; SEED is 0 unless
# given. `bash launch/multihop_small.sh [FOLDER]`; the same command resumes it.
# Needs real data (docs/data.md): python -m experiments.prepare_data data hotpotqa 2wiki musique tokenizers --questions=2500;
# export AGENTR1_DATA=$PWD/data. CONFIG=multihop_medium is the same for one accelerator.
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
config=${CONFIG:-multihop_small}
seed=${SEED:-0}
out=${1:-runs/$config/seed$seed}
read -ra algorithms <<<"${ALGORITHMS:-grpo ppo_token ppo_step reinforce_pp gigpo}"

# Both programs save and exit with status 0 when they are stopped: the files of a run tell whether it has finished.
fail_stopped() {
  echo "stopped in $1; the same command resumes it" >&2
  exit 1
}

train() {
  local run=$1
  "$VENV_PYTHON" -m experiments.train "${@:2}" --config.run_dir="$run" --config.seed="$seed"
  [[ -f $run/summary.json ]] || fail_stopped "$run"
}

# request.json is written when an evaluation begins, evaluation.json when it ends.
evaluate() {
  local run=$1 results=$1/evaluation
  "$VENV_PYTHON" -m experiments.evaluate --checkpoint="$run" --splits=held_out,eval "${@:2}"
  [[ -f $results/evaluation.json && ! $results/evaluation.json -ot $results/request.json ]] || fail_stopped "$results"
}

train "$out/warm_start" --config="configs/$config.py" --config.updates=0
evaluate "$out/warm_start" --modes=agent,rag,search_more --baselines=checkpoint
# Of RL alone: three questions of 2Wiki for one of HotpotQA; less noise of mistyped names in what is sampled; and, where
# there is a KL, enough of it to keep the policy from drifting by noise.
rl=(--config.task.multihop.mixture="('hotpotqa(weight=1)', '2wikimultihopqa(weight=3)')" --config.rollout.temperature=0.85 --config.kl.coef=0.01)
rows=("Naive RAG=$out/warm_start/evaluation:rag" "warm start=$out/warm_start/evaluation:agent")
rows+=("one search more=$out/warm_start/evaluation:search_more")
declare -A names=([grpo]=GRPO [ppo_token]=PPO [ppo_step]=StepPO [reinforce_pp]=REINFORCE++ [gigpo]=GiGPO)

for name in "${algorithms[@]}"; do
  run=$out/$name
  flags=("${rl[@]}")
  if [[ $name == ppo_* ]]; then flags+=(--config.optimizer.critic_warmup=4); fi # Its value head begins with nothing.
  train "$run" --config="configs/presets/$name.py:$config" --config.warm_start.init_from="$out/warm_start" "${flags[@]}"
  evaluate "$run" --modes=agent
  rows+=("${names[$name]:-$name}=$run/evaluation:agent")
done

# The control of equal compute: imitation from the warm start on, of questions as RL draws them, for as long as the first
# algorithm took.
seconds=$("$VENV_PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["seconds"])' "$out/${algorithms[0]}/summary.json")
train "$out/more_imitation" --config="configs/$config.py" --config.warm_start.init_from="$out/warm_start" \
  --config.warm_start.control_seconds="$seconds" "${rl[0]}"
evaluate "$out/more_imitation" --modes=agent
rows+=("more imitation=$out/more_imitation/evaluation:agent")
"$VENV_PYTHON" -m experiments.evaluation.table --base="warm start" --out="$out/table.md" "${rows[@]}"
