"""Train an agent: warm start on demonstrations, reinforcement learning, evaluation, report.

    python -m experiments.train --config=configs/quickstart.py [--config.key=value ...]

A run owns its folder (`config.run_dir`); the same command again resumes it. SIGTERM and Ctrl-C save and leave.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging

from agentr1_jax.errors import UserError
from agentr1_jax.learner.losses import next_kl_coef
from agentr1_jax.learner.optimizer import rate_by_progress
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import BackgroundEngine
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.lock import lock_folder
from agentr1_jax.runtime.metrics import MetricsWriter, Sink
from agentr1_jax.runtime.monitoring import parse_profile_updates, progress_bar, trace_updates
from agentr1_jax.runtime.run_folder import RunFolder, batch_name, check_common_folder
from agentr1_jax.train import build, phases, train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.collect import Request, open_rollouts, roll_out
from agentr1_jax.train.phases import Batches, Examples, Phase, make_demonstrations, make_documents
from agentr1_jax.train.progress import Progress, RunLogger, Stopped, read_progress
from agentr1_jax.train.restore import make_reference
from agentr1_jax.train.settings import Settings
from agentr1_jax.train.summary import trajectory_means, write_report, write_summary
from experiments.checks import first_prompt
from experiments.setup import check_init_from, complete, make_setup, read_settings, run_main, use_compile_cache

CONFIG = configs.define_config_flag()
DRY_RUN = flags.DEFINE_bool("dry_run", False, "print sizes and programs of the run, and leave")
CHECK = flags.DEFINE_string("check", "", "check the run for PROCESSESxDEVICES elsewhere, e.g. v5e:4x4, and leave")
SPEEDS = flags.DEFINE_list("tokens_per_second", [], "DECODED,LEARNED: with --dry_run or --check, estimates the hours")
TOPOLOGY = flags.DEFINE_string("topology", "", "with --dry_run: compile for devices that are not here: v5e:4x4, h200:8")
MOST_SKIPPED = 3
"""Updates in a row that are skipped because they are not finite, and end a run."""
MOST_EMPTY = 10
"""Batches in a row without an update that end a run: more than skipped updates, since a server may be away a while."""
IMITATION_LOG_EVERY = 10
"""Updates between two records of metrics in pretraining and warm start."""
IMITATION_CHECKPOINTS = 100
"""Checkpoints are this many times rarer in pretraining and warm start, whose updates are shorter."""
SHOWN_DEMONSTRATIONS = 24


def main(argv: Sequence[str]) -> None:
    """Check the config, join the processes of the run, and hold its folder for as long as it lasts."""
    del argv
    started, config = time.perf_counter(), CONFIG.value
    settings = read_settings(config)
    if DRY_RUN.value or TOPOLOGY.value:
        from experiments import dry_run, topology

        devices = topology.devices(TOPOLOGY.value) if TOPOLOGY.value else jax.devices()
        return dry_run.show(read_settings(complete(config, devices)), TOPOLOGY.value, SPEEDS.value)
    if CHECK.value:
        from experiments import preflight

        return preflight.show([config], CHECK.value, SPEEDS.value)
    run_dir = settings.run.run_dir
    processes.initialize(settings.processes.start_seconds, settings.processes.heartbeat_seconds)
    config = complete(config, jax.devices())
    if settings.run.hardware == "cpu" and jax.default_backend() != "cpu":
        kind = jax.devices()[0].device_kind
        logging.warning("hardware is cpu on %s: --config.hardware=auto sets dtype, attention and sizes for it", kind)
    settings = read_settings(config)
    use_compile_cache(settings)
    first = processes.process_index() == 0
    with lock_folder(run_dir) if first else contextlib.nullcontext():
        check_common_folder(run_dir)
        folder, resolved = RunFolder(run_dir), configs.resolve(config)
        resumes = folder.check_same_config(resolved)
        if not resumes:
            check_init_from(config)
        setup, builder = make_setup(settings, resumes=resumes)
        if first and not resumes:
            folder.write_config(resolved)
        if first:
            logging.info("%s", build.describe_policy(settings, setup.policy, setup.agent))
            prompt = first_prompt(settings, setup.task, setup.agent)
            logging.info("%s", build.describe_prompt(*prompt, setup.tokenizer))
        with open_run(settings, builder, resolved, started) as (logger, state, progress):
            progress = train(setup, builder, state, progress, logger)
        if first and progress.phase == "done":
            write_summary(setup, progress)


@contextlib.contextmanager
def open_run(
    settings: Settings, builder: build.StateBuilder, resolved: Mapping[str, Any], started: float
) -> Iterator[tuple[RunLogger, LearnerState, Progress]]:
    """Open the writers of a run; yield them with the state and progress of its newest checkpoint, or fresh ones.

    `resolved` is the config as plain JSON, `started` the `time.perf_counter()` at the start of the program.
    """
    run_dir, compiles = settings.run.run_dir, CompileCounter()
    with contextlib.closing(Checkpoints(run_dir, settings.checkpoint.keep)) as checkpoints:
        restored = checkpoints.restore(builder.shapes)
        if restored is None:
            state, progress = builder.init(), Progress()
        else:
            state, progress = restored[0], read_progress(restored[1], run_dir)
        sinks: Sequence[Sink] = ()
        if settings.sinks.active:
            from agentr1_jax.runtime.sinks import make_sinks  # Its libraries are extras.

            sinks = make_sinks(settings.sinks, run_dir, resolved)
        first = processes.process_index() == 0
        with MetricsWriter(run_dir, progress.metrics_index, first, sinks) as metrics, processes.StopRequest() as stop:
            started -= progress.seconds
            yield RunLogger(RunFolder(run_dir), metrics, checkpoints, stop, compiles, started), state, progress
    logging.info("programs of this start: %s", compiles)


def train(
    setup: Setup, builder: build.StateBuilder, state: LearnerState, progress: Progress, logger: RunLogger
) -> Progress:
    """Take a run through its phases, from where it stands; its progress is `done` unless it was stopped."""
    settings = setup.settings
    try:
        setup.engine.compile(setup.rollout_params(state.params, setup.frozen))
        if logger.stop.requested_anywhere():
            raise Stopped
        if progress.phase == "pretraining":
            state, progress = pretrain(setup, builder, state, progress, logger)
        if progress.phase == "warm_start":
            state, progress = warm_start(setup, builder, state, progress, logger)
        if progress.phase == "rl" and settings.run.updates and not settings.warm_start.control_seconds:
            state, progress = reinforce(setup, builder, state, progress, logger)
        if progress.phase != "done":
            progress = progress.enter("done").replace(seconds=logger.seconds)
            logger.save(state, progress)
    except Stopped:
        write_report(setup)
        logging.info("stopped and saved; the same command resumes the run in %s", settings.run.run_dir)
    return progress


def pretrain(
    setup: Setup, builder: build.StateBuilder, state: LearnerState, progress: Progress, logger: RunLogger
) -> tuple[LearnerState, Progress]:
    """Model the language of the task's texts."""
    c = setup.settings.pretrain
    if c.updates and not setup.settings.warm_start.init_from:
        phase = phases.pretraining(setup, builder.optimizer, builder.layout)
        examples = Examples(make_documents(setup), c.batch // processes.process_count(), setup.settings.run.seed)
        state, progress = run_phase(setup, phase, examples, state, progress, logger)
    state, progress = builder.restart(state.params), progress.enter("warm_start")
    if c.updates:
        logger.save(state, progress)
    return state, progress


def warm_start(
    setup: Setup, builder: build.StateBuilder, state: LearnerState, progress: Progress, logger: RunLogger
) -> tuple[LearnerState, Progress]:
    """Imitate expert trajectories, then evaluate the policy that RL starts from."""
    c = setup.settings.warm_start
    if setup.settings.imitates:
        demonstrations = make_demonstrations(setup, logger.stop)
        if demonstrations is None:
            raise Stopped
        if progress.update == 0:
            logger.folder.write_trajectories("demonstrations", demonstrations[:SHOWN_DEMONSTRATIONS])
            em = trajectory_means(demonstrations).get("em", math.nan)
            logging.info("%d demonstrations, em %.3f", len(demonstrations), em)
        phase = phases.warm_start(setup, builder.optimizer, builder.layout)
        examples = Examples(demonstrations, c.batch // processes.process_count(), setup.settings.run.seed)
        state, progress = run_phase(setup, phase, examples, state, progress, logger)
        if not progress.update:
            raise UserError(f"warm_start.control_seconds ({c.control_seconds:g}) were over before an update; raise it")
        logger.save(state, progress)
        progress = progress.replace(warm_start_seconds=logger.seconds)
    state, progress = builder.restart(state.params), progress.enter("rl")
    label = "control" if c.control_seconds else "before"
    for name, temperature in ((f"{label}_sampled", 1.0), (f"{label}_greedy", 0.0)):
        means = evaluate(setup, state, progress, logger, f"eval_{name}", temperature)
        if "em" in means:  # Absent where no trajectory could be sampled.
            progress = progress.add_results(**{f"em_{name}": means["em"]})
    logger.save(state, progress)
    write_report(setup)
    return state, progress


def reinforce(
    setup: Setup, builder: build.StateBuilder, state: LearnerState, progress: Progress, logger: RunLogger
) -> tuple[LearnerState, Progress]:
    """Learn from rollouts, then evaluate the policy."""
    settings, starts = setup.settings, progress.update == 0
    reference = make_reference(settings, setup.policy, setup.learner_mesh, state.params, first=starts)
    phase = phases.reinforcement(setup, builder.optimizer, builder.layout, reference)
    with open_rollouts(setup, state.params, progress, logger.folder) as rollouts:
        state, progress = run_phase(setup, phase, rollouts, state, progress, logger)
    logger.save(state, progress)
    for label, temperature in (("after_greedy", 0.0), ("after_sampled", 1.0)):
        means = evaluate(setup, state, progress, logger, f"eval_{label}", temperature)
        progress = progress.add_results(**{f"{k}_{label}": x for k, x in means.items() if k[:2] in ("em", "f1")})
    return state, progress


def run_phase(
    setup: Setup, phase: Phase, batches: Batches, state: LearnerState, progress: Progress, logger: RunLogger
) -> tuple[LearnerState, Progress]:
    """Collect a batch, take a train step, and again, until the phase is done: the training loop.

    Raises:
      Stopped: the run was asked to stop; everything is saved.
    """
    settings, rl, first = setup.settings, phase.name == "rl", processes.process_index() == 0
    traced = parse_profile_updates(settings.run.profile_updates if rl else "")
    bar = progress_bar(phase_title(phase, batches), progress.update, phase.updates, first)
    warm, since, timed_from, empty = False, progress.update, time.perf_counter(), 0
    done = elapsed_share(settings, phase, progress, logger.seconds)
    with bar as show, trace_updates(settings.run.run_dir, traced, first) as trace:
        while done < 1:
            if rl:
                progress = evaluate_if_due(setup, state, progress, logger, batches)
            trace(progress.update)
            programs = logger.compiles.count
            rollouts = batches.next(state.params, progress, logger.stop)
            if rollouts is None:
                logger.save(state, progress, batches.pending())
                raise Stopped

            if rl:  # Sampling does not count as learning.
                since, timed_from = progress.update, time.perf_counter()
            rates = learning_rates(settings, phase, progress, done, state.params)
            batch = train_step.pack(setup, phase, rollouts.trajectories)
            outputs = train_step.token_outputs(setup, phase, state.params, batch)
            credit = train_step.assign_credit(setup, phase, batch, outputs, progress)
            state, metrics = train_step.update(setup, phase, state, batch, outputs, credit, rates)
            empty = 0 if metrics.updates else empty + 1
            progress = progress.after(rollouts.prompts_used, credit.return_statistics)
            batches.publish(state.params, progress.update)
            done = elapsed_share(settings, phase, progress, logger.seconds)

            if rl:
                trajectories = [*train_step.with_credit(batch, outputs, credit), *rollouts.zero_variance]
                logger.folder.write_trajectories(batch_name(progress.update - 1), trajectories)  # The device learns.
                means = {f"rollout/{key}": x for key, x in trajectory_means(trajectories).items()}
                record = {"learner/lr": rates["decoder"], **rollouts.metrics, **means}
            else:
                record = {"learner/lr": rates["decoder"]}
            if rl or progress.update % IMITATION_LOG_EVERY == 0 or done >= 1:
                record |= metrics.fetch()
                record["time/learn"] = (time.perf_counter() - timed_from) / (progress.update - since)
                since, timed_from = progress.update, time.perf_counter()
                progress = adapt_kl(settings, progress, record) if rl else progress
                logger.log(progress, record)
                show(progress.update, progress_text(record, progress.results))
                check_updates(record, empty)
            recompiles = logger.count_recompiles(programs) if warm else 0
            progress = progress.add_totals(record if rl else {}, recompiles)
            warm = warm or bool(metrics.updates)  # A batch without signal compiles no update.
            save_if_due(settings, phase, state, progress, logger, batches)
    check_phase(phase, progress, state)
    return state, progress


def elapsed_share(settings: Settings, phase: Phase, progress: Progress, seconds: float) -> float:
    """Return the share of a phase that is done: of its updates, or of the time of a control run."""
    limit = settings.warm_start.control_seconds
    return seconds / limit if phase.name == "warm_start" and limit else progress.update / max(phase.updates, 1)


def learning_rates(
    settings: Settings, phase: Phase, progress: Progress, done: float, params: Params
) -> dict[str, float]:
    """Return the learning rate of each part of the parameters in the next update."""
    if phase.name == "rl":
        return settings.learning_rates(progress.update, list(params))
    c = settings.pretrain if phase.name == "pretraining" else settings.warm_start
    return dict.fromkeys(params, c.lr * rate_by_progress(done))


def adapt_kl(settings: Settings, progress: Progress, record: dict[str, float]) -> Progress:
    """Record the coefficient of an adaptive KL, and return the progress with that of the next update."""
    c = settings.kl
    if c.target is None:
        return progress
    coef = progress.kl_coef_or(c.coef)
    record["learner/kl_coef"] = coef
    kl = record.get("learner/ref_kl", math.nan)
    return progress.replace(
        kl_coef=next_kl_coef(coef, kl, settings.batch_trajectories, target=c.target, horizon=c.horizon)
    )


def phase_title(phase: Phase, batches: Batches) -> str:
    """Return what a phase learns from, as the title of its progress bar."""
    if not isinstance(batches, Examples):
        return "RL: own trajectories"
    if phase.name == "pretraining":
        return f"pretraining: {batches.count:,} pieces of text"
    return f"warm start: imitating {batches.count:,} demonstrations"


def progress_text(record: Mapping[str, float], results: Mapping[str, Any]) -> str:
    """Return what the progress bar says of an update: how well the policy does, and tokens per second.

    `results` are the figures of the summary so far.
    """
    if "rollout/reward" in record:
        quality = f"reward {record['rollout/reward']:.2f}"
        if "rollout/em" in record:
            before = f" ({results['em_before_sampled']:.2f} before)" if "em_before_sampled" in results else ""
            quality += f", right answers {record['rollout/em']:.2f}{before}"
            kinds = {key[11:]: em for key, em in record.items() if key.startswith("rollout/em_")}
            if len(kinds) > 1:
                weakest = min(kinds, key=kinds.__getitem__)
                quality += f", of {weakest} {kinds[weakest]:.2f}"
    elif "learner/logprob" in record:
        foreseen = math.exp(record["learner/logprob"])
        quality = f"loss {-record['learner/logprob']:.2f}: each token is foreseen with probability {foreseen:.2f}"
    else:
        quality = "nothing to learn in this batch"
    rates = []
    for what, tokens, seconds in (("learned", "learner_tokens", "learn"), ("decoded", "decode_tokens", "rollout")):
        if record.get(f"time/{seconds}") and f"time/{tokens}" in record:
            rates.append(f"{record[f'time/{tokens}'] / record[f'time/{seconds}']:,.0f} {what}")
    return "; ".join([quality, *([f"tokens/s: {', '.join(rates)}"] if rates else [])])


def check_updates(record: Mapping[str, float], empty: int) -> None:
    """End a run whose updates are not finite any more, or that makes none; `empty` batches in a row had no update."""
    if record.get("learner/skipped_in_a_row", 0) >= MOST_SKIPPED:
        raise UserError(
            f"{MOST_SKIPPED} updates in a row were not finite: loss, gradient or new parameters; the last good "
            "checkpoint is kept. Lower the learning rate (optimizer.lr, warm_start.lr, pretrain.lr), or look at "
            "learner/* in metrics.jsonl"
        )
    if empty >= MOST_EMPTY:
        raise UserError(
            f"{empty} batches in a row had no usable trajectory: nothing was learned. The warnings say why each was "
            "dropped: tools or environments fail (rollout/outcome/* in metrics.jsonl), or log-probs of the policy are "
            "not finite. With rollout.dynamic_sampling_groups all samples of each prompt may have had equal returns. "
            "The last checkpoint is kept; the same command goes on from there"
        )


def check_phase(phase: Phase, progress: Progress, state: LearnerState) -> None:
    """End a run of which a phase has come to its end without a single update."""
    if progress.update and not jax.device_get(state.updates):
        raise UserError(
            f"{phase.name} came to its end, and the policy is what it was: of {progress.update} batches none had a "
            f"usable trajectory and a finite update ({jax.device_get(state.skipped)} updates were not finite). Look at "
            "the warnings, at the weights that the run starts from, and at the learning rate"
        )


def save_if_due(
    settings: Settings, phase: Phase, state: LearnerState, progress: Progress, logger: RunLogger, batches: Batches
) -> None:
    """Write a checkpoint where one is due, or the run is to stop. Raises Stopped then."""
    every = settings.checkpoint.every * (1 if phase.name == "rl" else IMITATION_CHECKPOINTS)
    stops = logger.stop.requested_anywhere()
    if stops or progress.update % every == 0:
        logger.save(state, progress, batches.pending())
    if stops:
        raise Stopped


def evaluate_if_due(
    setup: Setup, state: LearnerState, progress: Progress, logger: RunLogger, batches: Batches
) -> Progress:
    """Evaluate during RL, after every `eval.every` updates. Raises Stopped where that is aborted; everything is saved.

    An evaluation follows the checkpoint that is due with it: a run that resumes from that checkpoint makes it again.
    """
    c = setup.settings.eval
    if not c.every or progress.update % c.every or progress.evaluated == progress.update:
        return progress
    name = f"eval_{progress.update:06d}"
    try:
        evaluate(setup, state, progress, logger, name, 0.0, c.quick_questions, batches.background)
    except Stopped:
        logger.save(state, progress, batches.pending())
        raise
    write_report(setup)
    return progress.replace(evaluated=progress.update)


def evaluate(
    setup: Setup,
    state: LearnerState,
    progress: Progress,
    logger: RunLogger,
    name: str,
    temperature: float,
    questions: int | None = None,
    background: BackgroundEngine | None = None,
) -> dict[str, float]:
    """Roll out rows of the evaluation split; write metrics and trajectories, and return the means.

    Args:
      name: of the evaluation; part of the uids and seeds of its trajectories.
      temperature: of sampling; 0 is greedy.
      questions: number of rows; None for `eval.questions`.
      background: the engine's stream, where one is open.

    Raises:
      Stopped: the run was asked to stop, and the evaluation is aborted. Nothing is saved.
    """
    c = setup.settings.eval
    request = Request(name, c.split, range(questions or c.questions), 1, SamplingConfig(temperature), progress.update)
    batch = roll_out(setup, state.params, request, stop=logger.stop, background=background)
    if batch is None:
        raise Stopped
    trajectories, _ = batch.trajectories()
    means = trajectory_means(trajectories)
    phase = "eval_sampled" if temperature else "eval"
    logger.log(progress, {f"eval/{key}": x for key, x in means.items()}, phase)
    logger.folder.write_trajectories(name, trajectories)
    logging.info("%s: em %.3f over %d questions", name, means.get("em", math.nan), len(request.prompts))
    return means


if __name__ == "__main__":
    processes.use_huge_pages()
    run_main(main)
