"""Trains an agent: warm start on demonstrations, reinforcement learning, evaluation, report.

    python -m experiments.train --config=configs/quickstart.py [--config.key=value ...]

A run owns its folder (`config.run_dir`); the same command again resumes it. SIGTERM and Ctrl-C save and leave.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

import ml_collections
from absl import flags, logging

from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError
from agentr1_jax.learner.kl import next_kl_coef
from agentr1_jax.learner.schedules import rate_by_progress
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.rollout.background import BackgroundEngine
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.lock import lock_folder
from agentr1_jax.runtime.metrics import MetricsWriter
from agentr1_jax.runtime.monitoring import parse_profile_updates, progress_bar, trace_updates
from agentr1_jax.runtime.processes import use_huge_pages
from agentr1_jax.runtime.run_folder import RunFolder, batch_name, check_shared
from agentr1_jax.runtime.seeds import generator
from agentr1_jax.runtime.sinks import SinksConfig, make_sinks
from agentr1_jax.tools.metrics import ToolMetrics
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.validation import from_section
from experiments import build, checks, circle, closing, dry_run, inherited, learning, phases, tasks
from experiments.batches import Batches, ages, sampler
from experiments.circle import Run
from experiments.journal import Journal, Position, Stopped, add_totals, count_recompiles
from experiments.learning import Pending
from experiments.phases import Learner
from experiments.retrieval import LateDispatch

CONFIG = configs.define_config_flag()
DRY_RUN = flags.DEFINE_bool("dry_run", False, "print sizes and programs of the run, and leave")
TOPOLOGY = flags.DEFINE_string("topology", "", "with --dry_run: compile for a TPU slice that is not here, e.g. v5e:4x4")
SKIPPED_IN_A_ROW = 3


def main(argv: Sequence[str]) -> None:
    """Joins the processes of the run, and takes its folder for as long as it lasts."""
    del argv
    started = time.perf_counter()
    config = CONFIG.value
    if DRY_RUN.value or TOPOLOGY.value:
        return dry_run.show(config, TOPOLOGY.value)
    processes.initialize(config.processes.start_seconds, config.processes.heartbeat_seconds)
    checks.check(config)
    build.keep_programs(config)
    with lock_folder(config.run_dir) if processes.process_index() == 0 else contextlib.nullcontext():
        check_shared(config.run_dir)
        train(config, started)


def train(config: ml_collections.ConfigDict, started: float) -> None:
    """Reads like the run: set-up, warm start, reinforcement learning, evaluation, report.

    Args:
      config: of the run.
      started: `time.perf_counter()` when it was.
    """
    first, compiles = processes.process_index() == 0, CompileCounter()
    run = set_up(config)
    fresh, restart, (optimizer, like, layout) = build.learner_state(config, run.policy, run.learner_mesh)

    checkpoints = Checkpoints(config.run_dir, config.checkpoints_kept)
    restored = checkpoints.restore(like)
    if restored is None:
        state, position = fresh(), Position()
    else:
        state, position = restored[0], Position.of(restored[1], config.run_dir)
    started -= position.seconds

    sinks = make_sinks(
        from_section(SinksConfig, "sinks", config.sinks.to_dict()), config.run_dir, configs.resolve(config)
    )
    with (
        MetricsWriter(config.run_dir, position.metrics_index, first, sinks) as metrics,
        processes.StopRequest() as stop,
    ):
        folder = RunFolder(config.run_dir)
        journal = Journal(position, metrics, checkpoints, folder, stop, compiles, started)
        try:
            circle.compile_engine(run, state.params)
            if stop.requested_anywhere():
                raise Stopped
            logging.info("programs of the set-up: %s", compiles)
            if position.phase == "pretraining":
                state = restart(pretrain(run, journal, phases.pretraining(run, optimizer, layout), state).params)
                position.enter("warm_start")
                if config.pretrain.updates:
                    journal.save(state)
            if position.phase == "warm_start":
                state = restart(warm_start(run, journal, phases.supervised(run, optimizer, layout), state).params)
                position.enter("rl")
                position.warm_start_seconds = journal.seconds
                label = "control" if config.control else "before"
                for name, temperature in ((label, 1.0), (f"{label}_greedy", 0.0)):
                    measured = evaluate(run, journal, state, f"eval_{name}", temperature)
                    if "em" in measured:  # Some trajectory was sampled.
                        position.results[f"em_{name}"] = measured["em"]
                journal.save(state)
            if position.phase == "rl" and config.updates and not config.control:
                fresh_rl = position.update == 0
                reference = build.reference(config, run.policy, run.learner_mesh, state.params, fresh=fresh_rl)
                state = reinforce(run, journal, phases.reinforced(run, optimizer, layout, reference), state)
                for label, temperature in (("after", 0.0), ("after_sampled", 1.0)):
                    measured = evaluate(run, journal, state, f"eval_{label}", temperature)
                    position.results |= {f"{k}_{label}": v for k, v in measured.items() if k[:2] in ("em", "f1")}
            if position.phase != "done":
                position.enter("done")
                journal.save(state)
        except Stopped:
            logging.info("stopped and saved; the same command resumes the run in %s", config.run_dir)
            return
        finally:
            checkpoints.close()
            logging.info("programs of this start: %s", compiles)
    if first:
        closing.finish(run, position)


def set_up(config: ml_collections.ConfigDict) -> Run:
    """The parts of a run. Writes nothing but config and tokenizer, and those only after all processes agree.

    Raises:
      UserError: the config cannot work, or the run folder holds something else.
    """
    resumes = RunFolder(config.run_dir).check_same_config(configs.resolve(config))
    if config.warm_start.run and not resumes:
        inherited.check(config)
    tools, dispatch = ToolMetrics(), LateDispatch()
    task = tasks.make_task(config, tools, dispatch)
    checks.check_task(config, task)
    processes.barrier()
    owner = processes.process_index() == 0 and not resumes
    try:
        tokenizer = build.tokenizer(config, task, resumes=resumes)
        agent = build.agent(config, task, tokenizer)
        checks.check_openings(config, task, agent)
        policy = build.policy(config, tokenizer)
        learner_mesh = build.learner_mesh(config)
        processes.use_devices(list(learner_mesh.devices.flat))
        checks.check_attention(config, policy, learner_mesh)
        rollout_mesh = build.rollout_mesh(config)
        frozen = build.frozen(config, policy, learner_mesh)
        engine = build.engine(config, policy, rollout_mesh)
        dispatch.to = engine.dispatch
        copied = config.rollout.staleness > 0
        view = build.rollout_view(policy, learner_mesh, rollout_mesh, copied=copied)
    except BaseException:
        if owner:
            build.discard_tokenizer(config)  # The corrected command must find the folder as this one did.
        raise
    if owner:
        RunFolder(config.run_dir).write_config(configs.resolve(config))
    return Run(config, task, tokenizer, agent, policy, frozen, engine, learner_mesh, view, tools)


def pretrain(run: Run, journal: Journal, learner: Learner, state: LearnerState) -> LearnerState:
    """Supervised updates on the task's texts."""
    c = run.config.pretrain
    if not c.updates or run.config.warm_start.run:
        return state
    return supervise(run, journal, learner, state, circle.documents(run), c)


def warm_start(run: Run, journal: Journal, learner: Learner, state: LearnerState) -> LearnerState:
    """Supervised updates on expert trajectories: a number of them, or as many as a control's time allows."""
    config = run.config
    if not config.warm_start_updates or config.warm_start.run:
        return state
    expert = circle.demonstrations(run)
    if journal.position.update == 0:
        RunFolder(config.run_dir).write_trajectories("demonstrations", expert[: closing.SHOWN_PER_FILE])
        logging.info("%d demonstrations, em %.3f", len(expert), circle.means(expert)["em"])
    state = supervise(run, journal, learner, state, expert, config.warm_start)
    journal.save(state)
    return state


def supervise(
    run: Run,
    journal: Journal,
    learner: Learner,
    state: LearnerState,
    examples: Sequence[Trajectory],
    c: ml_collections.ConfigDict,
) -> LearnerState:
    """Updates with advantage 1 on examples, `c.batch` at a time; the rate rises over 5 % and falls by a cosine."""
    config, position = run.config, journal.position
    phase, timed = position.phase, config.control and position.phase == "warm_start"
    total = config.pretrain.updates if phase == "pretraining" else config.warm_start_updates
    first = processes.process_index() == 0
    per_process = c.batch // processes.process_count()
    late: list[tuple[int, float, Pending]] = []  # The update before, which the device may still be computing.
    since = time.perf_counter()

    def tell() -> None:
        """Waits for the update before, and writes its record where one is due."""
        nonlocal since
        for update, rate, pending in late:
            record = pending.result() | {"time/learn": time.perf_counter() - since}
            since = time.perf_counter()
            if update % 10 == 0 or update == total:
                journal.metrics.write({"phase": phase, "update": update, "learner/lr": rate, **record})
                show(update, f"loss {record.get('learner/loss', math.nan):.3f}, {tokens_per_second(record)}")
        late.clear()

    warmed_up = False
    with progress_bar(phase.replace("_", " "), position.update, total, first) as show:
        while (done := journal.seconds / config.control_seconds if timed else position.update / total) < 1:
            compiled = journal.compiles.count
            batch = draw(examples, per_process, config.seed, position.update)
            rate = c.lr * rate_by_progress("cosine", done, warmup=0.05, final_share=0.1)
            state, pending, _ = learning.learn(run, learner, state, batch, dict.fromkeys(state.params, rate))
            tell()
            position.update += 1
            late.append((position.update, rate, pending))
            if warmed_up:
                count_recompiles(position, journal.compiles.count - compiled)
            warmed_up = True
            journal.save_if_due(state, 100 * config.checkpoint_every, before=tell)
        tell()
    return state


def draw(examples: Sequence[Trajectory], size: int, seed: int, update: int) -> list[Trajectory]:
    """The batch of an update: passes over the examples, each in an order of its own."""
    per_epoch = max(len(examples) // size, 1)
    order = generator(seed, "demonstration order", update // per_epoch).permutation(len(examples))
    return [examples[i] for i in order[(update % per_epoch) * size :][:size]]


def reinforce(run: Run, journal: Journal, learner: Learner, state: LearnerState) -> LearnerState:
    """The circle: roll out, learn, and again."""
    config, position = run.config, journal.position
    c, first = config.rollout, processes.process_index() == 0
    warmed_up = False
    traced = trace_updates(config.run_dir, parse_profile_updates(config.profile_updates), first)
    shown = progress_bar("rl", position.update, config.updates, first)
    with sampler(run, journal, state.params) as batches, shown as show, traced as begin:
        for update in range(position.update, config.updates):
            evaluate_if_due(run, journal, state, batches)
            begin(update)
            compiled = journal.compiles.count
            # A picture of one batch: of an engine that runs ahead there is none.
            run.engine.record_timeline = first and update + 1 == config.updates and not c.staleness
            visits = range(position.visits, position.visits + c.groups)
            batch = batches.take(state.params, update, visits, lambda: journal.stop.requested)
            if journal.stop.requested_anywhere() or batch is None:
                journal.save(state, [*(t for part in batch or () for t in part), *batches.unused()])
                raise Stopped
            trajectories, dull = batch
            refilled = max(processes.all_gather_json(refills_used(trajectories + dull, c.groups)))
            position.visits = visits.stop + refilled
            closing.draw_timeline(run)
            rollout = circle.rollout_metrics(run)
            if learner.greedy:
                trajectories = circle.with_greedy_rewards(run, state.params, trajectories, visits, version=update)
            rates, since = build.rates(config, update, state.params), time.perf_counter()
            kl_coef = config.kl.coef if position.kl_coef is None else position.kl_coef
            moments = RunningMeanStd(*position.returns)
            state, pending, trajectories = learning.learn(run, learner, state, trajectories, rates, kl_coef, moments)
            position.update, position.returns = update + 1, pending.moments
            batches.learnt(state.params, update + 1)
            trajectories += dull
            RunFolder(config.run_dir).write_trajectories(batch_name(update), trajectories)  # While the device learns.
            sampled = circle.means(trajectories)
            record = pending.result() | {"time/learn": time.perf_counter() - since}
            if config.kl.target is not None:
                record["learner/kl_coef"] = kl_coef
                position.kl_coef = next_kl_coef(
                    kl_coef,
                    record.get("learner/ref_kl", math.nan),
                    c.groups * c.samples,
                    target=config.kl.target,
                    horizon=config.kl.horizon,
                )
            record["batch/dynamic_sampling_groups"] = float(refilled)
            record |= rollout | {f"rollout/{key}": value for key, value in sampled.items()}
            record |= ages(trajectories, update, c.staleness)
            record["learner/lr"] = rates["decoder"]
            journal.metrics.write({"phase": "rl", "update": position.update, **record})
            add_totals(position, record)
            quality = f"reward {sampled.get('reward', math.nan):.3f} em {sampled.get('em', 0):.3f}"
            show(position.update, f"{quality}, {tokens_per_second(record)}")
            if record.get("learner/skipped_in_a_row", 0) >= SKIPPED_IN_A_ROW:
                raise UserError(
                    f"{SKIPPED_IN_A_ROW} updates in a row were not finite; the last good checkpoint is kept. "
                    "Lower optimizer.lr or look at learner/* in metrics.jsonl"
                )
            if warmed_up:
                count_recompiles(position, journal.compiles.count - compiled)
            warmed_up = warmed_up or bool(pending.updates)  # A batch without signal compiles no update.
            journal.save_if_due(state, config.checkpoint_every, unused=batches.unused)
    journal.save(state)
    return state


def evaluate_if_due(run: Run, journal: Journal, state: LearnerState, batches: Batches) -> None:
    """Evaluates on the way, after every `eval.every` updates. Raises Stopped where that is broken off; all is saved.

    It comes after the checkpoint that is due with it and belongs to the next one: who goes on from the one before makes
    it again.
    """
    c, position = run.config.eval, journal.position
    if not c.every or position.update % c.every or position.evaluated == position.update:
        return
    name = f"eval_{position.update:06d}"
    try:
        evaluate(run, journal, state, name, 0.0, c.quick_questions, batches.background)
    except Stopped:
        journal.save(state, batches.unused())
        raise
    position.evaluated = position.update


def refills_used(trajectories: Sequence[Trajectory], groups: int) -> int:
    """How far this process went into the refills of a batch of so many groups."""
    return max(0, *(t.group - groups + 1 for t in trajectories), 0)


def tokens_per_second(record: dict[str, float]) -> str:
    """Rates of the last update, for the progress line."""
    rates = []
    for what, tokens, seconds in (("learned", "learner_tokens", "learn"), ("decoded", "decode_tokens", "rollout")):
        if record.get(f"time/{seconds}") and f"time/{tokens}" in record:
            rates.append(f"{record[f'time/{tokens}'] / record[f'time/{seconds}']:,.0f} {what}")
    return f"tokens/s: {', '.join(rates)}"


def evaluate(
    run: Run,
    journal: Journal,
    state: LearnerState,
    name: str,
    temperature: float,
    questions: int | None = None,
    within: BackgroundEngine | None = None,
) -> dict[str, float]:
    """Evaluates on unseen rows (`eval.questions` of them unless told); writes metrics and trajectories.

    Raises:
      Stopped: the run is to stop, and the evaluation is broken off. Nothing is saved.
    """
    count, update = questions or run.config.eval.questions, journal.position.update
    done = circle.roll_out(
        run,
        state.params,
        name,
        run.config.eval.split,
        range(count),
        samples=1,
        sampling=SamplingConfig(temperature),
        version=update,
        stop=lambda: journal.stop.requested,
        within=within,
    )
    stopped = journal.stop.requested_anywhere()  # Of all processes: also those that were not told to stop ask.
    if stopped or done is None:
        raise Stopped
    shown, _ = done
    measured = circle.means(shown)
    kind = "eval_sampled" if temperature else "eval"
    journal.metrics.write({"phase": kind, "update": update, **{f"eval/{key}": x for key, x in measured.items()}})
    RunFolder(run.config.run_dir).write_trajectories(name, shown)
    logging.info("%s: em %.3f over %d questions", name, measured.get("em", math.nan), count)
    return measured


if __name__ == "__main__":
    use_huge_pages()
    configs.run_main(main)
