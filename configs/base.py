"""Every key of a run with its default and what it means. Experiment configs change lines of this one."""

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
    """Return the base config with the keys of the tasks of these names, and of no others.

    Args:
      names: the task, or the tasks of a mixture; none for a task of `task.file`.

    Raises:
      ValueError: no such task; the message lists the names.
    """
    c = ConfigDict()
    for section in (
        _run,
        _sinks,
        _task,
        _agent,
        _policy,
        _rollout,
        _credit,
        _loss,
        _learner,
        _phases,
        _places,
    ):
        section(c)
    set_task(c, *names)
    return c.lock()


def set_task(c: ml_collections.ConfigDict, *names: str) -> None:
    """Make a config run other tasks: their sections, with defaults, take the place of those that it had.

    Args:
      c: config, changed in place.
      names: the task, or the tasks of a mixture, for which `c.task.mixture` has yet to be set.

    Raises:
      ValueError: no such task; the message lists the names.
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
    """The run itself."""
    c.seed = 0  # keys every random choice
    c.run_dir = "runs/base"  # the run's folder, also gs://BUCKET/FOLDER; starting again resumes it
    c.updates = 100  # RL batches; 0 for a warm start alone
    c.warm_start_updates = 0  # supervised updates on demonstrations before RL
    c.control = False  # no RL: supervised updates on the same demonstrations for control_seconds, for comparison
    c.control_seconds = 480.0  # training time of a control run, in seconds
    c.checkpoint_every = 10  # RL batches between checkpoints (100 updates in the warm start)
    c.checkpoints_kept = 2  # newest checkpoints kept
    c.profile_updates = ""  # "a:b" writes a jax.profiler trace of RL batches a to b-1 to the run's folder
    c.compilation_cache = "{runs}/.programs"  # keeps compiled programs; {runs}: folder run_dir lies in; "" for none


def _sinks(c: ConfigDict) -> None:
    """Where metrics go beside metrics.jsonl; see docs/metrics.md."""
    c.sinks = ConfigDict()
    c.sinks.tensorboard = False  # event files in run_dir/tensorboard; needs the extra tensorboard
    c.sinks.wandb_project = ""  # of Weights & Biases; "" for none; needs the extra wandb
    c.sinks.wandb_mode = "online"  # online | offline: to be sent by `wandb sync`


def _task(c: ConfigDict) -> None:
    """What is practised; `set_task` adds the sections of the tasks that run."""
    c.task = ConfigDict()
    c.task.name = ""  # a section below, mixture, or a task of task.file
    c.task.file = ""  # a Python file of one's own that registers tasks; "" for none
    c.task.args = ConfigDict()  # keys of a task of task.file
    c.task.data_dir = ""  # folder of real data; "" reads AGENTR1_DATA, then ../shared/data
    c.task.mixture = ()  # mixture: its tasks and their weights, e.g. ("gsm8k(weight=2)", "countdown(weight=1)")
    c.task.curriculum = ()  # steps allowed, e.g. ("max_steps(3)", "max_steps(6, update=40)"); () for budget.max_steps


def _agent(c: ConfigDict) -> None:
    """Tools, and how the policy speaks to them."""
    c.tools = ConfigDict()  # limits of every tool call; 0 for none
    c.tools.timeout_seconds = 30.0  # time limit of one attempt at a call
    c.tools.max_attempts = 3  # attempts at a call that fails for no fault of the policy; at least 1
    c.tools.backoff_seconds = 0.5  # pause before the second attempt; doubles for each further one
    c.tools.max_concurrent = 64  # calls of one tool that run at once, in each process
    c.tools.max_batch = 32  # calls in one batch, for a tool that takes batches
    c.tools.batch_milliseconds = 2.0  # time for which calls are collected for a batch
    c.tools.max_characters = 20_000  # length of a result; the rest is truncated
    c.tools.lenient = False  # mends calls whose JSON is broken, and counts them; see docs/formats.md

    c.agent = ConfigDict()
    c.agent.call_format = (
        "auto"  # format of tool calls: hermes | llama3 | code | react; auto: that of the chat template
    )
    c.agent.tell_tools = True  # describes the tools in the first prompt; a policy taught by demonstrations knows them

    c.budget = ConfigDict()  # see Budget in agentr1_jax/trajectory.py
    c.budget.max_steps = 5
    c.budget.response_tokens = 64
    c.budget.observation_tokens = 128
    c.budget.context_tokens = 512
    c.budget.trajectory_tokens = 4096
    c.budget.on_truncated_response = "end"  # end | continue
    c.budget.final_answer_step = False
    c.budget.step_seconds = placeholder(float)  # none unless set
    c.budget.trajectory_seconds = placeholder(float)

    c.context = ConfigDict()  # how the next prompt is built; see docs/context.md
    c.context.rule = "append"  # append | window(k) | token_budget(n) | evidence | strip_thinking | summary(turns)
    c.context.file = ""  # a Python file of one's own that registers rules; "" for none
    c.context.summary_tokens = 64  # summary: most tokens of one
    c.context.train_summary = True  # False leaves summaries out of the loss (to compare)


def _policy(c: ConfigDict) -> None:
    """Tokenizer and model."""
    c.tokenizer = ConfigDict()
    c.tokenizer.path = ""  # Hugging Face folder or hub id, or SentencePiece *.model; "" trains one; {data}: data folder
    c.tokenizer.vocab_size = 1024  # of the trained one
    c.tokenizer.texts = 4000  # sample texts it is trained on

    c.policy = ConfigDict()  # see agentr1_jax/policy/config.py
    c.policy.weights = ""  # Hugging Face folder or hub id of the weights that it starts from; "" for random ones
    c.policy.preset = ""  # shape of random weights, a name in agentr1_jax/policy/presets.py
    for key in ("width", "layers", "heads", "kv_heads", "head_dim", "hidden"):
        c.policy[key] = placeholder(int)  # changes the preset
    c.policy.rope_theta = placeholder(float)
    c.policy.norm_eps = placeholder(float)
    for key in ("tied", "qkv_bias", "qk_norm"):
        c.policy[key] = placeholder(bool)
    c.policy.dtype = "float32"  # of activations; bfloat16 on accelerators
    c.policy.param_dtype = "float32"  # of parameters
    c.policy.remat = "none"  # none | dots | full: what the backward pass computes again
    c.policy.attention = "xla"  # xla | dense | splash (TPU) | splash_tree (TPU, for learner.packing=prefix_tree)
    c.policy.lora = ConfigDict()  # low-rank adapters: they are then all that is trained of the decoder
    c.policy.lora.rank = 0  # 0 for none
    c.policy.lora.alpha = 16.0
    c.policy.lora.targets = ("query", "key", "value", "out", "gate", "up", "down")
    c.critic = "none"  # none | shared_trunk: a value head on the policy's trunk | separate: on a decoder of its own


def _rollout(c: ConfigDict) -> None:
    """Sampling."""
    c.rollout = ConfigDict()
    c.rollout.groups = 16  # task rows per batch, over all processes
    c.rollout.samples = 8  # trajectories per group, that is, per task row
    c.rollout.temperature = 1.0  # divides the logits in sampling and in the log-probs of the learner
    c.rollout.top_k = 0  # sample among the k most likely ids; 0 for all
    c.rollout.top_p = 1.0  # sample among the most likely ids whose probabilities sum to p; 1 for all
    c.rollout.tensor = 1  # devices that share the heads of a KV slot; slots are sharded over the other devices
    c.rollout.slots = 64  # decode slots: responses that the engine of each process decodes together
    c.rollout.swap_slots = 16  # further KV slots, for trajectories that are swapped out while their tool runs
    c.rollout.slot_tokens = 512  # tokens that a KV slot can hold; at least budget.context_tokens
    c.rollout.decode_chunk = 8  # most tokens sampled per slot in one decode call
    c.rollout.early_exit_after = 1  # a decode call ends early once this many responses have ended; 0: never
    c.rollout.fetch_lag = 0  # 0: fetch a chunk before the next one is dispatched; 1: dispatch the next one first
    c.rollout.prefill_width = 16  # tokens per row of a prefill call
    c.rollout.prefill_rows = (8, 32)  # buckets of rows per prefill call and device, ascending
    c.rollout.attention_block = 64  # positions per attention block in decoding; small on a CPU, 512 or more elsewhere
    c.rollout.attention_group = 8  # decode slots per attention group: 8 on a CPU, all slots of a device elsewhere
    c.rollout.prefix_reuse = "all"  # cached prefixes that are not computed again: all | own | none (for comparison)
    c.rollout.deterministic = False  # wait for all running tools before each chunk: a resumed run is then bit-equal
    c.rollout.attempts = 2  # attempts at a trajectory that a tool or environment failed; then it is dropped and counted
    c.rollout.staleness = 0  # batches by which rollouts may run ahead of the learner; see docs/rollout.md
    c.rollout.dynamic_sampling_groups = 0  # most groups sampled per batch in place of zero-variance groups (DAPO)


def _credit(c: ConfigDict) -> None:
    """From rewards to advantages."""
    c.credit = ConfigDict()
    c.credit.name = "grpo"  # a scheme of agentr1_jax/credit, or of credit.file
    c.credit.file = ""  # a Python file of one's own whose functions carry @register; "" for none
    c.credit.args = ConfigDict()  # arguments of the scheme where they differ from its defaults
    c.credit.args.gamma = placeholder(float)  # discount
    c.credit.args.lam = placeholder(float)  # lambda of GAE
    c.credit.args.gamma_high = placeholder(float)  # bilevel_gae: discount per step
    c.credit.args.whiten = placeholder(str)  # none | token | step | trajectory: what mean and std count once
    c.credit.args.unit = placeholder(str)  # token | step | trajectory: likewise, of statistics of a group
    c.credit.args.norm = placeholder(str)  # mean_norm | mean_std_norm (gigpo, turn_grpo)
    c.credit.args.step_weight = placeholder(float)  # gigpo: of the part that compares equal states
    c.credit.args.outcome_weight = placeholder(float)  # turn_grpo: of the outcome
    c.credit.args.signal = placeholder(str)  # turn_grpo: reward | return
    c.credit.args.history = placeholder(int)  # hgpo: states before the present one
    c.credit.args.alpha = placeholder(float)  # hgpo: the longer shared history counts (k + 1)^alpha times

    c.shaping = ConfigDict()  # reward shaping; see agentr1_jax/credit/config.py
    c.shaping.truncation_is_terminal = False  # True: nothing follows a truncated trajectory; else a critic values it
    c.shaping.terminal_only = False  # the sum of a trajectory's rewards is given on its last step
    c.shaping.process_parts = ()  # reward parts that are process rewards
    c.shaping.process_norm = "none"  # none | group | batch: over whose steps they are normalised
    c.shaping.potential = 0.0  # weight of gamma * potential(next state) - potential(state), where the task has one
    c.shaping.overlong_buffer = 0  # tokens before the limit at which a penalty for length begins; 0 for none
    c.shaping.overlong_limit = 0  # tokens at which it is full
    c.shaping.overlong_factor = 1.0  # the full penalty
    c.shaping.overlong_unit = "step"  # step | trajectory: whose tokens
    c.shaping.scale_returns = False  # divides rewards by the running std of returns


def _loss(c: ConfigDict) -> None:
    """From advantages to gradients."""
    c.loss = ConfigDict()
    c.loss.ratio = "token"  # token | step | trajectory | capo (the last two take one more forward pass per update)
    c.loss.clip = "ppo"  # ppo | asymmetric | dual | cispo | sapo | none
    c.loss.clip_low = 0.2
    c.loss.clip_high = 0.2
    c.loss.dual_c = 3.0  # bound of `dual` for negative advantages
    c.loss.sapo_positive = 1.0  # temperature of `sapo` where the advantage is positive
    c.loss.sapo_negative = 1.05  # and where it is not
    c.loss.aggregate = "token"  # token | step | trajectory | group | fixed
    c.loss.fixed_denominator = 1.0  # of `fixed`
    c.loss.value_coef = 0.5
    c.loss.value_clip = 0.5
    c.loss.entropy_coef = 0.0
    c.loss.chunk = 1024  # loss tokens per chunk of logits

    c.kl = ConfigDict()  # to the policy that RL starts from
    c.kl.kind = "none"  # none | k1 | k2 | k3; k1 has no gradient in the loss, and the right one in the reward
    c.kl.where = "loss"  # loss | reward
    c.kl.coef = 0.001
    c.kl.target = placeholder(float)  # in the reward: adapts the coefficient to this KL per token; fixed unless set
    c.kl.horizon = 10_000.0  # trajectories in which the coefficient changes by at most 20 %

    c.correction = ConfigDict()  # of the gap between sampler and learner; needs learner.old_logprobs=learner
    c.correction.kind = "none"  # none | tis_token | tis_sequence | icepop | mask_sequence
    c.correction.unit = "trajectory"  # what a sequence is: trajectory | step
    c.correction.cap = 2.0  # most weight of tis_*
    c.correction.low = 0.5  # bounds of icepop and mask_sequence
    c.correction.high = 2.0


def _learner(c: ConfigDict) -> None:
    """Rows, and the optimizer."""
    c.learner = ConfigDict()
    c.learner.packing = "trajectory"  # trajectory | prefix_tree | per_step | per_step_padded; see docs/learner.md
    c.learner.row_tokens = 512  # length of a packed row
    c.learner.row_loss_tokens = 192  # most loss tokens of a row
    c.learner.rows = 8  # rows of a microbatch, over all processes
    c.learner.old_logprobs = "sampler"  # sampler | learner (recomputed): the old policy of ratio and clip
    c.learner.loss_mask = True  # False trains on what came from tools as if the policy had said it (to compare)
    c.learner.advantage_mask = True  # False lets credit count those tokens as actions (to compare)
    c.learner.minibatches = 1  # updates per pass over a batch
    c.learner.epochs = 1  # passes over a batch

    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"  # adamw | muon (for the kernels of the layers; AdamW for the rest) | an optax alias
    c.optimizer.args = ConfigDict()  # hyper-parameters of the alias where they differ from its defaults
    c.optimizer.lr = 1e-4  # of the policy in RL
    c.optimizer.value_lr = 1e-3  # of the value head, and of a critic of its own
    c.optimizer.critic_warmup = 0  # updates at the start of RL in which the critic alone learns
    c.optimizer.warmup = 5  # updates after them over which the rate of the policy rises
    c.optimizer.schedule = "constant"  # constant | linear | cosine, after the rise
    c.optimizer.final_share = 0.1  # share of the rate at the last update
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.95
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0
    c.optimizer.max_grad_norm = 1.0  # 0 for no clipping


def _phases(c: ConfigDict) -> None:
    """What comes before RL, and beside it."""
    c.pretrain = ConfigDict()  # on texts of the task, before the warm start
    c.pretrain.updates = 0  # 0 for none
    c.pretrain.texts = 100_000  # most texts of the task
    c.pretrain.tokens = 256  # longer texts are split
    c.pretrain.batch = 64  # pieces of text per update, over all processes
    c.pretrain.lr = 3e-3  # peak, as in the warm start
    c.pretrain.rows = 8  # of a microbatch, over all processes
    c.pretrain.row_tokens = 512  # length of a packed row

    c.warm_start = ConfigDict()
    c.warm_start.run = ""  # a run's folder, whose tokenizer and newest decoder RL starts from, in place of the below
    c.warm_start.lr = 3e-3  # peak; rises over 5 % and falls to a tenth by a cosine
    c.warm_start.demonstrations = 4096  # expert trajectories, made once
    c.warm_start.practice = 0.25  # share of them on the task's practice split
    c.warm_start.batch = 64  # trajectories per update, over all processes

    c.eval = ConfigDict()
    c.eval.split = "eval"  # what is evaluated on; hopworld has dev too: choose a config there, report on eval
    c.eval.questions = 256  # of the split
    c.eval.every = 10  # RL batches between evaluations
    c.eval.quick_questions = 64  # questions of those evaluations


def _places(c: ConfigDict) -> None:
    """Processes and devices."""
    c.processes = ConfigDict()  # where there are several; see docs/launching.md
    c.processes.start_seconds = 300  # in which all of them must have started
    c.processes.heartbeat_seconds = 30  # one that was silent for so long counts as lost, and the others end

    c.mesh = ConfigDict()  # of the learner; -1 takes what the other axes leave
    c.mesh.data = -1
    c.mesh.fsdp = 1
    c.mesh.tensor = 1
    c.mesh.rollout_devices = 0  # of each process, for rollouts alone; 0: learner and engine share all
