"""The API for notebooks: the README's ten lines, policies as values, refusals; and the quickstart's notebook."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import nbclient
import nbformat
import numpy as np
import pytest
from small_runs import SMALL

import agentr1_jax as ar
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.trajectory import Outcome, Trajectory
from configs import quickstart
from experiments.setup import make_setup, read_settings

ROOT = pathlib.Path(__file__).parents[2]
DECODER = {"width": 32, "layers": 1, "hidden": 64, "head_dim": 8}
TOKENIZER = {"texts": 400, "vocab_size": 512}
BUDGET = {"max_steps": 2, "response_tokens": 8, "context_tokens": 128, "observation_tokens": 32}


def make_run(folder: pathlib.Path) -> None:
    """Write what a run of a small policy leaves: config, tokenizer and a checkpoint of its start."""
    config = quickstart.get_config().copy_and_resolve_references()
    config.run_dir = str(folder)
    config.policy.update(DECODER)
    config.tokenizer.update(TOKENIZER)
    config.budget.max_steps = 2
    config.learner.rows = config.rollout.slots = 8
    setup, builder = make_setup(read_settings(config), resumes=False)
    RunFolder(str(folder)).write_config(configs.resolve(config))
    checkpoints = Checkpoints(str(folder), keep=1)
    checkpoints.save(1, builder.init(), {})
    checkpoints.close()


def test_the_lines_of_the_readme(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = re.search(r"## In a notebook\n.*?```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert found and found[1].count("\n") <= 10
    make_run(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(found[1], names)
    assert [len(group) for group in names["groups"]] == [8] * 4
    printed = capsys.readouterr().out
    assert "--- step 1, reward" in printed
    assert "| group | sample | step | reward | grpo | gigpo |" in printed
    assert names["policy"].version == 1 and np.isfinite(names["metrics"]["learner/loss"])


@pytest.fixture(scope="module")
def task() -> Any:
    return ar.make_task("hopworld", top_k=2)


@pytest.fixture(scope="module")
def policy(task: Any) -> ar.Policy:
    """A policy with random parameters, and a critic."""
    sections = {"policy": DECODER, "tokenizer": TOKENIZER, "budget": BUDGET, "critic": "shared_trunk"}
    return ar.load_policy("tiny", task=task, rollout={"slots": 8}, **sections)


@pytest.fixture(scope="module")
def groups(policy: ar.Policy, task: Any) -> list[list[Trajectory]]:
    """Two groups of two; the first trajectory of each has return 1, the other one 0."""

    def reward(t: Trajectory) -> Trajectory:
        last = len(t.steps) - 1
        steps = [dataclasses.replace(s, reward=float(t.sample == 0 and i == last)) for i, s in enumerate(t.steps)]
        return dataclasses.replace(t, steps=tuple(steps), outcome=Outcome.ENV_DONE)

    return [[reward(t) for t in group] for group in ar.roll_out(policy, task, groups=2, samples=2)]


def test_advantages_by_several_schemes(policy: ar.Policy, groups: list[list[Trajectory]]) -> None:
    rows = ar.compare_credit(policy, groups, "dr_grpo", "step_gae(lam=0.9)")
    assert len(rows) == sum(len(t.steps) for group in groups for t in group)
    assert all(row["dr_grpo"] == (0.5 if row["sample"] == 0 else -0.5) for row in rows)
    assert all(np.isfinite(row["step_gae(lam=0.9)"]) for row in rows)


def test_gold_answers_are_probed_by_the_policy(policy: ar.Policy, groups: list[list[Trajectory]]) -> None:
    """Not by what a trajectory holds: answers fit the few tokens of a response here."""
    short = [[dataclasses.replace(t, row={**t.row, "answers": ["x"]}) for t in group] for group in groups]
    credited = ar.assign_credit(policy, short, "igpo")
    assert all(s.belief is not None and s.belief < 0 for group in credited for t in group for s in t.steps)
    assert "return 1" in ar.describe(credited[0][0], policy.tokenizer)
    with pytest.raises(UserError, match="'trace' probes a reference policy, and a notebook has none"):
        ar.assign_credit(policy, short, "trace")
    with pytest.raises(UserError, match="'igpo' probes gold answers, and rows of these trajectories have none"):
        ar.assign_credit(policy, [[dataclasses.replace(t, row={}) for t in group] for group in groups], "igpo")


def test_a_step_says_why_it_got_its_advantage(policy: ar.Policy, groups: list[list[Trajectory]]) -> None:
    credited = ar.assign_credit(policy, groups, "dr_grpo")
    assert [[t.uid for t in group] for group in credited] == [[t.uid for t in group] for group in groups]
    text = ar.describe(credited[1][1], policy.tokenizer)
    assert "--- advantage −0.5\noutcome in its group: return 0 − group mean 0.5 = −0.5\n" in text
    assert "advantage" not in ar.describe(groups[1][1], policy.tokenizer)


@pytest.mark.parametrize(("scheme", "key"), [("gigpo", "state_key"), ("rtmc", "action_key")])
def test_steps_without_the_keys_of_a_scheme_are_refused(
    policy: ar.Policy, groups: list[list[Trajectory]], scheme: str, key: str
) -> None:
    steps = [[[dataclasses.replace(s, **{key: None}) for s in t.steps] for t in group] for group in groups]
    bare = [
        [dataclasses.replace(t, steps=tuple(own)) for t, own in zip(group, of_group, strict=True)]
        for group, of_group in zip(groups, steps, strict=True)
    ]
    with pytest.raises(UserError, match=f"'{scheme}' compares steps of equal {key}, and these steps have none"):
        ar.assign_credit(policy, bare, scheme)
    ar.assign_credit(policy, groups, scheme)


def test_groups_of_several_rollouts_stay_apart(policy: ar.Policy, groups: list[list[Trajectory]]) -> None:
    """Both have a group 0."""
    rows = ar.compare_credit(policy, [*groups, *groups], "dr_grpo")
    assert {row["group"] for row in rows} == {0, 1, 2, 3}
    assert {row["dr_grpo"] for row in rows} == {0.5, -0.5}


def test_an_update_returns_a_new_policy(policy: ar.Policy, task: Any, groups: list[list[Trajectory]]) -> None:
    before = jax.device_get(policy.params)
    one, _ = ar.update(policy, groups, "dr_grpo", learning_rate=1e-2)
    two, metrics = ar.update(one, groups, "dr_grpo", learning_rate=1e-2)
    assert metrics["learner/grad_norm"] > 0
    assert [p.version for p in (policy, one, two)] == [0, 1, 2]
    jax.tree.map(np.testing.assert_array_equal, policy.params, before)
    embeddings = [np.asarray(jax.tree.leaves(p.params["decoder"])[0]) for p in (policy, one, two)]
    assert not np.array_equal(embeddings[0], embeddings[1]) and not np.array_equal(embeddings[1], embeddings[2])
    again, _ = ar.update(policy, groups, "dr_grpo", learning_rate=1e-2)
    jax.tree.map(np.testing.assert_array_equal, again.params, one.params)
    (greedy,) = ar.roll_out(two, task, groups=1, samples=1, temperature=0.0)
    assert greedy[0].steps[0].policy_version == 2


def test_refusals(policy: ar.Policy, groups: list[list[Trajectory]], task: Any) -> None:
    for scheme, message in (("gripo", "unknown credit scheme"), ("grpo(", "cannot read"), ("remax", "greedy rollout")):
        with pytest.raises(UserError, match=message):
            ar.update(policy, groups, scheme)
    with pytest.raises(UserError, match="no tokenizer"):
        ar.load_policy("tiny")
    with pytest.raises(UserError, match="no such folder"):
        ar.load_policy("nowhere")
    with pytest.raises(UserError, match="KL"):
        ar.load_policy("tiny", task=task, kl={"kind": "k3"})
    with pytest.raises(UserError, match="unknown key 'budget.steps'"):
        ar.load_policy("tiny", task=task, budget={"steps": 3})


def test_the_import_is_light() -> None:
    code = "import sys, agentr1_jax as ar; dir(ar); print('jax' in sys.modules, hasattr(ar, 'nonsense'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Of the Jupyter libraries.
def test_the_notebook_of_the_quickstart(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", os.fspath(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # The file in the repository holds none.
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = f"WARM_START_UPDATES, UPDATES, QUESTIONS = 8, 1, 8\nRUN = {os.fspath(tmp_path / 'run')!r}"
    (training,) = [cell for cell in notebook.cells if "experiments.train" in cell.source and cell.cell_type == "code"]
    last, kinds = '"--config.updates=0"', ("policy", "tokenizer", "eval", "warm_start.demonstrations")
    small = [f'"--config.{key}={value}"' for key, value in SMALL.items() if key.startswith(kinds)]
    assert last in training.source
    training.source = training.source.replace(last, ", ".join([last, *small]))
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": ROOT / "notebooks"}})
    client.execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "--- step 1, reward" in text and "update 0: reward" in text and "after exact match" in text
