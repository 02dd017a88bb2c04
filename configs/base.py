"""Every key of a run, its default and its meaning. Experiment configs change lines of this one.

`(a | b)` lists what a key may be. A key that is `placeholder(...)` is unset; `--config.key=None` unsets it again.
Types and ranges are in the dataclass of each section, e.g. `LossConfig`; docs/config.md has all of it in one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from agentr1_jax import contrib, tasks
from agentr1_jax.envs import registry
from agentr1_jax.envs.registry import TaskEntry
from agentr1_jax.validation import to_section

TASK_KEYS = ("name", "file", "args", "data_dir", "mixture", "curriculum")
"""Keys of the section `task`; its other entries are the sections of tasks."""


MIXTURE = "mixture"
TASK_MODULES = {**tasks.TASK_MODULES, **contrib.TASK_MODULES}
"""Task name -> the module that registers it."""


def get_config(*names: str) -> ml_collections.ConfigDict:
    """Return the base config with the keys of a task, or of the tasks of a mixture; no names for a task of `task.file`.

    Raises:
      ValueError: no such task; the message lists the names.
    """
    c = ConfigDict()
    for section in (
        _run,
        _task,
        _agent,
        _policy,
        _rollout,
        _credit,
        _loss,
        _learner,
        _imitation,
        _evaluation,
        _devices,
    ):
        section(c)
    set_task(c, *names)
    return c.lock()


def set_task(c: ml_collections.ConfigDict, *names: str) -> None:
    """Make a config run other tasks: their sections, with defaults, take the place of those that it had.

    With several names `c.task.mixture` has yet to be set. Raises ValueError if there is no such task.
    """
    entries = {name: find_task(name) for name in names}
    with c.unlocked():
        for name in task_names(c.task):
            del c.task[name]
        for name, entry in entries.items():
            if entry.config is not None:
                c.task[name] = ConfigDict(to_section(entry.config))
    c.task.name = MIXTURE if len(names) > 1 else "".join(names)
    c.task.mixture = ()


def task_names(section: Mapping[str, Any]) -> list[str]:
    """Names of the tasks whose keys the section `task` has."""
    return [name for name in section if name not in TASK_KEYS]


def find_task(name: str) -> TaskEntry:
    """The entry of a task. Raises ValueError if there is none; the message lists the names."""
    return registry.find_task(name, TASK_MODULES)


def _run(c: ConfigDict) -> None:
    """The run, its folder, and what it writes there."""
    c.seed = 0  # Keys every random choice.
    c.run_dir = "runs/base"  # Folder of the run, on a disk or gs://BUCKET/FOLDER. The same command resumes it.
    c.updates = 100  # Batches of reinforcement learning. 0 ends after the warm start.
    c.critic = "none"  # (none | shared_trunk | separate) A value head on the policy's trunk, or a decoder of its own.
    c.hardware = "cpu"  # (cpu | v5e-8 | v5e-16 | v6e-8 | v5p-8 | h100x8 | h200 | auto) Fills what depends on it.
    c.profile_updates = ""  # "a:b" writes a jax.profiler trace of RL batches a to b-1 to the run folder.
    c.compilation_cache = "{runs}/.programs"  # Folder of compiled programs. "": none. {runs} is the folder of run_dir.

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 10  # RL batches between checkpoints; 100 times as many updates before RL.
    c.checkpoint.keep = 2  # Newest checkpoints that are not removed.

    c.sinks = ConfigDict()  # Where metrics go beside metrics.jsonl; see docs/monitoring.md.
    c.sinks.tensorboard = False  # Write event files to run_dir/tensorboard. Needs the extra tensorboard.
    c.sinks.wandb_project = ""  # Project of Weights & Biases; "" for none. Needs the extra wandb.
    c.sinks.wandb_mode = "online"  # (online | offline) Offline files are sent later by `wandb sync`.


def _task(c: ConfigDict) -> None:
    """The task. `set_task` adds the sections of the tasks that run."""
    c.task = ConfigDict()
    c.task.name = ""  # A task of agentr1_jax/tasks, agentr1_jax/contrib or task.file; or mixture.
    c.task.file = ""  # Python file of your own that registers tasks; "" for none.
    c.task.args = ConfigDict()  # Keys of a task of task.file.
    c.task.data_dir = ""  # Folder of real data. "" reads the variable AGENTR1_DATA, then ../shared/data.
    c.task.mixture = ()  # Tasks of a mixture and their weights, e.g. ("gsm8k(weight=2)", "countdown(weight=1)").
    c.task.curriculum = ()  # Steps of training episodes, e.g. ("max_steps(3)", "max_steps(6, update=40)").


def _agent(c: ConfigDict) -> None:
    """Tools, tool calls, lengths and context."""
    c.tools = ConfigDict()  # Limits of every tool call; 0 for none.
    c.tools.timeout_seconds = 30.0  # Time limit of one attempt at a call.
    c.tools.max_attempts = 3  # Attempts at a call that fails by a fault of the infrastructure.
    c.tools.backoff_seconds = 0.5  # Pause before the second attempt; it doubles for each further one.
    c.tools.max_concurrent = 64  # Calls of one tool that run at once, in each process.
    c.tools.max_batch = 32  # Calls in one batch, for a tool that takes batches.
    c.tools.batch_milliseconds = 2.0  # Time for which calls are collected for a batch.
    c.tools.max_characters = 20_000  # Length of a result; the rest is truncated.
    c.tools.lenient = False  # Repair calls whose JSON is broken, and count them; see docs/call_formats.md.

    c.agent = ConfigDict()
    c.agent.call_format = "auto"  # (auto | hermes | llama3 | code | react) auto: as the chat template writes calls.
    c.agent.tell_tools = True  # Describe the tools in the first prompt. Demonstrations can teach them instead.

    c.budget = ConfigDict()  # Every length limit of a trajectory, and what happens there; see `Budget`.
    c.budget.max_steps = 5  # Steps (responses) of a trajectory.
    c.budget.response_tokens = 64  # Tokens sampled in one step, stop token included.
    c.budget.observation_tokens = 128  # Tokens of one tool result; the rest is truncated.
    c.budget.context_tokens = 512  # Prompt + response of any one step.
    c.budget.trajectory_tokens = placeholder(int)  # Tokens sampled or observed over a trajectory; unset: 8 contexts.
    c.budget.on_truncated_response = "end"  # (end | continue) End the trajectory, or give the text to the environment.
    c.budget.final_answer_step = False  # Add one step that asks for the answer where the steps run out without one.
    c.budget.step_seconds = placeholder(float)  # Time limit of one step, waiting for a slot included.
    c.budget.trajectory_seconds = placeholder(float)  # Time limit of a trajectory.

    c.context = ConfigDict()  # How the next prompt is built; see docs/context.md.
    c.context.rule = "append"  # Name and arguments of a rule, e.g. window(3).
    c.context.file = ""  # Python file of your own that registers rules; "" for none.
    c.context.summary_tokens = 64  # Most tokens of a summary.
    c.context.train_summary = True  # False leaves summaries out of the loss (an ablation).


def _policy(c: ConfigDict) -> None:
    """Tokenizer and decoder."""
    c.tokenizer = ConfigDict()
    c.tokenizer.path = ""  # Hugging Face folder or hub id, or *.model. "": that of policy.weights, else one is trained.
    c.tokenizer.vocab_size = 1024  # Pieces of a trained tokenizer.
    c.tokenizer.texts = 4000  # Sample texts that a tokenizer is trained on.

    c.policy = ConfigDict()
    c.policy.weights = ""  # Hugging Face folder or hub id of published weights; "" for random parameters of a preset.
    c.policy.preset = ""  # Shape of random parameters, a name of policy/presets.py; the next nine keys change it.
    c.policy.width = placeholder(int)  # Size of the residual stream.
    c.policy.layers = placeholder(int)  # Number of layers.
    c.policy.heads = placeholder(int)  # Query heads.
    c.policy.kv_heads = placeholder(int)  # Key and value heads; a divisor of heads.
    c.policy.head_dim = placeholder(int)  # Size of a head.
    c.policy.hidden = placeholder(int)  # Inner size of the SwiGLU.
    c.policy.rope_theta = placeholder(float)  # Base of the rotary frequencies.
    c.policy.norm_eps = placeholder(float)  # Epsilon of RMSNorm.
    c.policy.tied = placeholder(bool)  # The output head is the embedding.
    c.policy.qkv_bias = placeholder(bool)  # Query, key and value have a bias (Qwen2).
    c.policy.qk_norm = placeholder(bool)  # Query and key heads are normalised (Qwen3).
    c.policy.dtype = placeholder(str)  # (float32 | bfloat16) Of activations and matmuls.
    c.policy.param_dtype = "float32"  # (float32 | bfloat16) Of parameters.
    c.policy.precision = "default"  # (default | highest) Of matmuls in float32; TPUs and GPUs round by default.
    c.policy.remat = placeholder(str)  # (none | dots | full) What the backward pass computes again.
    c.policy.attention = placeholder(str)  # (xla | dense | splash | splash_tree | cudnn) splash: TPU; cudnn: GPU.
    c.policy.yarn = ConfigDict()  # Contexts longer than those of the first training.
    c.policy.yarn.factor = 1.0  # How many times as long; 1 for none.
    c.policy.yarn.original_positions = placeholder(int)  # Context of the first training; unset: as published.
    c.policy.lora = ConfigDict()  # Low-rank adapters; they are then all that is trained of the decoder.
    c.policy.lora.rank = 0  # Rank of the adapters; 0 for none.
    c.policy.lora.alpha = 16.0  # The adapters' output is scaled by alpha / rank.
    c.policy.lora.targets = ("query", "key", "value", "out", "gate", "up", "down")  # Projections with an adapter.


def _rollout(c: ConfigDict) -> None:
    """Groups of a batch, sampling, and the engine; see docs/rollout.md."""
    c.rollout = ConfigDict()
    c.rollout.groups = 16  # Task rows per batch, over all processes.
    c.rollout.samples = 8  # Trajectories per row.
    c.rollout.temperature = 1.0  # Of sampling, and of the learner's log-probs.
    c.rollout.top_k = 0  # Sample among the k most likely ids only; 0 for all.
    c.rollout.top_p = 1.0  # Sample among the most likely ids of this probability mass only.
    c.rollout.attempts = 2  # Attempts at a trajectory that fails by a fault of the infrastructure.
    c.rollout.failures = "drop"  # (drop | zero) What a failure of tool or environment counts as; docs/credit.md.
    c.rollout.staleness = 0  # RL batches by which rollouts may run ahead of the learner.
    c.rollout.dynamic_sampling_groups = 0  # Most further groups per batch, in place of zero-variance groups (DAPO).
    c.rollout.deterministic = False  # Wait for all tools before each cycle: a resumed run is then equal bit for bit.
    c.rollout.tensor = 1  # Devices that share the heads of a KV slot; slots are sharded over the others of a process.
    c.rollout.slots = placeholder(int)  # Responses that the engine of each process decodes together.
    c.rollout.swap_slots = placeholder(int)  # Further KV slots, for trajectories swapped out while their tool runs.
    c.rollout.slot_tokens = placeholder(int)  # Tokens that a KV slot holds; unset: budget.context_tokens.
    c.rollout.decode_chunk = placeholder(int)  # Most tokens sampled per slot in one decode call.
    c.rollout.early_exit_after = placeholder(int)  # End a decode call once so many responses have ended; 0: never.
    c.rollout.fetch_lag = placeholder(int)  # (0 | 1) 1 dispatches a decode call before the last one is fetched.
    c.rollout.prefill_width = placeholder(int)  # Tokens in one row of a prefill call.
    c.rollout.prefill_rows = placeholder(tuple)  # Sizes that a prefill call can have, in rows per device.
    c.rollout.attention_block = placeholder(int)  # Positions read at once in decoding; at most a quarter of a context.
    c.rollout.attention_group = placeholder(int)  # Decode slots per attention group; see docs/rollout.md.
    c.rollout.cache = "slots"  # (slots | pages) How the KV cache is laid out; see docs/rollout.md.
    c.rollout.page_tokens = placeholder(int)  # Positions of a page; divides rollout.attention_block.
    c.rollout.pages = placeholder(int)  # Pages of each process; unset: as much memory as the KV slots would take.
    c.rollout.adopt = "drain"  # (drain | in_flight) How rollouts ahead of the learner take new weights.
    c.rollout.kv_dtype = placeholder(str)  # (float8_e4m3fn) Of cached keys and values; unset: that of the policy.
    c.rollout.prefix_reuse = "all"  # (all | own | none) KV slots whose prefixes are reused; the last two to compare.


def _credit(c: ConfigDict) -> None:
    """From rewards to advantages; see docs/credit.md."""
    c.credit = ConfigDict()
    c.credit.name = "grpo"  # A scheme of agentr1_jax/credit, or of credit.file.
    c.credit.file = ""  # Python file of your own that registers schemes; "" for none.
    c.credit.probe = "none"  # (none | policy | reference) Whose belief in the gold answer is probed before each step.
    c.credit.probe_text = ""  # How an answer is written, with {answer} once; "": as the call format writes it.
    c.credit.args = ConfigDict()  # Arguments of the scheme; one that is unset has the scheme's own default.
    c.credit.args.gamma = placeholder(float)  # Discount.
    c.credit.args.lam = placeholder(float)  # Lambda of GAE.
    c.credit.args.lam_length = placeholder(float)  # Alpha of lambda = 1 - 1/(alpha * length); instead of lam.
    c.credit.args.anchor = placeholder(str)  # (prompt | last_token) Where step_gae reads the critic.
    c.credit.args.gamma_high = placeholder(float)  # Discount per step of bilevel_gae.
    c.credit.args.whiten = placeholder(str)  # (none | token | step | trajectory) Unit of mean and std.
    c.credit.args.unit = placeholder(str)  # (token | step | trajectory) Unit of the statistics of a group.
    c.credit.args.norm = placeholder(str)  # (mean_norm | mean_std_norm) Normalisation in a group or a state.
    c.credit.args.step_weight = placeholder(float)  # Weight of steps beside the outcome, where a scheme has both.
    c.credit.args.outcome_weight = placeholder(float)  # Weight of the outcome in turn_grpo.
    c.credit.args.signal = placeholder(str)  # (reward | return) What turn_grpo compares per turn.
    c.credit.args.history = placeholder(int)  # States (salt: and actions) before the present one that agree, too.
    c.credit.args.alpha = placeholder(float)  # Weight (k + 1)^alpha of a shared history of k states in hgpo.
    c.credit.args.prior = placeholder(float)  # Visits that the group's mean return counts as in rtmc.
    c.credit.args.kappa = placeholder(float)  # Visits that the state's mean counts as in ecpo.
    c.credit.args.tau = placeholder(float)  # Visits from which ecpo trusts a state.
    c.credit.args.omega = placeholder(float)  # Discount of graph_gpo per step that success is away.
    c.credit.args.relative = placeholder(bool)  # graph_gpo judges the progress of a step, not where it leads.
    c.credit.args.threshold = placeholder(float)  # Return above which a trajectory is a success in graph_gpo.
    c.credit.args.belief = placeholder(str)  # (probability | logprob) What gains of igpo and a2tgpo are differences of.
    c.credit.args.normalise = placeholder(str)  # (joint | separate) Gains and outcomes of igpo, together or apart.
    c.credit.args.gap = placeholder(float)  # Least gap to a certain answer in trace, nats.
    c.credit.args.horizon = placeholder(int)  # Steps over which trace averages progress.
    c.credit.args.decay = placeholder(float)  # Weight of each of them relative to the one before.
    c.credit.args.terminal_weight = placeholder(float)  # Weight of the outcome near the end in trace.
    c.credit.args.frozen = placeholder(bool)  # False lets trace read the policy's own belief.

    c.shaping = ConfigDict()  # What is done to rewards before credit is assigned.
    c.shaping.truncation_is_terminal = False  # Treat truncation as an end; else a critic values what would follow.
    c.shaping.terminal_only = False  # Give the sum of a trajectory's rewards on its last step.
    c.shaping.process_parts = ()  # Reward parts that are process rewards.
    c.shaping.process_norm = "none"  # (none | group | batch) Normalise process rewards over these steps.
    c.shaping.potential = 0.0  # Weight of gamma * potential(next state) - potential(state); 0 for none.
    c.shaping.overlong_buffer = 0  # Tokens before the limit at which the penalty for length begins; 0 for none.
    c.shaping.overlong_limit = 0  # Tokens at which the penalty is full.
    c.shaping.overlong_factor = 1.0  # The full penalty.
    c.shaping.overlong_unit = "step"  # (step | trajectory) Whose length counts.
    c.shaping.scale_returns = False  # Divide rewards by the running standard deviation of returns.


def _loss(c: ConfigDict) -> None:
    """From advantages to gradients; see docs/learner.md."""
    c.loss = ConfigDict()
    c.loss.ratio = "token"  # (token | step | trajectory | centred_step) Its unit. The last two: one more forward pass.
    c.loss.ratio_mean = "token"  # (token | step) What the mean of centred_step counts once.
    c.loss.clip = "ppo"  # How far a token moves the policy, see docs/learner.md; none: policy gradient without ratio.
    c.loss.clip_low = 0.2  # The ratio is clipped below at 1 - clip_low; `gmpo`, `dppo_*`: docs/learner.md.
    c.loss.clip_high = 0.2  # The ratio is clipped above at 1 + clip_high; likewise.
    c.loss.dual_c = 3.0  # Bound of `dual` for negative advantages, and of the ratio of `dppo_*`.
    c.loss.sapo_positive = 1.0  # Temperature of `sapo` for positive advantages.
    c.loss.sapo_negative = 1.05  # Temperature of `sapo` for other advantages.
    c.loss.clip_bias_norm = False  # Divide the policy's gradient by the norm of what the clip removed, where above 1.
    c.loss.aggregate = "token"  # (token | step | trajectory | group | fixed) What the mean of the token losses counts.
    c.loss.fixed_denominator = placeholder(float)  # Divisor of aggregate `fixed`; unset: trajectories of a minibatch.
    c.loss.value_coef = 0.5  # Weight of the value loss.
    c.loss.value_clip = 0.5  # Largest change of a value for which the value loss falls.
    c.loss.entropy_coef = 0.0  # Weight of the entropy bonus.
    c.loss.chunk = placeholder(int)  # Loss tokens per chunk of logits on each device; fewer take less memory.

    c.kl = ConfigDict()  # KL to the policy that RL starts from.
    c.kl.kind = "none"  # (none | k1 | k2 | k3 | abs | k1+ | k3+) Estimate. k1 has no gradient in the loss.
    c.kl.where = "loss"  # (loss | reward) Part of the loss, or of the reward of each token.
    c.kl.coef = 0.001  # Weight of the KL.
    c.kl.target = placeholder(float)  # KL per token at which an adaptive coefficient aims, in the reward.
    c.kl.horizon = 10_000.0  # Trajectories in which an adaptive coefficient changes by at most 20 %.

    c.correction = ConfigDict()  # Of the gap between sampler and learner; needs learner.old_logprobs=learner.
    c.correction.kind = "none"  # (none | tis_token | tis_sequence | icepop | icepop_sequence | mask_sequence) Weights.
    c.correction.unit = "trajectory"  # (trajectory | step) The sequence of the kinds that end in _sequence.
    c.correction.cap = 2.0  # Largest weight of tis_token and tis_sequence.
    c.correction.low = 0.5  # Lower bound of icepop, icepop_sequence and mask_sequence.
    c.correction.high = 2.0  # Upper bound of icepop, icepop_sequence and mask_sequence.


def _learner(c: ConfigDict) -> None:
    """Packed rows, passes over a batch, and the optimizer."""
    c.learner = ConfigDict()
    c.learner.packing = "trajectory"  # (trajectory | prefix_tree | per_step | per_step_padded) Layout of the rows.
    c.learner.row_tokens = placeholder(int)  # Length of a packed row; unset: budget.context_tokens.
    c.learner.row_loss_tokens = placeholder(int)  # Most loss tokens of a row; unset: all responses of an episode.
    c.learner.rows = placeholder(int)  # Rows of a microbatch, over all processes.
    c.learner.old_logprobs = "sampler"  # (sampler | learner) Old log-probs of the ratio: as sampled, or recomputed.
    c.learner.loss_mask = True  # False trains observation tokens like actions (an ablation).
    c.learner.advantage_mask = True  # False lets credit count observation tokens as actions (an ablation).
    c.learner.minibatches = 1  # Updates per pass over a batch.
    c.learner.epochs = 1  # Passes over a batch.
    c.learner.reduce_dtype = placeholder(str)  # Of sums of layers' gradients over mesh.fsdp; unset: policy.param_dtype.

    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"  # An optimizer: adamw, muon (for kernels; AdamW for the rest), or another one of optax.
    c.optimizer.args = ConfigDict()  # Other arguments of the optimizer, by optax's names.
    c.optimizer.lr = 1e-4  # Learning rate of the policy in RL.
    c.optimizer.value_lr = 1e-3  # Learning rate of the value head, and of a separate critic.
    c.optimizer.critic_warmup = 0  # Updates at the start of RL in which the critic alone learns.
    c.optimizer.warmup = 5  # Updates after them over which the policy's learning rate rises.
    c.optimizer.schedule = "constant"  # (constant | linear | cosine) Decay of the policy's learning rate.
    c.optimizer.final_share = 0.1  # Share of the learning rate that is left at the last update.
    c.optimizer.b1 = 0.9  # Decay of Adam's mean.
    c.optimizer.b2 = 0.95  # Decay of Adam's variance.
    c.optimizer.eps = 1e-8  # Epsilon of Adam.
    c.optimizer.weight_decay = 0.0  # Decoupled weight decay of kernels, embeddings and heads.
    c.optimizer.max_grad_norm = 1.0  # Global norm to which gradients are clipped; 0 for no clipping.


def _imitation(c: ConfigDict) -> None:
    """What comes before RL: language modelling on the task's texts, imitation of its expert, or another run."""
    c.pretrain = ConfigDict()
    c.pretrain.updates = 0  # Updates of language modelling; 0 for none.
    c.pretrain.texts = 100_000  # Most texts taken from the task.
    c.pretrain.tokens = 256  # Length at which longer texts are split.
    c.pretrain.batch = 64  # Pieces of text per update, over all processes.
    c.pretrain.lr = 3e-3  # Peak learning rate; it rises over 5 % of the updates and falls to a tenth by a cosine.
    c.pretrain.rows = 8  # Rows of a microbatch, over all processes.
    c.pretrain.row_tokens = 512  # Length of a packed row.

    c.warm_start = ConfigDict()
    c.warm_start.init_from = ""  # Folder of a finished run whose tokenizer and decoder RL starts from; "" for none.
    c.warm_start.updates = 0  # Updates of imitation; 0 for none.
    c.warm_start.control_seconds = 0.0  # If positive: no RL, but imitation for that long, also on from init_from.
    c.warm_start.lr = 3e-3  # Peak learning rate, scheduled as in pretraining.
    c.warm_start.demonstrations = 4096  # Expert trajectories, made once.
    c.warm_start.practice = 0.25  # Share of the demonstrations on the task's practice split.
    c.warm_start.batch = 64  # Trajectories per update, over all processes.


def _evaluation(c: ConfigDict) -> None:
    """Evaluations before, during and after RL."""
    c.eval = ConfigDict()
    c.eval.split = "eval"  # Split of the task. Choose a config on another one (hopworld: dev), and report on eval.
    c.eval.questions = 256  # Rows of the evaluations before and after RL.
    c.eval.every = 10  # RL batches between the evaluations during RL; 0 for none.
    c.eval.quick_questions = 64  # Rows of the evaluations during RL.


def _devices(c: ConfigDict) -> None:
    """Processes and devices; see docs/pods.md and docs/sharding.md."""
    c.processes = ConfigDict()
    c.processes.start_seconds = 300  # Time in which all processes must have started.
    c.processes.heartbeat_seconds = 30  # A process that is silent for so long counts as lost, and the others end.

    c.mesh = ConfigDict()  # The learner's mesh, over all devices of all processes.
    c.mesh.data = -1  # Axis over which batches are sharded; -1 takes the devices that the others leave.
    c.mesh.fsdp = placeholder(int)  # Axis over which batches and parameters are sharded.
    c.mesh.tensor = placeholder(int)  # Axis over which heads and hidden units are sharded.
    c.mesh.rollout_devices = 0  # Devices of each process for rollouts alone; 0: learner and engine share all devices.
