"""Trajectories: what is written is what is read, what is corrupt is named, what each outcome means."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import tempfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentr1_jax.errors import UserError
from agentr1_jax.trajectory import POLICIES, Budget, Outcome, Step, Term, Trajectory
from agentr1_jax.trajectory_io import from_json, read_jsonl, to_json, write_jsonl
from agentr1_jax.validation import from_section

PER_TOKEN = ("logprobs", "advantages", "values", "value_targets")
ARRAYS = ("prompt_ids", "response_ids", *PER_TOKEN, "final_prompt_ids")
BUDGET = {
    "max_steps": 5,
    "response_tokens": 8,
    "observation_tokens": 8,
    "context_tokens": 64,
    "trajectory_tokens": 99,
}

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
# JSON may carry lone surrogates, so a tool's text may hold them.
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "\r\n\u2028\x00", "北京 🎬", "</tool_call>"])
numbers = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.dictionaries(texts, numbers, max_size=2)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
info = st.dictionaries(texts, plain, max_size=2)
terms = st.builds(Term, scalars, scalars, numbers, numbers)


@st.composite
def per_token(draw, count, dtypes):
    """None, values that all agree, or any, of a number of tokens."""
    dtype = draw(st.sampled_from(dtypes))
    values = st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False) | st.just(math.nan)
    of_tokens = st.lists(values, min_size=count, max_size=count)
    made = draw(st.none() | values.map(lambda x: [x] * count) | of_tokens)
    return None if made is None else np.asarray(made, dtype)


@st.composite
def next_prompt(draw, previous):
    """A prompt that extends, branches from or ignores what came before."""
    kept = previous[: draw(st.integers(0, len(previous)))] if draw(st.booleans()) else previous
    return np.asarray([*kept, *draw(token_ids)], np.int32)


@st.composite
def trajectories(draw):
    steps, previous = [], np.zeros(0, np.int32)
    for _ in range(draw(st.integers(0, 3))):
        prompt, response = draw(next_prompt(previous)), np.asarray(draw(token_ids), np.int32)
        logprobs = draw(
            st.lists(st.floats(-1e4, 0, width=32), min_size=len(response), max_size=len(response)).map(np.float32)
        )
        steps.append(
            Step(
                prompt,
                response,
                np.asarray(logprobs, np.float32),
                reward=draw(st.none() | numbers),
                reward_parts=draw(scalars),
                observation=draw(texts),
                tool_calls=tuple(draw(st.lists(info, max_size=2))),
                state_key=draw(st.none() | texts),
                advantages=draw(per_token(len(response), (np.float32,))),
                account=draw(st.dictionaries(texts, terms, max_size=2)),
                shaped_reward=draw(st.none() | numbers),
                values=draw(per_token(len(response), (np.float16, np.float32))),
                value_targets=draw(per_token(len(response), (np.float16, np.float32))),
                context_rule=draw(st.sampled_from(["append", "window(2)"])),
                observation_tokens=draw(st.none() | st.integers(0, len(prompt))),
                policy_version=draw(st.integers(0, 9)),
                info=draw(info),
            )
        )
        previous = np.concatenate([prompt, response])
    return Trajectory(
        uid=draw(texts),
        group=draw(st.integers(0, 9)),
        sample=draw(st.integers(0, 9)),
        task=draw(texts),
        seed=draw(st.integers(0, 2**63 - 1)),
        steps=tuple(steps),
        outcome=draw(st.sampled_from(Outcome)),
        final_prompt_ids=draw(st.none() | next_prompt(previous)),
        final_value=draw(st.none() | st.floats(allow_nan=False)),
        metrics=draw(scalars),
        info=draw(info),
    )


def contents(record):
    """All fields of a step or trajectory as comparable values; arrays with dtype and bytes."""
    out = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in ARRAYS and value is not None:
            value = (value.dtype, value.shape, value.tobytes())
        if field.name == "steps":
            value = list(map(contents, value))
        out[field.name] = list(value) if isinstance(value, tuple) and field.name == "tool_calls" else value
    return out


def trajectory(prompts=([1, 2],), responses=([3, 4],), rewards=None, **fields):
    steps = tuple(
        Step(np.asarray(p, np.int32), np.asarray(r, np.int32), np.full(len(r), -0.5, np.float32), reward=reward)
        for p, r, reward in zip(prompts, responses, rewards or [1.0] * len(prompts), strict=True)
    )
    fields = {"outcome": Outcome.ANSWERED} | fields
    return Trajectory("train/0/0", 0, 0, "task/1", seed=5, steps=steps, **fields)


BRANCHING = trajectory(
    prompts=([1, 2], [1, 2, 3, 4, 9], [1, 2, 8], [7]),
    responses=([3, 4], [5], [], [6]),
    final_prompt_ids=np.int32([7, 6]),
)


@settings(max_examples=30, deadline=None)
@example(batch=[BRANCHING, trajectory(prompts=(), responses=())])
@example(batch=[])
@given(batch=st.lists(trajectories(), max_size=3))
def test_what_is_written_is_what_is_read_and_equal_content_gives_equal_bytes(batch):
    with tempfile.TemporaryDirectory() as folder:
        write_jsonl(f"{folder}/new/a.jsonl.gz", batch)
        read = list(read_jsonl(f"{folder}/new/a.jsonl.gz"))
        write_jsonl(f"{folder}/b.jsonl.gz", read)
        with open(f"{folder}/new/a.jsonl.gz", "rb") as a, open(f"{folder}/b.jsonl.gz", "rb") as b:
            assert a.read() == b.read()
    assert list(map(contents, read)) == list(map(contents, batch))


def test_float32_logprobs_survive_to_the_last_bit():
    everything = np.concatenate([-np.geomspace(1e-45, 3e38, 997), [-0.0, 0.0]]).astype(np.float32)
    step = Step(np.int32([1]), np.zeros(999, np.int32), everything)
    read = from_json(json.loads(json.dumps(to_json(dataclasses.replace(trajectory(), steps=(step,))))))
    assert read.steps[0].logprobs.tobytes() == everything.tobytes()


def test_a_prompt_is_stored_as_what_it_adds_to_the_step_before():
    stored = to_json(BRANCHING)
    assert [step["prompt_ids"] for step in stored["steps"]] == [
        {"reuse": 0, "new": [1, 2]},
        {"reuse": 4, "new": [9]},
        {"reuse": 2, "new": [8]},
        {"reuse": 0, "new": [7]},
    ]
    assert stored["final_prompt_ids"] == {"reuse": 2, "new": []}


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    write_jsonl(path, [trajectory()])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_jsonl(path, [trajectory(), trajectory(info={"a": object()})])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_jsonl(tmp_path / "other.jsonl.gz", [trajectory(metrics={"em": object()})])
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_are_not_finite_can_be_written_and_looked_at(tmp_path):
    nan, inf = float("nan"), float("inf")
    step = dataclasses.replace(
        trajectory().steps[0], reward=nan, reward_parts={"x": -inf}, logprobs=np.float32([-inf, -1])
    )
    made = trajectory(metrics={"em": inf}, info={"advantages": [[nan, 1.0]]})
    write_jsonl(tmp_path / "t.jsonl.gz", [dataclasses.replace(made, steps=(step,))])
    (read,) = read_jsonl(tmp_path / "t.jsonl.gz")
    assert math.isnan(read.steps[0].reward) and read.steps[0].reward_parts == {"x": -inf}
    np.testing.assert_array_equal(read.steps[0].logprobs, [-inf, -1])
    assert read.metrics == {"em": inf} and math.isnan(read.info["advantages"][0][0])


def test_a_step_has_one_number_of_each_kind_for_each_response_id():
    with pytest.raises(ValueError, match="one log-probability for each response id, and has 1 for 2"):
        Step(np.int32([1]), np.int32([2, 3]), np.float32([-1]))
    for name, what in (("advantages", "advantage"), ("values", "value"), ("value_targets", "value target")):
        with pytest.raises(ValueError, match=f"one {what} for each response id, and has 3 for 2"):
            dataclasses.replace(trajectory().steps[0], **{name: np.zeros(3, np.float16)})


def test_a_record_of_before_accounts_and_values_is_still_read():
    record = to_json(trajectory())
    for name in ("account", "shaped_reward", "values", "value_targets"):
        del record["steps"][0][name]
    record["steps"][0]["advantages"] = [0.5, -0.25]
    (step,) = from_json(json.loads(json.dumps(record))).steps
    np.testing.assert_array_equal(step.advantages, np.float32([0.5, -0.25]))
    assert step.account == {} and step.values is step.value_targets is step.shaped_reward is None


def test_equal_advantages_of_a_step_are_stored_as_one_number():
    step = dataclasses.replace(trajectory().steps[0], advantages=np.full(2, -0.1, np.float32))
    (stored,) = to_json(dataclasses.replace(trajectory(), steps=(step,)))["steps"]
    assert stored["advantages"] == np.float32(-0.1)


def broken_record(**changes):
    record = to_json(trajectory())
    record["steps"][0] |= {key: value for key, value in changes.items() if key in record["steps"][0]}
    return json.dumps(record | {key: value for key, value in changes.items() if key not in record["steps"][0]})


@pytest.mark.parametrize(
    "line",
    [
        '{"uid": "a"',
        "",
        "null",
        "[" * 100_000,
        '{"uid": "\xff"}'.encode("latin-1"),
        broken_record(unknown_field=1),
        broken_record(outcome="won"),
        broken_record(steps=[5]),
        broken_record(final_prompt_ids={"reuse": 5, "new": []}),
        broken_record(prompt_ids={"reuse": 1, "new": [1]}),
        broken_record(prompt_ids={"reuse": -1, "new": [1]}),
        broken_record(response_ids=[3.5, 4]),
        broken_record(response_ids=[[3, 4]]),
        broken_record(response_ids=[3, 2**40]),
        broken_record(logprobs=[-0.5]),
        broken_record(logprobs=[None, None]),
        broken_record(values={"float64": ""}),
        broken_record(values={"float16": "A"}),
        broken_record(values={"float16": "AAA="}),
        broken_record(value_targets={}),
        broken_record(advantages="0"),
        broken_record(account={"outcome": {"amount": 1.0}}),
    ],
    ids=lambda line: str(line)[:24],
)
def test_a_corrupt_line_is_named_with_its_file(tmp_path, line):
    path = tmp_path / "rl_000003.jsonl.gz"
    good = json.dumps(to_json(trajectory())).encode()
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(gzip.compress(b"\n".join([good, good, bad, good])))
    read = []
    with pytest.raises(ValueError, match=r"rl_000003\.jsonl\.gz, line 3: not a trajectory .*delete or repair"):
        read.extend(read_jsonl(path))
    assert len(read) == 2


def test_a_file_that_is_cut_or_no_gzip_is_named(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    # Incompressible contents, so that lines end within the compressed bytes.
    rng = np.random.default_rng(0)
    write_jsonl(path, [trajectory(responses=(rng.integers(0, 2**31, 20_000).tolist(),)) for _ in range(3)])
    whole = path.read_bytes()

    def error_of(data):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"t\.jsonl\.gz, line \d: not a trajectory") as caught:
            list(read_jsonl(path))
        return str(caught.value)

    assert "line 1" in error_of(whole[: len(whole) // 6])
    assert "line 2" in error_of(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    middle = len(whole) // 2
    damaged[middle : middle + 64] = bytes(64)
    error_of(bytes(damaged))
    error_of(b"plain text\n")


def test_a_missing_file_is_reported_as_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_jsonl(tmp_path / "none.jsonl.gz"))


def test_a_budget_must_leave_room_for_a_prompt():
    for field in BUDGET:
        with pytest.raises(UserError, match=rf"budget\.{field} is 0; it must be greater than or equal to 1"):
            from_section(Budget, "budget", BUDGET | {field: 0})
    Budget(**BUDGET | {"response_tokens": 63})
    with pytest.raises(ValueError, match=r"response_tokens \(64\) leaves no room"):
        Budget(**BUDGET | {"response_tokens": 64})
    with pytest.raises(UserError, match="on_truncated_response is 'stop'; it must be 'end' or 'continue'"):
        from_section(Budget, "budget", BUDGET | {"on_truncated_response": "stop"})


def test_fault_9_every_outcome_says_what_becomes_of_it():
    failures = {Outcome.TOOL_FAILURE, Outcome.ENV_FAILURE, Outcome.ENGINE_FAILURE, Outcome.STALE}
    truncated = {Outcome.MAX_STEPS, Outcome.CONTEXT_OVERFLOW, Outcome.TIME_LIMIT, Outcome.RESPONSE_TRUNCATED}
    assert set(POLICIES) == set(Outcome)
    assert {outcome for outcome in Outcome if POLICIES[outcome].training == "drop"} == failures
    assert {outcome for outcome in Outcome if POLICIES[outcome].reward == "none"} == failures
    assert {outcome for outcome in Outcome if POLICIES[outcome].reward == "zero"} == {Outcome.FAILURE_AS_ZERO}
    assert {outcome for outcome in Outcome if POLICIES[outcome].bootstrap} == truncated


def test_total_reward_counts_what_the_outcome_lets_count():
    parts = {"prompts": ([1], [2]), "responses": ([3], [4])}
    assert trajectory(**parts, rewards=[0.5, -2.0]).total_reward == -1.5
    assert trajectory(**parts, rewards=[0.5, -2.0], outcome=Outcome.MAX_STEPS).total_reward == -1.5
    assert trajectory(**parts, rewards=[0.5, None], outcome=Outcome.TOOL_FAILURE).total_reward == 0.0
    assert trajectory(**parts, rewards=[0.5, None], outcome=Outcome.FAILURE_AS_ZERO).total_reward == 0.0
    assert trajectory(prompts=(), responses=(), rewards=[], outcome=Outcome.CONTEXT_OVERFLOW).total_reward == 0.0


def test_fault_9_a_missing_reward_is_never_zero():
    for outcome in (o for o in Outcome if POLICIES[o].reward == "use"):
        unknown = trajectory(
            prompts=([1], [2], [3]), responses=([3], [4], [5]), rewards=[1.0, None, None], outcome=outcome
        )
        with pytest.raises(ValueError, match=rf"train/0/0 \({outcome}\): steps \[1, 2\] have no reward"):
            _ = unknown.total_reward
