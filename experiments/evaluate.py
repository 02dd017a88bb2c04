"""Evaluate an agent and its baselines on whole sets of questions.

    python -m experiments.evaluate [--checkpoint=]RUN [--config=configs/...py] [--modes=agent,base,rag,react]
    python -m experiments.evaluate --config=configs/...py --checkpoint=WEIGHTS
    python -m experiments.evaluate --checkpoint=RUN --samples=8 --temperature=1 --splits=eval --questions=200

--checkpoint names a run (its newest checkpoint; its own config says task, tokenizer, policy and budget, but that
--config, where given, says all but policy and tokenizer) or a Hugging Face folder or hub id (then --config is needed).
Without it, it is the run in the config's `run_dir`, where there is one.

    agent   the trained checkpoint in the config's agent loop
    base    Base Tool Call: the policy as training began, with the same tools
    rag     Naive RAG: one retrieval with the question, its passages in the prompt, then the answer in one step
    react   ReAct prompting with the same tools
    search_more    agent, made to search once more where it first answers; only if it is named

rag and react use the policy as training began, or with --baselines=checkpoint the trained one. Training began with the
checkpoint of `warm_start.init_from`, with published weights, or with random parameters. A run with a warm start of its
own has stored what came of it where it has a KL term (RUN/reference); for others --base=RUN (or WEIGHTS) has to name a
policy. Without --modes, baselines that cannot be answered are left out, and the log says which and why.

OUT (RUN/evaluation unless given) gets evaluation.json (every figure with its n and 95 % interval), evaluation.md,
report.html (some trajectories step by step), scores.jsonl.gz (a line for each trajectory) and trajectories/. The same
command again does what is missing; modes and splits can be added. docs/evaluation.md says what each figure means.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from experiments.evaluation import modes
from experiments.evaluation.run import Request, evaluate
from experiments.setup import run_main

CONFIG = configs.define_config_flag()
configs.define_trust_flag()
CHECKPOINT = flags.DEFINE_string("checkpoint", "", "a run's folder, or weights: a Hugging Face folder or hub id")
MODES = flags.DEFINE_list("modes", None, "ways of answering; the first four, where they can be answered, unless given")
SPLITS = flags.DEFINE_list("splits", [], "of the task; eval.split and, where there is one, held_out unless given")
SAMPLES = flags.DEFINE_integer("samples", 1, "of each question; more than one need a temperature", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", lower_bound=0.0)
OUT = flags.DEFINE_string("out", "", "folder of the results; RUN/evaluation unless given")
QUESTIONS = flags.DEFINE_integer("questions", None, "of each split; all there are unless given", lower_bound=1)
BASELINES = flags.DEFINE_enum("baselines", modes.START, [modes.START, modes.TRAINED], "whose policy rag and react use")
BASE = flags.DEFINE_string("base", "", "run or weights that training began with, where the run's config cannot say")
CHUNK = flags.DEFINE_integer("chunk", 128, "questions that are answered, and written, together", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "of sampling, and of the order of the questions")


def main(argv: Sequence[str]) -> None:
    """Evaluate what the flags say."""
    if len(argv) > 1 and CHECKPOINT.value:
        raise UserError(f"{argv[1]} and --checkpoint={CHECKPOINT.value}: give one of them")
    if "AGENTR1_COORDINATOR" in os.environ:
        raise UserError("evaluation runs in one process, on all of its devices; start it without launch/local.sh")
    request = Request(
        modes=modes.COMMON_MODES if MODES.value is None else modes.parse_modes(MODES.value),
        named=MODES.value is not None,
        splits=SPLITS.value,
        samples=SAMPLES.value,
        temperature=TEMPERATURE.value,
        out=OUT.value,
        questions=QUESTIONS.value,
        baselines=BASELINES.value,
        base=BASE.value,
        chunk=CHUNK.value,
        seed=SEED.value,
    )
    source = argv[1] if len(argv) > 1 else CHECKPOINT.value
    evaluate(CONFIG.value, source, request, Console(soft_wrap=True))


if __name__ == "__main__":
    run_main(main, arguments=("[CHECKPOINT]",))
