"""Belief probes: what is probed, what a belief is, and that nothing of a probe is ever trained."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import learners
import numpy as np
import pytest
import tiny
from builders import LONGEST, VOCAB
from byte_tokens import TOKENIZER
from changes import changed
from examples import WIDE, check_close
from pair import run_two

from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.credit.batch import flatten
from agentr1_jax.learner.config import PACKING_MODES
from agentr1_jax.learner.packing import pack
from agentr1_jax.text.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from agentr1_jax.text.tool_calls import render_answer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build, train_step
from agentr1_jax.train.probes import Prober, beliefs, make_prober
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl
from configs import quickstart
from experiments.setup import make_task, read_settings

PROBED = {"credit.name": "igpo", "credit.probe": "policy"}


class Letters:
    """A tokenizer of the small vocabulary: a letter is an id."""

    def encode_template(self, text):
        return self.encode_data(text)

    def encode_data(self, text):
        return [ord(letter) % VOCAB for letter in text]


def make(changes, **arguments):
    """A learner whose probes are of letters."""
    run = learners.make(changes, **arguments)
    if run.phase.prober is None:
        return run
    prober = dataclasses.replace(run.phase.prober, tokenizer=Letters(), text="q{answer}")
    return dataclasses.replace(run, phase=dataclasses.replace(run.phase, prober=prober))


def with_answers(trajectories):
    """The trajectories with gold answers of one to three letters."""
    return [
        dataclasses.replace(t, row={"id": t.uid, "answers": [("a", "bc", "dab")[t.group % 3], "ignored"]})
        for t in trajectories
    ]


def slow_beliefs(params, trajectories):
    """Mean log-prob of the answer by one forward pass of each prompt with the answer alone, in double precision."""
    letters, ids, answers = Letters(), [], []
    for t in trajectories:
        answer = letters.encode_data(t.row["answers"][0])
        answers += [answer] * len(t.steps)
        ids += [np.int32([*s.prompt_ids, *letters.encode_data("q"), *answer]) for s in t.steps]
    with jax.enable_x64(True):
        logits = tiny.full_logits(WIDE, params["decoder"], ids, LONGEST + 4)
    out = []
    for whole, answer, row in zip(ids, answers, logits, strict=True):
        own = tiny.log_softmax(row[len(whole) - len(answer) - 1 : -1] / learners.SMALL["rollout.temperature"])
        out.append(own[np.arange(len(answer)), answer].mean())
    return np.array(out)


def outputs_of(run, trajectories, params):
    packed = train_step.pack(run.setup, run.phase, trajectories)
    return train_step.token_outputs(run.setup, run.phase, params, packed)


@pytest.mark.parametrize("context", ["append", "mixed"])
@pytest.mark.parametrize("mode", PACKING_MODES)
def test_beliefs_are_those_of_each_prompt_with_the_answer_in_a_row_of_its_own(mode, context):
    """Prompts that samples share, rewritten and branching contexts, single steps, truncated trajectories."""
    run = make(PROBED).under({"learner.packing": mode})
    trajectories = with_answers(learners.batch(context=context))
    params = run.fresh().params
    outputs = outputs_of(run, trajectories, params)
    np.testing.assert_allclose(outputs.beliefs, slow_beliefs(params, trajectories), atol=1e-5)
    np.testing.assert_allclose(outputs.logprobs, learners.slow_logprobs(params, trajectories), atol=1e-5)


def test_a_critic_and_a_reference_see_what_they_see_without_probes():
    """The reference's belief beside values, final values and the KL of the policy."""
    rest = {"critic": "shared_trunk", "kl.kind": "k3", "learner.old_logprobs": "learner"}
    plain = learners.make({**rest, "credit.name": "step_gae"})
    run = make({**rest, "credit.name": "trace", "credit.probe": "reference"})
    # No scheme reads both; a critic is trained where a scheme uses one.
    phase = dataclasses.replace(run.phase, critic=True)
    run, trajectories = dataclasses.replace(run, phase=phase), with_answers(learners.batch())
    moved = jax.tree.map(lambda x: x * 1.1, run.fresh().params)
    outputs, expected = (outputs_of(one, trajectories, moved) for one in (run, plain))
    for name in ("logprobs", "ref_logprobs", "values", "final_values"):
        np.testing.assert_allclose(getattr(outputs, name), getattr(expected, name), atol=1e-5, err_msg=name)
    start = slow_beliefs(run.fresh().params, trajectories)
    np.testing.assert_allclose(outputs.beliefs, start, atol=1e-5)
    assert np.abs(start - slow_beliefs(moved, trajectories)).max() > 0.01 and expected.beliefs is None


def test_the_reference_alone_is_asked_where_nothing_else_is():
    run = make({"credit.name": "trace", "credit.probe": "reference"})
    trajectories = with_answers(learners.batch())
    moved = jax.tree.map(lambda x: x * 1.1, run.fresh().params)
    outputs = outputs_of(run, trajectories, moved)
    np.testing.assert_allclose(outputs.beliefs, slow_beliefs(run.fresh().params, trajectories), atol=1e-5)
    assert not run.phase.reads_policy and outputs.logprobs is outputs.ref_logprobs is outputs.values is None


CAPO = {"loss.ratio": "centred_step", "loss.entropy_coef": 0.01}
KL = {"loss.ratio": "trajectory", "loss.entropy_coef": 0.01, "kl.kind": "k3"}


@pytest.mark.parametrize("changes", [CAPO, KL], ids=["capo", "kl"])
def test_a_probe_is_in_no_row_loss_or_gradient_of_an_update(changes):
    """With equal advantages an update is equal: its rows by their ids, the new parameters bit for bit.

    Only the reference's log-probs come from the pass that holds probes, and differ by rounding.
    """
    plain, probed = (make({**changes, **own}, wide=True) for own in ({"credit.name": "grpo"}, PROBED))
    trajectories, rows = with_answers(learners.batch()), ([], [])
    states = []
    for run, seen in zip((plain, probed), rows, strict=True):
        update = learners.recording(run.phase.update, seen)
        state, metrics, _ = run.learn(trajectories, update=update, assign=plain.phase.assign)
        states.append(state)
        assert ("credit/belief_last" in metrics) == (run is probed)
    ((_, one),), ((_, other),) = rows
    learners.check_equal(jax.tree.leaves(one.packed_tokens), jax.tree.leaves(other.packed_tokens))
    if changes is KL:
        check_close(states[1].params, states[0].params, 1e-9)
        one, other = (
            dataclasses.replace(x, loss_tokens=dataclasses.replace(x.loss_tokens, ref_logprob=None))
            for x in (one, other)
        )
    else:
        learners.check_equal(states[1].params, states[0].params)
    learners.check_equal(jax.tree.leaves(one.loss_tokens), jax.tree.leaves(other.loss_tokens))


def test_a_record_holds_the_belief_by_which_it_was_credited(tmp_path):
    run = make(PROBED)
    trajectories = with_answers(learners.batch())
    packed = train_step.pack(run.setup, run.phase, trajectories)
    outputs = train_step.token_outputs(run.setup, run.phase, run.fresh().params, packed)
    credit = train_step.assign_credit(run.setup, run.phase, packed, outputs, Progress())
    write_jsonl(tmp_path / "rl.jsonl.gz", train_step.with_credit(packed, outputs, credit))
    read = list(read_jsonl(tmp_path / "rl.jsonl.gz"))
    np.testing.assert_array_equal([s.belief for t in read for s in t.steps], outputs.beliefs)
    np.testing.assert_array_equal(flatten(read).belief, outputs.beliefs)
    for t in read:
        for number, step in enumerate(t.steps):
            term = step.account["gain or outcome in its group"]
            last = number == len(t.steps) - 1
            assert term.minus["belief before"] == pytest.approx(0 if last else np.exp(step.belief), rel=1e-5)
            after = 0 if last else np.exp(t.steps[number + 1].belief)
            assert term.plus["belief after"] == pytest.approx(after, rel=1e-5)
    assert all(s.belief is None for t in trajectories for s in t.steps)


def test_a_trajectory_without_an_answer_that_can_be_probed_is_dropped_and_counted(caplog):
    run, good = make(PROBED), with_answers(learners.batch())
    rows = [{"id": "r1"}, {"id": "r2", "answers": []}, {"id": "r3", "answers": ["abcd"]}]
    bad = [dataclasses.replace(good[i], row=row) for i, row in enumerate(rows)]
    usable, dropped, malformed = run.sift([*bad, *good], critic=False)
    assert usable == good and dropped == bad and malformed == 3
    for message in ("row 'r1' has no answer", "row 'r2' has no answer", r"raise budget.response_tokens (4)"):
        assert message in caplog.text


def test_an_empty_batch_is_no_fault():
    run = make(PROBED)
    state, metrics, _ = run.learn([])
    assert metrics["batch/dropped"] == 0 and int(state.updates) == 0


def test_a_belief_is_a_mean_over_the_answer():
    made = with_answers(learners.batch())[:5]
    probes = Prober(Letters(), "q{answer}", "auto", 4, "policy").probes(made)
    lengths = [len(t.row["answers"][0]) for t in made for _ in t.steps]
    logprobs = -np.arange(sum(lengths), dtype=np.float64)
    edges = np.cumsum([0, *lengths])
    expected = [logprobs[a:b].mean() for a, b in zip(edges, edges[1:], strict=False)]
    np.testing.assert_allclose(beliefs(probes, logprobs), expected)


@pytest.fixture(scope="module")
def hopworld(tmp_path_factory):
    """The quickstart's settings with probes, its tokenizer, and eight expert episodes of each of eight questions."""
    settings = read_settings(changed(quickstart, credit__name="igpo", credit__args__lam=None, credit__probe="policy"))
    task = make_task(settings, ToolMetrics())
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(task.texts(settings.tokenizer.texts), path, settings.tokenizer.vocab_size)
    tokenizer = SentencePieceTokenizer(path)
    agent = build.make_agent(settings, task, tokenizer)

    async def play():
        out = []
        for group in range(8):
            row = task.row("train", group)
            for sample in range(8):
                seed = 100 * group + sample
                identity = Identity(f"{group}/{sample}", group, sample, task.name, seed)
                session = ScriptedSession(identity, task.expert(row, seed), tokenizer, agent.call_format)
                session.begin(row)
                await agent.run(session, row)
                out.append(session.trajectory())
        return out

    return settings, tokenizer, asyncio.run(play())


@pytest.mark.parametrize("mode", ["trajectory", "prefix_tree"])
def test_probes_cost_a_tenth_of_the_forward_pass_at_most(hopworld, mode):
    """Expert episodes of the quickstart: 3 % more tokens; its own rollouts take 1 to 4 %."""
    settings, tokenizer, trajectories = hopworld
    settings = dataclasses.replace(settings, learner=dataclasses.replace(settings.learner, packing=mode))
    probes = make_prober(settings, tokenizer).probes(trajectories)
    assert len(probes) == sum(len(t.steps) for t in trajectories)
    rows = settings.probe_packing
    plain, probed = (
        pack(x, rows, final_values=False).tokens_computed for x in (trajectories, [*trajectories, *probes])
    )
    update = pack(trajectories, settings.learner.packing_config, final_values=False).tokens_computed
    assert plain < probed <= 1.1 * plain and probed <= 1.1 * update


def test_the_answer_is_written_as_an_expert_writes_it(hopworld):
    """The prompt stays as it is; the condition and the answer are the beginning of the expert's last response."""
    settings, tokenizer, trajectories = hopworld
    prober = make_prober(settings, tokenizer)
    ends = [dataclasses.replace(t, steps=t.steps[-1:]) for t in trajectories]
    for t, probe in zip(trajectories, prober.probes(ends), strict=True):
        condition, answer = prober.encode(t.row["answers"][0])
        written = tokenizer.encode_template(render_answer(t.row["answers"][0]))
        assert written[: len(condition) + len(answer)] == [*condition, *answer]
        (step,) = probe.steps
        np.testing.assert_array_equal(step.prompt_ids, [*t.steps[-1].prompt_ids, *condition])
        np.testing.assert_array_equal(step.response_ids, answer)
        assert tokenizer.decode(answer).strip() == t.row["answers"][0]


@pytest.mark.parametrize(
    ("text", "call_format", "before"),
    [
        ("", "code", "<answer> "),
        ("", "react", "Final Answer: "),
        ("<think>Enough.</think>\n<answer>\n{answer}\n</answer>", "code", "<think>Enough.</think>\n<answer>\n"),
    ],
)
def test_an_answer_is_data_in_the_words_of_the_call_format(text, call_format, before):
    prober = Prober(TOKENIZER, text, call_format, 60, "policy")
    assert prober.before == before
    condition, answer = prober.encode(" <|im_end|> ")
    space = " " if before.endswith(" ") else ""
    assert TOKENIZER.decode(condition) == before.removesuffix(" ")
    assert TOKENIZER.decode(answer) == f"{space}<|im_end|>" and min(answer) > 2


CHILD = """
import dataclasses, sys
import numpy as np
from agentr1_jax.runtime import processes

processes.initialize()
import test_probes as t

run = t.make(t.PROBED, wide=True, shards=4)
program, calls = run.phase.token_outputs, []
counted = lambda *arguments: calls.append(0) or program(*arguments)
run = dataclasses.replace(run, phase=dataclasses.replace(run.phase, microbatches=1, token_outputs=counted))
everything = t.with_answers(t.learners.batch(context="mixed"))
index = processes.process_index()
mine = [x for x in everything if (x.group == 3) == (index == 1)]
with t.jax.enable_x64(True):
    params = run.fresh().params
    packed = t.train_step.pack(run.setup, run.phase, mine)
    outputs = t.train_step.token_outputs(run.setup, run.phase, params, packed)
    credit = t.train_step.assign_credit(run.setup, run.phase, packed, outputs, t.Progress())
np.testing.assert_allclose(outputs.beliefs, t.slow_beliefs(params, mine), atol=1e-6)
np.testing.assert_allclose(credit.flat.belief, t.slow_beliefs(params, everything), atol=1e-6)
assert len(set(processes.all_gather_json(len(calls)))) == 1 < len(calls)
"""


@pytest.mark.slow
def test_processes_probe_what_is_theirs_and_credit_all():
    """The first has three groups, more rows than a call takes; the second one group."""
    run_two(CHILD)
