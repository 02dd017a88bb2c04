"""Configs: Agent-R1's protocol and its hardware, presets of published algorithms, the reference, flags of programs."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import shlex
import types
from collections.abc import Iterator

import jax
import pytest
from changes import changed

from agentr1_jax.errors import UserError
from agentr1_jax.policy import weights
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.runtime.config import flatten, load_config
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from configs import agentr1, base, presets
from experiments import config_reference, topology
from experiments.checks import check_placement
from experiments.plan import device_bytes, make_plan, preset_of_weights, programs, total_bytes
from experiments.setup import complete, make_task, read_settings

FOLDER = pathlib.Path(agentr1.__file__).parent
NAMES = ("ppo_token", "ppo_step", "grpo", "reinforce_pp", "rloo")
SLICES = {"v5e-16": (16, 4, "v5e:4x4", 16), "v5p-8": (4, 1, "v5p:2x2x1", 95), "h100x8": (8, 1, "", 80)}
"""Devices, processes, topology and GiB of each device."""
PROTOCOL = {
    "task.multihop.datasets": ("hotpotqa", "2wikimultihopqa"),
    "task.multihop.eval_datasets": ("hotpotqa", "2wikimultihopqa", "musique"),
    "task.multihop.top_k": 5,
    "task.multihop.reward": "weighted",
    "task.multihop.rewards.answer": 1.0,
    "task.multihop.rewards.f1": 0.0,
    "task.multihop.rewards.gold_passage": 0.0,
    "task.multihop.rewards.repeated_query": 0.0,
    "policy.weights": "Qwen/Qwen2.5-3B-Instruct",
    "budget.max_steps": 5,
    "budget.response_tokens": 1024,
    "budget.observation_tokens": 512,
    "budget.context_tokens": 8192,
    "rollout.groups": 128,
    "rollout.samples": 5,
    "rollout.temperature": 1.0,
    "rollout.top_k": 0,
    "rollout.top_p": 1.0,
    "learner.minibatches": 2,
    "learner.epochs": 1,
    "optimizer.lr": 1e-6,
    "optimizer.value_lr": 1e-5,
}
CLIPPED = {"loss.entropy_coef": 0.001}
CRITIC = {"critic": "separate", "loss.value_coef": 1.0}
KL_LOSS = {"kl.kind": "k3", "kl.coef": 0.001, "kl.where": "loss"}
KL_REWARD = {"kl.kind": "k1", "kl.coef": 0.001, "kl.where": "reward"}
NARROW = {"loss.ratio": "step", "loss.clip": "dual", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4, "loss.dual_c": 10.0}
DISCOUNT = {"credit.args.gamma": 1.0}
ALGORITHMS = {
    "ppo_token": {"credit.name": "token_gae", "credit.args.lam": 1.0, "optimizer.critic_warmup": 5}
    | {**CRITIC, **KL_REWARD, **CLIPPED, **DISCOUNT},
    "ppo_step": {"credit.name": "step_gae", "credit.args.gamma": 0.99, "credit.args.lam": 1.0}
    | {**CRITIC, **NARROW, "loss.aggregate": "step"},
    "grpo": {"credit.name": "grpo", **KL_LOSS, **CLIPPED},
    "reinforce_pp": {"credit.name": "reinforce_pp", **KL_REWARD, **CLIPPED, **DISCOUNT},
    "rloo": {"credit.name": "rloo", **KL_LOSS, **CLIPPED},
}


def load(name, hardware="v5e-16"):
    return load_config(f"{FOLDER / f'agentr1_{name}'}.py:{hardware}")


def flat(config):
    return dict(flatten(config.to_dict()))


def devices(hardware):
    count, processes, _, _ = SLICES[hardware]
    return [types.SimpleNamespace(process_index=i * processes // count, platform="tpu") for i in range(count)]


@pytest.mark.parametrize("hardware", SLICES)
@pytest.mark.parametrize("name", NAMES)
def test_every_config_can_start_on_all_hardware_and_has_the_protocols_numbers(name, hardware):
    c = complete(load(name, hardware))
    settings = read_settings(c)
    check_placement(settings, devices(hardware))
    values = flat(c)
    assert {key: values[key] for key in PROTOCOL} == PROTOCOL
    assert c.run_dir == f"runs/agentr1_{name}"
    trajectories = c.rollout.groups * c.rollout.samples // c.learner.minibatches
    assert trajectories == 64 * 5
    # Every trajectory fits a row: as many rows as trajectories at most.
    assert settings.microbatches(trajectories) * c.learner.rows == trajectories
    assert c.learner.row_loss_tokens > c.budget.max_steps * c.budget.response_tokens + c.budget.max_steps
    assert c.learner.row_tokens == c.rollout.slot_tokens == c.budget.context_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_config_changes_the_algorithm_alone(name):
    own = flat(load(name))
    shared = flat(presets.on("agentr1", f"{name}"))
    assert {key: x for key, x in own.items() if x != shared[key]}.keys() <= ALGORITHMS[name].keys()
    assert {key: own[key] for key in ALGORITHMS[name]} == ALGORITHMS[name]
    if not {"critic"} & ALGORITHMS[name].keys():
        assert own["critic"] == "none" and own["optimizer.critic_warmup"] == 0


def test_hardware_changes_nothing_of_the_algorithm():
    for name in NAMES:
        first, *others = (flat(complete(load(name, hardware))) for hardware in SLICES)
        for other in others:
            differing = {key for key in first if first[key] != other[key]}
            assert {key.split(".")[0] for key in differing} <= {"hardware", "mesh", "rollout", "learner", "policy"}
            assert not differing & PROTOCOL.keys()


def test_unknown_hardware_is_refused_with_what_there_is():
    with pytest.raises(UserError, match=r"hardware is 'v9z'; choose one of cpu, v5e-8, v5e-16, .*, auto"):
        read_settings(load("grpo", "v9z"))
    with pytest.raises(UserError, match=r"hardware is v5e-16, which has 16 chips, and there are 8 devices \(cpu\)"):
        check_placement(read_settings(load("grpo")), jax.devices())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_opens_with_its_own_commands(name):
    said = ast.get_docstring(ast.parse((FOLDER / f"agentr1_{name}.py").read_text(encoding="utf-8")))
    command = f"--config=configs/agentr1_{name}.py"
    assert f"python -m experiments.train {command}\n" in said
    for hardware in ("v5e-16", "v5p-8"):
        assert f"{command}:{hardware} --dry_run --topology={SLICES[hardware][2]}" in said
    assert said.count("configs/") == said.count(command)
    assert "To expect" in said and "Fits" in said


@pytest.mark.parametrize(("name", "trained"), [("grpo", 1), ("ppo_token", 2)])
def test_a_dry_run_asks_neither_the_hub_nor_the_data(name, trained, monkeypatch, tmp_path):
    def unreachable(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(weights, "read_config", unreachable)
    config = changed(load(name, "h100x8"), policy__attention="xla", tokenizer__path=str(tmp_path / "none"))
    plan = make_plan(read_settings(changed(config, task__data_dir=str(tmp_path / "none"))))
    parameters = 3_085_938_688  # As published.
    assert total_bytes(plan.state.params["decoder"]) == 4 * parameters
    # Parameters and two moments, float32, over 8 devices; a critic has as many again.
    assert device_bytes(plan.state) == pytest.approx(trained * 12 * parameters / 8, rel=1e-3)
    # 2 devices share the heads of a quarter of the KV slots: 64 decode, 16 swap and 1 spare of one key head each.
    assert device_bytes(plan.cache) == 36 * 2 * 128 * 2 * 8192 * (64 + 16 + 1)


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-3b"),
        ("Qwen/Qwen2.5-3B", "qwen2.5-3b"),
        ("Qwen/Qwen2.5-32B", ""),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("someone/else", ""),
        ("", ""),
    ],
)
def test_weights_of_the_hub_have_a_shape_by_their_name(path, preset):
    assert preset_of_weights(path) == preset


def test_a_folder_of_weights_is_read_whatever_its_name(tmp_path):
    (tmp_path / "qwen2.5-3b").mkdir()
    assert preset_of_weights(str(tmp_path / "qwen2.5-3b")) == ""


def commands(text):
    """(config, its argument, overrides) of every command of a document that names one of these configs."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True) if "--config=configs/agentr1_" in line else []
        values = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        if values:
            path, _, hardware = values["config"].partition(":")
            yield path, hardware or "v5e-16", {k[7:]: x for k, x in values.items() if k.startswith("config.")}


def test_every_command_of_the_page_can_start():
    page = (FOLDER.parent / "docs" / "agentr1.md").read_text(encoding="utf-8")
    seen = set()
    for path, hardware, overrides in commands(page):
        config = load_config(f"{FOLDER.parent / path}:{hardware}")
        was = flat(config)
        values = {key: x if isinstance(was[key], str) else ast.literal_eval(x) for key, x in overrides.items()}
        check_placement(read_settings(changed(config, **values)), devices(hardware))
        seen |= overrides.keys()
    asked = {"learner.loss_mask", "learner.advantage_mask", "credit.name", "context.rule", "task.multihop.reward"}
    assert asked <= seen


@pytest.mark.parametrize("reward", ["weighted", "agentr1_v1"])
def test_the_task_is_asked_as_the_protocol_says(reward, data_dir):
    config = changed(
        load("grpo"), task__data_dir=str(data_dir), task__multihop__corpus="mini", task__multihop__reward=reward
    )
    task = make_task(read_settings(config), ToolMetrics())
    trained_on = {task.row("train", i)["dataset"] for i in range(40)}
    assert trained_on == {"hotpotqa", "2wikimultihopqa"} and task.search.top_k == 5
    assert all(task.row(f"eval/{name}", 0)["dataset"] == name for name in load("grpo").task.multihop.eval_datasets)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
def test_the_tightest_update_fits_its_chips():
    count, _, name, memory = SLICES["v5e-16"]
    plan = make_plan(read_settings(load("ppo_token")), name)
    assert plan.setup.learner_mesh.size == count
    update = next(p for p in programs(plan) if p.name == "update (RL)")
    with topology.no_compile_cache():
        m = update.lower().compile().memory_analysis()
    assert m.alias_size_in_bytes >= device_bytes(plan.state)
    total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    reference = 2 * 3_085_938_688 / count
    assert total + reference < 0.97 * memory * 2**30


PRESET_FOLDER = FOLDER / "presets"
PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.py") if path.stem != "__init__")
TASKS = ("quickstart", "multihop_tiny", "multihop_small", "multihop_medium", "keydoor", "frozenlake")
TASKS += ("countdown", "gsm8k_tiny", "bfcl_tiny", "whereabouts")
SHARED = {"run_dir", "rollout.dynamic_sampling_groups", "learner.minibatches"}


def differing(name, task):
    """Dotted keys in which a preset differs from what all share, with their values."""
    shared = dict(flatten(presets.on(task, "").to_dict()))
    own = dict(flatten(load_config(f"{PRESET_FOLDER / name}.py:{task}").to_dict()))
    assert own.keys() == shared.keys()
    return {key: x for key, x in own.items() if x != shared[key]}


def test_every_preset_that_the_house_names_is_there():
    assert PRESETS == sorted(
        "ppo_token ppo_step grpo dr_grpo dapo gspo rloo reinforce reinforce_pp reinforce_pp_baseline remax gigpo "
        "capo turn_ppo st_ppo".split()
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_works_on_a_task_and_changes_the_algorithm_alone(name, task):
    check_placement(read_settings(load_config(f"{PRESET_FOLDER / name}.py:{task}")), jax.devices()[:1])
    assert all(key in SHARED or key.split(".")[0] in presets.ALGORITHM for key in differing(name, task))


@pytest.mark.parametrize(("task", "least", "most"), [("multihop_small", 1e6, 3e6), ("multihop_medium", 20e6, 60e6)])
def test_the_policies_of_real_questions_have_the_size_that_they_are_said_to_have(task, least, most):
    config = load_config(f"{PRESET_FOLDER / 'grpo'}.py:{task}")
    assert config.tokenizer.path.endswith("minimind-6400")
    policy = build.make_policy(read_settings(config), types.SimpleNamespace(vocab_size=6400, name="minimind-6400"))
    shapes = jax.eval_shape(lambda key: init_decoder(policy, key), jax.random.key(0))
    assert least < sum(x.size for x in jax.tree.leaves(shapes)) < most


def test_presets_differ_from_each_other():
    lines = {name: {k: v for k, v in differing(name, "quickstart").items() if k != "run_dir"} for name in PRESETS}
    assert len({repr(sorted(x.items())) for x in lines.values()}) == len(PRESETS)
    assert lines["ppo_step"] == {
        "critic": "shared_trunk",
        "credit.name": "step_gae",
        "loss.ratio": "step",
        "loss.clip": "dual",
        "loss.clip_low": 3e-4,
        "loss.clip_high": 4e-4,
        "loss.dual_c": 10.0,
        "loss.aggregate": "step",
    }
    assert lines["capo"] == {
        "critic": "shared_trunk",
        "credit.name": "step_gae",
        "shaping.truncation_is_terminal": True,
        "loss.ratio": "centred_step",
        "loss.aggregate": "step",
    }


@pytest.mark.parametrize("name", ["rloo", "remax"])
def test_a_sum_over_tokens_is_divided_by_the_trajectories_of_the_run_s_own_batch(name):
    config = load_config(f"{PRESET_FOLDER / name}.py:quickstart")
    for groups, samples, minibatches in ((32, 8, 1), (12, 4, 2)):
        size = {"rollout__groups": groups, "rollout__samples": samples, "learner__minibatches": minibatches}
        loss = read_settings(changed(config, **size)).loss
        assert (loss.aggregate, loss.fixed_denominator) == ("fixed", groups * samples / minibatches)
    own = changed(config, loss__fixed_denominator=7.0)
    assert read_settings(own).loss.fixed_denominator == 7.0


def test_nothing_of_the_task_s_own_algorithm_is_left():
    c = presets.on("quickstart", "x")
    assert c.critic == "none" and c.credit.args.lam is None and c.run_dir == "runs/quickstart_x"


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"no config 'chess' to apply a preset to; choose one of .*quickstart"):
        load_config(f"{PRESET_FOLDER / 'grpo'}.py:chess")


def test_page_is_current() -> None:
    page = config_reference.PAGE.read_text(encoding="utf-8")
    assert page == config_reference.render_page(), "run python -m experiments.config_reference"
    page = config_reference.METRICS_PAGE.read_text(encoding="utf-8")
    assert page == config_reference.render_metrics(), "run python -m experiments.config_reference"


def test_every_key_has_type_and_meaning() -> None:
    page = config_reference.render_page()
    assert "|  |" not in page and "<class" not in page and "typing." not in page
    keys = base.get_config().to_dict()
    for section, values in keys.items():
        for name in values if isinstance(values, dict) else ():
            assert f"| `{section}.{name}" in page, f"{section}.{name}"


def imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def test_a_test_takes_a_program_through_program_since_flags_have_equal_names():
    files = (FOLDER.parent / "experiments").glob("*.py")
    programs = {f"experiments.{file.stem}" for file in files if "flags.DEFINE" in file.read_text()}
    assert {"experiments.train", "experiments.ask", "experiments.kill_test"} <= programs
    for test in (FOLDER.parent / "tests").rglob("*.py"):
        direct = programs & set(imports_of(test.read_text()))
        assert not direct, f"{test.name}: use programs.program for {', '.join(sorted(direct))}"
