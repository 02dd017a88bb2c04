"""Every key of a run with its default and what it means. Experiment configs change lines of this one."""

from __future__ import annotations

import ml_collections
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ml_collections.ConfigDict:
    """The base config; not runnable by itself, since it names no task."""
    c = ConfigDict()
    for section in (
        _run,
        _sinks,
        _task,
        _question_tasks,
        _calculations,
        _memory,
        _games,
        _adapters,
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
    return c.lock()


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
    """What is practised."""
    c.task = ConfigDict()
    c.task.name = ""  # a section below, mixture, or a task of task.file
    c.task.file = ""  # a Python file of one's own that registers tasks; "" for none
    c.task.args = ConfigDict()  # arguments of a task of task.file
    c.task.data_dir = ""  # folder of real data; "" reads AGENTR1_DATA, then ../shared/data
    c.task.mixture = ()  # mixture: its tasks and their weights, e.g. ("gsm8k=2", "countdown=1")
    c.task.curriculum = ()  # steps allowed from an RL batch on, e.g. ("0:3", "40:6"); () for budget.max_steps always
    c.task.top_k = 3  # hopworld, multihop: passages a search returns
    c.task.rewards = ConfigDict()  # weights of the reward parts; a task reads those that it has
    c.task.rewards.answer = 1.0  # exact match of the final answer
    c.task.rewards.f1 = 0.0  # F1 of the final answer
    c.task.rewards.format = 0.1  # raw part is -1 for an ill-formed step
    c.task.rewards.gold_passage = 0.1  # for each gold passage first retrieved
    c.task.rewards.repeated_query = -0.1  # for each call made before
    c.task.rewards.wasted_call = -0.2  # countdown: for each call with other numbers, or to a value seen before
    c.task.rewards.state = 1.0  # bfcl: the end state is that of the ground truth
    c.task.rewards.turn_state = 0.0  # bfcl: and the state after each request
    c.task.rewards.summary = 0.2  # whereabouts: a summary has everybody where they are
    c.task.rewards.goal = 1.0  # games: what the end pays
    c.task.rewards.side = 1.0  # games: what is paid on the way


def _question_tasks(c: ConfigDict) -> None:
    """Tasks that are answered."""
    c.task.hopworld = ConfigDict()  # multi-hop questions about procedural worlds
    c.task.hopworld.questions_per_world = 16  # questions asked of one world
    c.task.hopworld.flaws = ConfigDict()  # rates of the expert's flawed decisions
    c.task.hopworld.flaws.bridge_answer = 0.52  # answers with what is at hand instead of one more lookup
    c.task.hopworld.flaws.skip_hop = 0.06  # asks the present subject for what only the next one can tell
    c.task.hopworld.flaws.repeat_query = 0.06  # sends a query again
    c.task.hopworld.flaws.malformed_call = 0.06  # forgets a brace of the call

    c.task.multihop = ConfigDict()  # real multi-hop questions
    c.task.multihop.datasets = ("hotpotqa", "2wikimultihopqa")  # whose questions and passages
    c.task.multihop.eval_datasets = ()  # whose questions evaluate; () for those of task.multihop.datasets
    c.task.multihop.corpus = "full"  # full | mini
    c.task.multihop.files = ConfigDict()  # read in place of the data folder's; see docs/data.md
    c.task.multihop.files.train = ()  # paths; ~ and {data} are replaced
    c.task.multihop.files.eval = ()
    c.task.multihop.files.corpus = ()  # further passages to search
    c.task.multihop.mixture = ()  # weights of the data sets in training, e.g. ("hotpotqa=1", ...); () for by size
    c.task.multihop.held_out = 0  # training questions of each data set below that are the split held_out instead
    c.task.multihop.held_out_datasets = ()  # () for all training data sets
    c.task.multihop.instruction = ""  # what follows the question in the prompt; "" for the task's own
    c.task.multihop.passage_characters = 0  # longest text of a passage in a search result; 0 for no limit
    c.task.multihop.reward = "weighted"  # weighted (task.rewards) | agentr1_v1 (fixed); see docs/data.md
    c.task.multihop.reward_functions = ()  # of one's own that are paid too, e.g. ("my_rewards:brevity=0.2",)
    c.task.multihop.retriever = ConfigDict()  # what finds passages; see docs/search.md
    c.task.multihop.retriever.kind = "bm25"  # bm25 | dense | http
    c.task.multihop.retriever.index = ""  # bm25, dense: folder that keeps the index between runs; "" for none
    c.task.multihop.retriever.encoder = ""  # dense: folder or hub id of a BERT, RoBERTa or XLM-RoBERTa checkpoint
    c.task.multihop.retriever.pooling = "mean"  # dense: mean | cls: what of a text's hidden states is its vector
    c.task.multihop.retriever.normalised = True  # dense: vectors have length 1 (E5, BGE); False for Contriever
    c.task.multihop.retriever.query_prefix = ""  # dense: stands before a query; "query: " for E5
    c.task.multihop.retriever.passage_prefix = ""  # dense: stands before a passage; "passage: " for E5
    c.task.multihop.retriever.tokens = 512  # dense: of a text; what exceeds them is cut
    c.task.multihop.retriever.dtype = "float32"  # dense: float32 | bfloat16, of activations and of vectors on devices
    c.task.multihop.retriever.url = ""  # http: of the server's search, e.g. http://localhost:8000/retrieve
    c.task.multihop.retriever.seconds = 10.0  # http: time limit of a request
    c.task.multihop.retriever.attempts = 1  # http: requests for one search; tools.attempts repeats failed calls, too
    c.task.multihop.retriever.cache = 10_000  # http: answers kept in memory; 0 for none


def _memory(c: ConfigDict) -> None:
    """Tasks that are remembered."""
    c.task.whereabouts = ConfigDict()  # reports of who goes where, and then the question where somebody is
    c.task.whereabouts.people = 6  # who moves
    c.task.whereabouts.places = 8  # where they can be
    c.task.whereabouts.reports = 10  # before the question
    c.task.whereabouts.moves = 1  # in each, if nobody moves in it for the last time
    c.task.whereabouts.forgets = 0.25  # probability that a summary of the expert leaves out somebody
    c.task.whereabouts.mistakes = 0.1  # probability that its answer is a guess


def _calculations(c: ConfigDict) -> None:
    """Tasks that are calculated."""
    c.task.gsm8k = ConfigDict()  # word problems
    c.task.gsm8k.tool = "calculator"  # calculator | python

    c.task.countdown = ConfigDict()  # an expression of given numbers that comes to a target
    c.task.countdown.numbers = 3  # how many
    c.task.countdown.largest = 12  # of them
    c.task.countdown.operators = "+-"  # of + - * /
    c.task.countdown.hasty = 0.7  # probability that the expert answers with what it has just seen miss the target
    c.task.countdown.stubborn = 0.3  # probability that it tries the same again


def _games(c: ConfigDict) -> None:
    """Tasks that are played."""
    c.task.keydoor = ConfigDict()  # a key picked up at first, for a door at the end
    c.task.keydoor.mistakes = 0.7  # probability that the expert errs, at each step
    c.task.keydoor.rooms = 5  # between the key and the door; an episode has two steps more
    c.task.keydoor.key_count = 3  # in the first room, one of which fits
    c.task.keydoor.noise = 0.3  # a thing pays its mean plus or minus this

    c.task.frozenlake = ConfigDict()  # over the ice, past the holes
    c.task.frozenlake.mistakes = 0.7  # probability that the expert errs, at each step
    c.task.frozenlake.size = 4  # cells of a side
    c.task.frozenlake.holes = 0.2  # share of the cells
    c.task.frozenlake.slip = 0.0  # probability that a step slides to a side; 2/3 is Gymnasium's slippery lake

    c.task.sokoban = ConfigDict()  # boxes are pushed onto targets
    c.task.sokoban.mistakes = 0.7  # probability that the expert errs, at each step
    c.task.sokoban.size = 4  # cells of a side
    c.task.sokoban.boxes = 1  # with size at most 2000 states: 6 and 1, or 4 and 2
    c.task.sokoban.walls = 0.15  # share of the cells
    c.task.sokoban.least_moves = 3  # of the shortest solution of a level
    c.task.sokoban.most_moves = 10
    c.task.sokoban.on_target = 0.1  # a box that is not the last pays this on a target, and costs it where it leaves one


def _adapters(c: ConfigDict) -> None:
    """Environments of others; see docs/contrib/."""
    c.task.gymnasium = ConfigDict()
    c.task.gymnasium.id = ""  # of Gymnasium's registry, e.g. FrozenLake-v1; module:Name-v0 imports the module first
    c.task.gymnasium.kwargs = ""  # of gymnasium.make: the text of a JSON object
    c.task.gymnasium.actions = ()  # names of a Discrete space's actions, in their order; () for numbers
    c.task.gymnasium.instruction = ""  # opens an episode
    c.task.gymnasium.observation = "text"  # text (of its space) | ansi (what it draws)
    c.task.gymnasium.digits = 3  # significant digits of a Box's numbers
    c.task.gymnasium.most_numbers = 256  # of an observation
    c.task.gymnasium.success_return = 1.0  # an episode that returns so much has em 1, unless it says so itself

    c.task.http = ConfigDict()  # a server of its own protocol, which weighs its rewards itself
    c.task.http.url = ""  # e.g. http://localhost:8100
    c.task.http.seconds = 30.0  # time limit of a request
    c.task.http.attempts = 3  # requests for one call that does not come through
    c.task.http.backoff = 0.5  # seconds before the second request; doubles

    c.task.verifiers = ConfigDict()  # a file in the form of the verifiers library, which weighs its rewards itself
    c.task.verifiers.source = ""  # path of the Python file, or an installed module
    c.task.verifiers.args = ""  # of its load_environment: the text of a JSON object


def _agent(c: ConfigDict) -> None:
    """Tools, and how the policy speaks to them."""
    c.tools = ConfigDict()  # limits of every tool call; 0 for none
    c.tools.seconds = 30.0  # of a call
    c.tools.attempts = 3  # of a call that fails for no fault of the policy
    c.tools.backoff = 0.5  # seconds before the second attempt; doubles
    c.tools.calls = 64  # calls of a tool at once, in each process
    c.tools.batch = 32  # calls in one batch, of a tool that takes batches
    c.tools.batch_milliseconds = 2.0  # a batch waits for others
    c.tools.characters = 20_000  # of a result; what exceeds them is cut
    c.tools.lenient = False  # mends calls whose JSON is broken, and counts them; see docs/formats.md
    c.tools.record = ""  # file that every call and its result is appended to; see agentr1_jax/tools/replay.py
    c.tools.replay = ""  # such a file, from which calls are answered in place of the tools

    c.agent = ConfigDict()
    c.agent.dialect = "auto"  # how calls are written: hermes | llama3 | code | react; auto: as the tokenizer's template
    c.agent.tell_tools = True  # describes the tools in the first prompt; a policy taught by demonstrations knows them

    c.budget = ConfigDict()  # see Budget in agentr1_jax/trajectory.py
    c.budget.max_steps = 5
    c.budget.response_tokens = 64
    c.budget.observation_tokens = 128
    c.budget.context_tokens = 512
    c.budget.trajectory_tokens = 4096
    c.budget.on_response_cut = "end"  # end | continue
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
    c.policy.weights = ""  # Hugging Face folder or hub id, or llama2.c folder, that it starts from; "" for random ones
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
    c.policy.attention = "xla"  # xla | dense | cudnn | splash (TPU) | splash_tree (TPU, for learner.packing=tree)
    c.policy.lora = ConfigDict()  # low-rank adapters: they are then all that is trained of the decoder
    c.policy.lora.rank = 0  # 0 for none
    c.policy.lora.alpha = 16.0
    c.policy.lora.targets = ("query", "key", "value", "out", "gate", "up", "down")
    c.critic = "none"  # none | shared_trunk: a value head on the policy's trunk | separate: on a decoder of its own


def _rollout(c: ConfigDict) -> None:
    """Sampling."""
    c.rollout = ConfigDict()
    c.rollout.groups = 16  # task rows per batch, over all processes
    c.rollout.samples = 8  # trajectories per row
    c.rollout.temperature = 1.0  # of sampling, and of the learner's log-probs
    c.rollout.tensor = 1  # devices that share the heads of one slot; the others of an engine share the slots
    c.rollout.top_k = 0  # samples among so many likeliest ids; 0 for all
    c.rollout.top_p = 1.0  # samples among the likeliest ids of this mass
    c.rollout.slots = 64  # responses that the engine of each process decodes together
    c.rollout.parking = 16  # further lines of the cache, for trajectories whose tool is at work
    c.rollout.decode_chunk = 8  # most tokens between two looks of the host
    c.rollout.leave_after = 1  # a chunk ends early once so many responses have ended; 0: never
    c.rollout.fetch_lag = 0  # chunks by which the host's look lags behind: 0 | 1
    c.rollout.prefill_width = 16  # tokens of a row of a prefill call
    c.rollout.prefill_rows = (8, 32)  # buckets of rows of a prefill call, per device
    c.rollout.length = 512  # tokens a line of the cache holds
    c.rollout.attention_block = 64  # positions that decoding reads at once; small on a CPU, 512 and more elsewhere
    c.rollout.attention_slots = 8  # slots whose lines it reads together; all of a device's elsewhere
    c.rollout.reuse = "all"  # all | own | none: lines whose keys and values are used again, to compare
    c.rollout.deterministic = False  # waits for all tools before each chunk: a resumed run is then equal bit for bit
    c.rollout.attempts = 2  # of a trajectory that a tool or an environment failed; then it is dropped and counted
    c.rollout.staleness = 0  # RL batches by which rollouts may run ahead of the learner; see docs/rollout.md
    c.rollout.refills = 0  # most further groups sampled in a batch in place of those whose returns are all equal


def _credit(c: ConfigDict) -> None:
    """From rewards to advantages."""
    c.credit = ConfigDict()
    c.credit.name = "grpo"  # a scheme of agentr1_jax/credit, or of credit.file
    c.credit.file = ""  # a Python file of one's own whose functions carry @register; "" for none
    c.credit.args = ConfigDict()  # its hyper-parameters where they differ from its defaults
    c.credit.args.gamma = placeholder(float)  # discount
    c.credit.args.lam = placeholder(float)  # lambda of GAE
    c.credit.args.gamma_high = placeholder(float)  # bilevel_gae: discount per step
    c.credit.args.whiten = placeholder(str)  # none | token | step | trajectory: what mean and std count once
    c.credit.args.unit = placeholder(str)  # token | step | trajectory: likewise, of statistics of a group
    c.credit.args.norm = placeholder(str)  # mean_norm | mean_std_norm (gigpo, turn_grpo)
    c.credit.args.step_weight = placeholder(float)  # gigpo: of the part that compares equal states
    c.credit.args.outcome_weight = placeholder(float)  # turn_grpo: of the outcome
    c.credit.args.of = placeholder(str)  # turn_grpo: reward | return
    c.credit.args.history = placeholder(int)  # hgpo: states before the present one
    c.credit.args.alpha = placeholder(float)  # hgpo: the longer shared history counts (k + 1)^alpha times

    c.shaping = ConfigDict()  # what is done to rewards before credit; see agentr1_jax/credit/shaping.py
    c.shaping.limits_end = False  # what the budget cut is over: limits are part of the task; else a critic values on
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
    c.loss.chunk = 1024  # reads per chunk of logits

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
    c.learner.packing = "chains"  # chains | tree | steps | padded
    c.learner.row_tokens = 512  # length of a packed row
    c.learner.row_reads = 192  # trained tokens a row can hold
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
