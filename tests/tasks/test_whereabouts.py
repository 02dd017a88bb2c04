"""Whereabouts: its rows, how summaries are judged, its expert under every context rule, and what is refused."""

from __future__ import annotations

import asyncio
import collections

import numpy as np
import pytest
from changes import changed
from configured import configured_task
from letters import TOKENIZER

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.envs.base import Action
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.whereabouts import PLACES, facts_text, last_places, report_text, score_summary
from agentr1_jax.text.chat import chat_format
from agentr1_jax.trajectory import Budget, Outcome
from configs import whereabouts

TASK = make_task("whereabouts")
PERFECT = make_task("whereabouts", forgets=0.0, mistakes=0.0)
LIMITS = {"response_tokens": 200, "observation_tokens": 400, "context_tokens": 9000, "trajectory_tokens": 90_000}
REPORTS = [{"Ann": "mill", "Bob": "barn"}, {"Cid": "lake", "Ann": "pond"}]


class Words:
    """A tokenizer for which text is bytes: what a summary says must come back whole."""

    name, added = "words", {"<|im_start|>": 256, "<|im_end|>": 257}
    stop_id, stop_ids, pad_id, vocab_size = 257, (257,), 258, 259

    def encode_data(self, text):
        return list(text.encode())

    def encode_template(self, text):
        out, rest = [], text
        while rest:
            tag = next((tag for tag in self.added if rest.startswith(tag)), None)
            out += [self.added[tag]] if tag else [*rest[0].encode()]
            rest = rest[len(tag) if tag else 1 :]
        return out

    def decode(self, ids):
        names = {i: tag for tag, i in self.added.items()}
        return "".join(names.get(int(i)) or chr(int(i)) for i in ids if int(i) < 258)

    render_chat = TOKENIZER.render_chat


def played(task, row, rule):
    words = Words()
    agent = EnvLoop(
        task.env, words, chat_format(words), context_rule(rule), Budget(max_steps=11, **LIMITS), summary_tokens=200
    )
    session = ScriptedSession(Identity("u", 0, 0, "whereabouts", 0), task.expert(row, 0), words)
    asyncio.run(agent.run(session, row))
    return session.trajectory()


def test_the_answer_follows_from_the_reports():
    task = TASK
    rows = [task.row("train", i) for i in range(300)]
    assert task.row("eval", 5)["reports"] != rows[5]["reports"]
    for row in rows:
        moves = [(who, place) for report in row["reports"] for who, place in report.items()]
        assert dict(moves)[row["asked"]] == row["answers"][0] in PLACES[:8]
        last = max(number for number, report in enumerate(row["reports"]) if row["asked"] in report)
        assert row["age"] == 9 - last and len(row["reports"]) == len(row["remarks"]) == 10
    ages = collections.Counter(task.row("train", i)["age"] for i in range(3000))
    assert set(ages) == set(range(10)) and max(ages.values()) < 1.4 * min(ages.values())


def test_what_is_known_is_the_newest_of_each():
    assert last_places(REPORTS) == {"Bob": "barn", "Cid": "lake", "Ann": "pond"}
    assert facts_text(last_places(REPORTS)) == "Bob barn, Cid lake, Ann pond" and facts_text({}) == ""
    row = {"reports": [*REPORTS, {}], "remarks": ["It rains."] * 3}
    assert (
        report_text(row, 1) == "It rains. Cid to lake, Ann to pond."
        and report_text(row, 2) == "It rains. Nobody moves."
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Bob barn, Cid lake, Ann pond", 1.0),
        ("Ann pond Cid lake Bob barn.", 1.0),
        ("Bob barn, Cid lake", 2 / 3),
        ("Bob barn, Cid lake, Ann mill", 1 / 3),
        ("Bob barn, Cid lake, Ann mill, Ann pond", 1.0),
        ("Bob barn, Dan hill", 0.0),
        ("Bob mill, Cid mill, Ann mill", -1.0),
        ("go on", 0.0),
        ("", 0.0),
    ],
)
def test_a_summary_is_judged_by_who_is_where(text, score):
    assert score_summary(text, last_places(REPORTS)) == pytest.approx(score)


RULES = ("append", "window(2)", "token_budget(300)", "evidence", "strip_thinking", "summary(3)")


@pytest.mark.parametrize("rule", RULES)
def test_the_expert_answers_under_every_rule(rule):
    for index in range(2):
        t = played(PERFECT, PERFECT.row("train", index), rule)
        summaries = [s for s in t.steps if s.info.get("summary")]
        assert t.outcome is Outcome.ANSWERED and t.metrics["em"] == 1 and len(t.steps) - len(summaries) == 11
        assert t.total_reward == pytest.approx(1 + 0.2 * len(summaries))
        assert len(summaries) == (3 if rule == "summary(3)" else 0) and t.metrics.get("summary_score", 1) == 1


def test_what_a_context_rule_keeps_of_what_is_asked_for():
    """Whether the last prompt names where the one who is asked for went last."""
    rows = [PERFECT.row("train", i) for i in range(30)]

    def shows(rule, row):
        words = Words()
        prompt = words.decode(played(PERFECT, row, rule).steps[-1].prompt_ids)
        return f"{row['asked']} to {row['answers'][0]}" in prompt or f"{row['asked']} {row['answers'][0]}" in prompt

    rules = ("append", "window(3)", "evidence", "summary(3)")
    share = {rule: np.mean([shows(rule, row) for row in rows]) for rule in rules}
    assert share["append"] == share["evidence"] == share["summary(3)"] == 1 and 0.2 < share["window(3)"] < 0.7


def test_the_expert_forgets_and_guesses_at_its_rates():
    def mean(task, metric):
        return np.mean([played(task, task.row("train", i), "summary(3)").metrics[metric] for i in range(25)])

    assert mean(make_task("whereabouts", forgets=1.0, mistakes=0.0), "summary_score") == 0
    assert 0.4 < mean(make_task("whereabouts", forgets=0.5), "summary_score") < 0.6
    assert mean(make_task("whereabouts", mistakes=1.0), "em") < 0.5


def test_answers_may_end_with_a_stop_and_nothing_else_counts():
    async def answered(text):
        env, row = TASK.env(), TASK.row("train", 0)
        await env.reset(row, 0)
        for _ in range(10):
            transition = await env.step(Action(np.zeros(0, np.int32), "go on"))
        assert transition.observation.text == f"Where is {row['asked']}?"
        said = text.format(row["asked"], row["answers"][0])
        return (await env.step(Action(np.zeros(0, np.int32), said))).metrics["em"]

    right = ("{} {}", " {} {}. ")
    wrong = ("{1}", "{} is in the {}", "{0} {1}, {0} {1}", "Zoe {1}", "{} nowhere", "")
    assert [asyncio.run(answered(text)) for text in right] == [1, 1]
    assert [asyncio.run(answered(text)) for text in wrong] == [0] * 6


def test_a_question_beyond_the_last_step_is_refused():
    config = changed(whereabouts, task__whereabouts__reports=8, budget__max_steps=8)
    with pytest.raises(UserError, match=r"its question comes at step 9 .* beyond budget\.max_steps \(8\); raise it"):
        configured_task(config)
