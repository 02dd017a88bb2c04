"""What is refused before a run starts because credit could not be assigned as asked, and what a config comes to."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest
from builders import trajectory
from byte_tokens import TOKENIZER
from changes import changed

from agentr1_jax.credit import SCHEMES, get_scheme
from agentr1_jax.envs.base import Observation
from agentr1_jax.errors import UserError
from agentr1_jax.train import collect
from agentr1_jax.trajectory import Outcome
from configs import keydoor, quickstart
from experiments.ablation import grid
from experiments.ablation.arms import parse_arms
from experiments.checks import check_answers, check_placement, check_task
from experiments.setup import adapt, read_settings


def task(*, state_key="s", potential=1.0, evidence="", parts=("goal",), answers=("x",), size=None):
    """A task whose observations and rows have just that; of a finite one, row i has the answer i."""

    async def reset(row, seed):
        return Observation(text="", state_key=state_key, potential=potential, evidence=evidence)

    return types.SimpleNamespace(
        name="some task",
        reward_parts=parts,
        row=lambda split, index: {
            "id": f"{split}/{index}",
            "answers": answers[index % len(answers) :] if answers else (),
        },
        size=lambda split: size,
        env=lambda: types.SimpleNamespace(reset=reset),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__samples": 1}, "credit scheme 'grpo' compares the samples of a task row, and rollout.samples is 1"),
        ({"credit__name": "step_gae"}, "credit scheme 'step_gae' needs a critic; set config.critic=shared_trunk"),
        (
            {"credit__name": "igpo"},
            "'igpo' reads the belief in the gold answer, and credit.probe is none; set credit.prob",
        ),
        (
            {"credit__probe": "policy"},
            "credit.probe is policy, and nothing reads it: credit scheme 'grpo' takes no belief",
        ),
        (
            {"credit__name": "trace", "credit__probe": "policy"},
            "reads the reference's belief .*credit.args.frozen=False",
        ),
        (
            {"credit__name": "igpo", "credit__probe": "policy", "credit__probe_text": "answer"},
            "credit: probe_text is 'answer'; write {answer} where the gold answer stands, once",
        ),
        ({"credit__probe_text": "{answer}"}, "credit.probe_text is set, and credit.probe is none"),
        ({"credit__name": "gpro"}, "unknown credit scheme 'gpro'; choose one of .*grpo"),
        ({"credit__args__gamma": 0.9}, "credit scheme 'grpo' has no argument 'gamma'"),
        ({"credit__name": "reinforce", "credit__args__gamma": 1.5}, "gamma is 1.5; it must be less than or equal to 1"),
        ({"credit__args__unit": "row"}, "credit.args.unit is 'row'; it must be 'token', 'step' or 'trajectory'"),
        ({"credit__file": "nowhere.py"}, "credit.file: .*nowhere.py: no such file"),
        ({"shaping__process_norm": "group"}, "shaping: process_norm needs process_parts"),
        (
            {"learner__loss_mask": False, "learner__row_loss_tokens": 48},
            r"budget.context_tokens \(224\) loss tokens, and learner.row_loss_tokens is 48",
        ),
        (
            {"credit__name": "remax", "shaping__potential": 1.0},
            "compares with greedy rollouts, whose rewards are not shaped; .*shaping.potential",
        ),
        (
            {"credit__name": "reinforce_pp", "credit__args__gamma": 0.9, "shaping__potential": 1.0},
            "discounts by step, and credit scheme 'reinforce_pp' by token",
        ),
        (
            {"credit__name": "reinforce", "rollout__samples": 1, "rollout__dynamic_sampling_groups": 4},
            "dynamic_sampling_groups replaces groups whose returns are all equal",
        ),
    ],
)
def test_a_config_without_what_credit_needs_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        read_settings(changed(keydoor, **changes))


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"credit__name": "gigpo"}, {"state_key": None}, "'gigpo' compares steps of equal state_key, and .*have none"),
        (
            {"credit__name": "igpo", "credit__probe": "policy"},
            {"answers": ()},
            "credit.probe is policy, and rows of task 'some task' have no answers to probe; .*credit.probe=none",
        ),
        ({"shaping__potential": 0.5}, {"potential": None}, "observations of task 'some task' have no potential"),
        (
            {"context__rule": "evidence"},
            {"evidence": None},
            "rule 'evidence' builds prompts from what .*'some task' do not",
        ),
        (
            {"shaping__process_parts": ("side",), "shaping__process_norm": "group"},
            {},
            "task 'some task' has no reward part 'side'; it has goal",
        ),
    ],
)
def test_a_task_without_what_credit_needs_is_refused(changes, given, message):
    settings = read_settings(changed(keydoor, **changes, warm_start__updates=0, tokenizer__path="x"))
    with pytest.raises(UserError, match=message):
        check_task(settings, task(**given))
    check_task(settings, task(parts=("goal", "side")))


def test_every_answer_of_a_finite_task_must_fit_a_probe():
    probed = changed(keydoor, credit__name="igpo", credit__probe="policy", credit__probe_text="{answer}")
    settings = read_settings(probed)
    most = settings.budget.response_tokens
    answers = ("x", "y" * most, "z" * (most + 1))
    check_answers(settings, task(answers=answers[:2], size=2), TOKENIZER)
    message = (
        rf"the answer of row 'train/2' takes {most + 1} tokens as a probe .*raise budget.response_tokens \({most}\)"
    )
    for size in (3, None):
        with pytest.raises(UserError, match=message):
            check_answers(settings, task(answers=answers, size=size), TOKENIZER)
    with pytest.raises(UserError, match="row 'train/1' has no answer to probe"):
        check_answers(settings, task(answers=("x", " "), size=2), TOKENIZER)
    check_answers(read_settings(keydoor.get_config()), task(answers=answers), TOKENIZER)


def test_an_arm_that_reads_beliefs_is_probed_and_another_is_not():
    texts = ["credit=grpo,igpo,trace,trace(frozen=False)"]
    arms = parse_arms(texts, keydoor.get_config())
    for config in (keydoor.get_config(), changed(keydoor, credit__name="igpo", credit__probe="policy")):
        if config.credit.probe == "policy":
            arms = arms[:2]
        _, cells = grid.make_grid(config, arms, [0], "out")
        assert [cell.config.credit.probe for cell in cells] == ["none", "policy", "reference", "policy"][: len(arms)]
        for cell in cells:
            read_settings(cell.config)


def test_another_scheme_leaves_the_probe_of_the_config_out():
    config = changed(keydoor, credit__name="igpo", credit__probe="policy", credit__probe_text="{answer}")
    adapted, notes = adapt(config, {"credit.name": "grpo"})
    assert (adapted.credit.probe, adapted.credit.probe_text) == ("none", "")
    assert notes == [
        "credit.name is grpo, which takes no belief: credit.probe=policy is left out",
        "credit.name is grpo, which takes no belief: credit.probe_text={answer} is left out",
    ]
    kept, notes = adapt(config, {"credit.name": "a2tgpo"})
    assert kept.credit.probe == "policy" and not notes


@pytest.mark.parametrize(
    ("name", "args", "discount"),
    [
        ("grpo", {}, 1.0),
        ("gigpo", {}, 0.95),
        ("gigpo", {"gamma": 0.5}, 0.5),
        ("bilevel_gae", {"gamma": 0.5}, 0.95),
        ("token_gae", {"gamma": 0.5}, 1.0),
        ("step_gae", {"gamma": 0.5}, 0.5),
    ],
)
def test_the_discount_per_step_is_the_scheme_s(name, args, discount):
    changes = {f"credit__args__{key}": x for key, x in args.items()}
    settings = read_settings(changed(keydoor, credit__name=name, critic="shared_trunk", **changes))
    assert settings.scheme.gamma == discount


def test_greedy_rollouts_are_of_the_rows_of_the_batch(monkeypatch):
    """Groups keep their place in the order of prompts, whichever were replaced; a failed one gives nothing."""
    asked = []

    def roll_out(setup, params, request, *, batch, stop):
        assert (request.sampling.temperature, request.version, batch.size) == (0, 7, len(batch.tasks))
        assert request.failures == "drop"  # As the config says.
        outcomes = {1: Outcome.ANSWERED, 5: Outcome.ENV_FAILURE, 6: Outcome.FAILURE_AS_ZERO}
        for task in batch.tasks:
            asked.append((task.row, [name.uid for name in task.identities]))
            group = task.identities[0].group
            played = trajectory(np.random.default_rng(0), [2], group=group)
            batch.complete.append([dataclasses.replace(played, outcome=outcomes[group])])
        return batch

    monkeypatch.setattr(collect, "roll_out", roll_out)
    some = types.SimpleNamespace(name="t", row=lambda split, index: (split, index))
    setup = types.SimpleNamespace(settings=read_settings(quickstart.get_config()), task=some)
    batch = [trajectory(np.random.default_rng(1), [1], group=group, sample=i) for group in (1, 5, 6) for i in range(2)]
    out = collect.add_greedy_returns(setup, {}, batch, 40, version=7)
    assert [row for row, _ in asked] == [("train", 41), ("train", 45), ("train", 46)]
    assert len({uid for _, uids in asked for uid in uids}) == 3
    reward = trajectory(np.random.default_rng(0), [2], group=1).total_reward
    assert [t.greedy_return for t in out] == [reward, reward, None, None, 0.0, 0.0]
    assert collect.add_greedy_returns(setup, {}, [], 40, version=7) == []
    monkeypatch.setattr(collect, "roll_out", lambda *_, stop, batch: stop)  # As where it is aborted.
    assert collect.add_greedy_returns(setup, {}, batch, 40, version=7, stop=None) is None


def test_an_arm_without_a_mask_gets_rows_for_what_it_reads():
    config = changed(keydoor, learner__row_loss_tokens=48)
    arms = parse_arms(["credit=token_gae", "learner.loss_mask=true,false"], config)
    _, (masked, unmasked) = grid.make_grid(config, arms, [0], "out")
    assert masked.config.learner.row_loss_tokens == 48 and unmasked.config.learner.row_loss_tokens == 224
    assert "row_loss_tokens" in unmasked.note and "critic=shared_trunk" in unmasked.note
    for cell in (masked, unmasked):
        check_placement(read_settings(cell.config), jax.devices()[:1])


def test_a_user_s_file_may_hold_dataclasses_and_register_what_it_imports(registry, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "from agentr1_jax.credit import register\n"
        "from agentr1_jax.credit.group import dr_grpo\n"
        "@dataclasses.dataclass\n"
        "class Choice:\n    scale: float = 1.0\n"
        "register('mine', needs_samples=True)(dr_grpo)\n"
    )
    for _ in range(2):
        SCHEMES.load(str(path))
    scheme = get_scheme("mine", unit="step")
    assert scheme.needs_samples
    path.write_text("from agentr1_jax.credit import register\n")
    with pytest.raises(ValueError, match="registers no credit scheme"):
        SCHEMES.load(str(path))
    assert "mine" not in registry


@pytest.mark.parametrize(
    ("name", "critic", "learns"),
    [("state_baseline", "none", False), ("state_baseline", "shared_trunk", True), ("grpo", "shared_trunk", False)],
)
def test_a_critic_is_trained_where_the_scheme_uses_it(name, critic, learns):
    assert read_settings(changed(keydoor, credit__name=name, critic=critic)).learns_values == learns
