"""What users write in configs: the mini-language of its strings, and mistakes that are refused by name."""

from __future__ import annotations

import io
import re

import pytest
from changes import changed
from configured import configured_task
from rich.console import Console

from agentr1_jax.envs.base import Observation
from agentr1_jax.envs.registry import TASKS
from agentr1_jax.errors import RetryableError, UserError, hide_credentials
from agentr1_jax.registry import Call, parse_call, split_list
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.config import flatten
from agentr1_jax.runtime.synonyms import NO_COUNTERPART, SYNONYMS
from configs import base, countdown, keydoor, multihop_tiny, quickstart
from experiments import checks, config_reference
from experiments.setup import adapt, read_settings

BATCH_MEAN = """
from agentr1_jax.credit import Credit, TokenBatch, broadcast_to_steps, broadcast_to_tokens, register
from agentr1_jax.validation import Positive

@register("batch_mean")
def batch_mean(batch: TokenBatch, *, scale: Positive = 1.0) -> Credit:
    return Credit(broadcast_to_tokens(batch, broadcast_to_steps(batch, scale * batch.returns)))
"""
GUESS = """
from pydantic.dataclasses import dataclass
from agentr1_jax.envs.registry import register
from agentr1_jax.validation import STRICT, Count

@dataclass(frozen=True, config=STRICT)
class GuessConfig:
    most: Count = 9

@register("guess", GuessConfig)
def make_guess(config, run): ...
"""
NO_ARGUMENTS = {"credit__args__gamma": None, "credit__args__lam": None}
MISTAKES = [
    (quickstart, {"credit__name": "gae"}, "credit.name: unknown credit scheme 'gae'; choose one of .*bilevel_gae"),
    (quickstart, {"credit__args__lamda": 0.9}, "credit scheme 'step_gae' has no argument 'lamda'; it has"),
    (quickstart, {"critic": "none"}, "credit scheme 'step_gae' needs a critic"),
    (quickstart, {"critic": "shared"}, "critic is 'shared'; it must"),
    (quickstart, {"credit__name": "grpo", **NO_ARGUMENTS, "rollout__samples": 1}, "rollout.samples"),
    (quickstart, {"learner__row_tokens": 64}, r"learner.row_tokens \(64\) is less than budget.context_tokens"),
    (quickstart, {"budget__response_tokens": 4096}, r"budget: response_tokens \(4096\) leaves no room for a prompt"),
    (quickstart, {"policy__weights": "models/x"}, "policy: set one of weights and preset"),
    (quickstart, {"policy__heads": 0}, "policy.heads is 0; it must be greater than or equal to 1"),
    (quickstart, {"optimizer__lr": -1.0}, "optimizer.lr is -1.0; it must be greater than or equal to 0"),
    (quickstart, {"optimizer__lr": float("nan")}, "optimizer.lr is nan; it must be a finite number"),
    (quickstart, {"optimizer__name": "adamm"}, "unknown optimizer.name 'adamm'; choose one of"),
    (quickstart, {"kl__kind": "k4"}, "kl.kind is 'k4'; it must be"),
    (quickstart, {"context__rule": "window"}, "context.rule"),
    (quickstart, {"rollout__temperature": -1.0}, "rollout.temperature is -1.0; it must be"),
    (quickstart, {"checkpoint__every": 0}, "checkpoint.every is 0; it must be greater than or equal to 1"),
    (quickstart, {"seed": -1}, "seed is -1; it must be greater than or equal to 0"),
    (quickstart, {"run_dir": ""}, "run_dir"),
    (quickstart, {"eval__split": "test"}, "eval.split: hopworld has no row 'test' 0; splits are"),
    (quickstart, {"task__name": "hopwrld"}, "task.name: unknown task 'hopwrld'; choose one of"),
    (countdown, {"task__mixture": ("keydoor(weight=1)",)}, "only task 'mixture' reads, and task.name is 'countdown'"),
    (keydoor, {"task__curriculum": ("max_steps(99)",)}, "task.curriculum"),
    (multihop_tiny, {"task__data_dir": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("config", "changes", "message"), MISTAKES)
def test_a_mistake_is_refused_by_name(config, changes, message):
    with pytest.raises(UserError, match=message):
        configured_task(changed(config, **changes))


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("reset", "refusal", "message"),
    [
        (lambda: fail(OSError("gone")), RetryableError, "row train/0 of task 'countdown': no .* OSError: gone"),
        (lambda: fail(SystemExit(0)), RetryableError, "SystemExit: 0"),
        (lambda: Observation(messages=[{"role": "user"}]), UserError, "'content' of a message is None"),
        (lambda: None, UserError, "an observation is None"),
    ],
    ids=["raises", "exits", "a message without content", "None"],
)
def test_an_environment_that_cannot_begin_is_refused_at_the_start(reset, refusal, message):
    class Fails:
        async def reset(self, row, seed):
            return reset()

    task = configured_task(changed(countdown))
    object.__setattr__(task, "env", Fails)
    with pytest.raises(UserError, match=message) as refused:
        checks.check_task(read_settings(changed(countdown)), task)
    assert type(refused.value) is refusal


def test_values_have_types():
    text = "a( x = 1 , y=.5,z=true, w=none, q='a,(b)', r=hello-x)"
    assert parse_call(text, "k") == Call(
        "a", (), {"x": 1, "y": 0.5, "z": True, "w": None, "q": "a,(b)", "r": "hello-x"}
    )
    assert parse_call("a(3, -2)", "k") == Call("a", (3, -2)) and parse_call("a()", "k") == parse_call(" a ", "k")
    assert parse_call("a(1, c=3)", "k").bind(["b", "c"]) == {"b": 1, "c": 3}
    assert split_list("a(1,2), b ,c('x,y')") == ["a(1,2)", " b ", "c('x,y')"] and split_list(" ") == []


@pytest.mark.parametrize("text", ["", "a(", "a)", "a((1))", "a(,)", "a(x=)", "a b", "a(x=1,x=2)", "a('1)"])
def test_anything_else_is_refused_with_its_key(text):
    with pytest.raises(ValueError, match=r"some\.key: cannot read"):
        parse_call(text, "some.key")


@pytest.mark.parametrize("text", ["a(1,2)", "a(c=1)", "a(1,b=2)"])
def test_arguments_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError, match="a takes b"):
        parse_call(text, "k").bind(["b"])


def command_line(*overrides: str, config: str = "quickstart"):
    """Settings of a command."""
    path = f"--config={base.__file__.replace('base.py', f'{config}.py')}"
    _, given = configs.parse_config(["train", path, *(f"--config.{override}" for override in overrides)], adapt)
    return read_settings(given.config)


def test_another_credit_scheme_leaves_arguments_of_the_old_one_out():
    scheme = command_line("credit.name=grpo").scheme
    assert (scheme.name, scheme.arguments) == ("grpo", {})
    _, notes = adapt(quickstart.get_config(), {"credit.name": "grpo"})
    assert notes == ["credit.name is grpo: credit.args.lam=0.95 of step_gae is left out"]
    scheme = command_line("credit=gigpo(gamma=.95, norm=mean_std_norm)").scheme
    assert (scheme.name, scheme.arguments) == ("gigpo", {"gamma": 0.95, "norm": "mean_std_norm"})
    assert command_line("credit.name=token_gae").scheme.arguments == {"lam": 0.95}  # It has that, too.
    assert command_line("credit.args.lam=None").scheme.arguments == {}
    assert command_line("credit.args.whiten=none").scheme.arguments == {"lam": 0.95, "whiten": "none"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["credit.name=grpo", "credit.args.lam=.9"], "credit scheme 'grpo' has no argument 'lam'; it has unit"),
        (["credit=grpo(lam=.9)"], "credit scheme 'grpo' has no argument 'lam'"),
        (["credit=grpo(power=2)"], "credit scheme 'grpo' has no argument 'power'; it has unit"),
        (["credit.name=gae"], "credit.name: unknown credit scheme 'gae'; choose one of"),
        (["credit.file=nowhere.py"], "credit.file: .*nowhere.py: no such file"),
        (["task.name=keydoor", "task.hopworld.top_k=3"], "unknown key 'task.hopworld.top_k'"),
        (["task.name=keydor"], "task.name: unknown task 'keydor'; choose one of"),
    ],
)
def test_what_the_command_line_says_itself_must_exist(overrides, message):
    with pytest.raises(UserError, match=message):
        command_line(*overrides)


def test_a_users_own_scheme_works_on_a_config_of_another_one(tmp_path, registry):
    (tmp_path / "mine.py").write_text(BATCH_MEAN)
    file = f"credit.file={tmp_path}/mine.py"
    assert command_line(file, "credit.name=batch_mean").scheme.arguments == {}
    assert command_line(file, "credit.name=batch_mean", "credit.args.scale=2").scheme.arguments == {"scale": 2.0}
    assert command_line(file, "credit=batch_mean(scale=.5)").scheme.arguments == {"scale": 0.5}
    with pytest.raises(UserError, match=r"credit.args.scale is 0.0; it must be greater than 0"):
        command_line(file, "credit=batch_mean(scale=0)")


def test_another_task_brings_its_own_keys(tmp_path, monkeypatch):
    for attribute in ("_entries", "_files"):
        monkeypatch.setattr(TASKS, attribute, dict(getattr(TASKS, attribute)))
    task = command_line("task.name=keydoor", "task.keydoor.noise=0.25").task
    assert task.sections.keys() == {"keydoor"} and task.sections["keydoor"].noise == 0.25
    _, notes = adapt(quickstart.get_config(), {"task.name": "keydoor"})
    assert notes == ["task.name is keydoor: task.hopworld of the config is left out"]
    assert command_line("task.name=hopworld").task.sections["hopworld"].top_k == 2  # That of the config.
    mixture = "task.mixture=('hopworld(weight=1)','keydoor(weight=2)')"
    assert command_line("task.name=mixture", mixture).task.sections.keys() == {"hopworld", "keydoor"}
    (tmp_path / "mine.py").write_text(GUESS)
    own = (f"task.file={tmp_path}/mine.py", "task.name=guess")
    assert command_line(*own).task.sections["guess"].most == 9
    assert command_line(*own, "task.args.most=3").task.sections["guess"].most == 3


def test_keys_are_printed_with_where_they_were_set():
    path = f"--config={base.__file__.replace('base.py', 'scale_qwen2_5_3b.py')}"
    overrides = ("--config.rollout.slots=16", "--config.credit.name=gigpo", "--config.budget.context_tokens=2048")
    _, given = configs.parse_config(["train", path, *overrides], adapt)

    def show(section):
        out = io.StringIO()
        config_reference.show_keys(given, section, Console(file=out))
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
        return {row[0]: row[1:] for row in rows if row[0]}

    every = show("")
    assert every.keys() == dict(flatten(given.config.to_dict())).keys()
    assert all(row[0] and row[1] and row[2] and row[3] for row in every.values())
    assert every["rollout.slots"][:3] == ["16", "by hardware", "command line"]
    assert every["rollout.tensor"][:3] == ["2", "1", "config file"]
    assert every["policy.dtype"][:3] == ["'bfloat16'", "by hardware", "hardware"]
    assert every["learner.row_tokens"][:3] == ["2048", "derived", "lengths"]
    assert every["kl.coef"] == ["0.001", "0.001", "default", "Weight of the KL."]
    assert every["credit.name"][:3] == ["'gigpo'", "'grpo'", "command line"]
    assert every["task.multihop.top_k"] == ["3", "3", "default", "Passages that a search returns."]
    assert show("mesh").keys() == {key for key in every if key.startswith("mesh.")}
    with pytest.raises(UserError, match="--keys=nonsense: no such section; choose one of .*rollout"):
        show("nonsense")


def test_keys_of_other_trainers_are_understood():
    known = dict(flatten(base.get_config().to_dict()))
    assert set(SYNONYMS.values()) <= known.keys() and not SYNONYMS.keys() & NO_COUNTERPART.keys()
    for sentence in NO_COUNTERPART.values():
        keys = re.findall(r"\b[a-z_]+\.[a-z_]+(?==|\b)(?!\.md|\.\*)", sentence)
        assert {key for key in keys if not key.endswith(".md")} <= known.keys(), sentence
    for given, meant in {
        "learning_rate": "optimizer.lr",
        "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
        "actor_rollout_ref.rollout.n": "rollout.samples",
        "rollout.n": "rollout.samples",
        "num_generations": "rollout.samples",
        "data.max_response_length": "budget.response_tokens",
        "actor_rollout_ref.actor.kl_loss_coef": "kl.coef",
        "algorithm.adv_estimator": "credit.name",
        "model_name_or_path": "policy.weights",
        "pretran.lr": "pretrain.lr",  # A near key comes first.
    }.items():
        with pytest.raises(UserError, match=f"unknown key '{given}'; did you mean '{meant}'"):
            command_line(f"{given}=1")
    for given, said in {
        "data.max_prompt_length": "budget.context_tokens",
        "gpu_memory_utilization": "rollout.slots",
        "ppo_mini_batch_size": "learner.minibatches",
        "max_steps": "updates is the number of batches",
    }.items():
        with pytest.raises(UserError, match=f"unknown key '{given}'; .*{said}"):
            command_line(f"{given}=1")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'https://user:secret@host:1/a?b=c' is", "'https://***@host:1/a?b=c' is"),
        ("https://secret@host", "https://***@host"),
        ("https://user:se@cret@host/a@b", "https://***@host/a@b"),
        (
            "(https://host/a?b=c&api_key=secret&X-Amz-Signature=secret#d)",
            "(https://host/a?b=c&api_key=***&X-Amz-Signature=***#d)",
        ),
        ("https://host?accessToken=secret: gone", "https://host?accessToken=*** gone"),
        ("https://host/@user/a?keyword=b&monkey=c&split=train", "https://host/@user/a?keyword=b&monkey=c&split=train"),
        ("https://user:$NAME@host?token=${NAME}", "https://user:$NAME@host?token=${NAME}"),
        ("mail user@host", "mail user@host"),
    ],
)
def test_credentials_in_urls_are_hidden(text, shown):
    assert hide_credentials(text) == shown
    assert hide_credentials(shown) == shown
    assert "NAME" not in hide_credentials(text, variables=True)


def test_credentials_are_sought_in_time_in_texts_of_others():
    """Else for hours."""
    for text in (
        "?" + "_" * 1_000_000,
        "?" + "a_" * 500_000,
        "?a_" * 300_000,
        "://" + "a" * 1_000_000,
        "://a:" * 200_000,
    ):
        assert hide_credentials(text) == text
