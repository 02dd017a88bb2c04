"""Presets: every published algorithm that the house names is a config of its own, on any task."""

from __future__ import annotations

import pathlib
import types

import jax
import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.runtime.config import flatten, load_config
from agentr1_jax.train import build
from configs import presets
from experiments.checks import check_placement
from experiments.setup import read_settings

FOLDER = pathlib.Path(presets.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
TASKS = ("quickstart", "multihop_tiny", "multihop_small", "multihop_medium", "keydoor", "frozenlake")
TASKS += ("countdown", "gsm8k_tiny", "bfcl_tiny", "whereabouts")
SHARED = {"run_dir", "rollout.dynamic_sampling_groups", "learner.minibatches"}


def changed(name, task):
    """Dotted keys in which a preset differs from what all share, with their values."""
    shared = dict(flatten(presets.on(task, "").to_dict()))
    own = dict(flatten(load_config(f"{FOLDER / name}.py:{task}").to_dict()))
    assert own.keys() == shared.keys()
    return {key: x for key, x in own.items() if x != shared[key]}


def test_every_preset_that_the_house_names_is_there():
    assert NAMES == sorted(
        "ppo_token ppo_step grpo dr_grpo dapo gspo rloo reinforce reinforce_pp reinforce_pp_baseline remax gigpo "
        "capo".split()
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_works_on_a_task_and_changes_the_algorithm_alone(name, task):
    check_placement(read_settings(load_config(f"{FOLDER / name}.py:{task}")), jax.devices()[:1])
    assert all(key in SHARED or key.split(".")[0] in presets.ALGORITHM for key in changed(name, task))


@pytest.mark.parametrize(("task", "least", "most"), [("multihop_small", 1e6, 3e6), ("multihop_medium", 20e6, 60e6)])
def test_the_policies_of_real_questions_have_the_size_that_they_are_said_to_have(task, least, most):
    config = load_config(f"{FOLDER / 'grpo'}.py:{task}")
    assert config.tokenizer.path.endswith("minimind-6400")
    policy = build.make_policy(read_settings(config), types.SimpleNamespace(vocab_size=6400, name="minimind-6400"))
    shapes = jax.eval_shape(lambda key: init_decoder(policy, key), jax.random.key(0))
    assert least < sum(x.size for x in jax.tree.leaves(shapes)) < most


def test_presets_differ_from_each_other():
    lines = {name: {k: v for k, v in changed(name, "quickstart").items() if k != "run_dir"} for name in NAMES}
    assert len({repr(sorted(x.items())) for x in lines.values()}) == len(NAMES)
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


def test_nothing_of_the_task_s_own_algorithm_is_left():
    c = presets.on("quickstart", "x")
    assert c.critic == "none" and c.credit.args.lam is None and c.run_dir == "runs/quickstart_x"


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"no config 'chess' to apply a preset to; choose one of .*quickstart"):
        load_config(f"{FOLDER / 'grpo'}.py:chess")
