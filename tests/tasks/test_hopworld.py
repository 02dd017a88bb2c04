"""HopWorld: worlds, questions, the expert, and the bounds that make it a test of multi-hop search."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re

import numpy as np
import pytest

from agentr1_jax.envs.base import Action
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.hopworld.questions import RELATIONS
from agentr1_jax.tasks.hopworld.task import NO_FLAWS
from agentr1_jax.tasks.hopworld.world import POOLS, name_split, retriever, world
from agentr1_jax.trajectory import Outcome
from configs import quickstart

KINDS = {"bridge2": 2, "bridge3": 3, "comparison": 3, "yes_no": 2}
PRACTICE_KINDS = {"lookup": 1, "direct_comparison": 2, "direct_yes_no": 1, "recital": 0, "older_of": 0, "before": 0}
QUICKSTART = quickstart.get_config()
WORDS = [word for pool in POOLS for word in pool]
TASK = make_task("hopworld", top_k=QUICKSTART.task.hopworld.top_k)
PERFECT = make_task("hopworld", top_k=QUICKSTART.task.hopworld.top_k, flaws=NO_FLAWS)


@pytest.fixture(scope="module")
def rows():
    return [TASK.row("eval", i) for i in range(480)]


def play(task, row, seed=0, max_steps=QUICKSTART.budget.max_steps):
    """Transitions and texts of the expert's episode on a row, and its exact match."""

    async def run():
        env = task.env()
        await env.reset(row, seed)
        expert, observed, done, texts = task.expert(row, seed), None, [], []
        for _ in range(max_steps):
            texts.append(expert(observed))
            done.append(await env.step(Action(np.zeros(0, np.int32), texts[-1])))
            if done[-1].outcome:
                break
            observed = done[-1].observation.text
        return done, texts, env.truncate()["em"]

    return asyncio.run(run())


def mean_em(task, split, count):
    """Exact match by kind and over all rows, of the expert."""
    scores = collections.defaultdict(list)
    for i in range(count):
        row = task.row(split, i)
        em = play(task, row, seed=i)[2]
        scores[row["kind"]].append(em)
        scores["all"].append(em)
    return {kind: float(np.mean(values)) for kind, values in scores.items()}


def test_rows_depend_on_split_and_index_alone():
    before = [TASK.row("train", i) for i in (0, 17, 40)]
    world.cache_clear()
    retriever.cache_clear()
    assert [TASK.row("train", i) for i in (40, 17, 0)] == before[::-1]
    assert TASK.row("train", 0)["question"] != TASK.row("train", 16)["question"]
    few = make_task("hopworld", questions_per_world=4)
    assert few.row("train", 3)["question"] == TASK.row("train", 3)["question"]
    assert few.row("train", 4)["world"] == TASK.row("train", 16)["world"]


def test_a_world_has_at_least_300_passages_and_pages_that_state_its_facts():
    w = world("train/3")
    assert len(w.passages) >= 300
    assert len({p.id for p in w.passages}) == len(w.passages)
    for (subject, _), value in w.facts.items():
        assert w.pages[subject].title == subject
        assert w.pages[subject].text.startswith(f"{subject}, ")
        assert re.search(rf" {re.escape(value)}\b", w.pages[subject].text.join("  ")), (subject, value)


def test_no_combination_of_training_occurs_in_evaluation():
    def combinations(split, count):
        groups = [world(f"{split}/{i}").members for i in range(count)]
        return {name for g in groups for kind, ns in g.items() for name in ns if kind != "country"}

    training = combinations("train", 20) | combinations("practice", 20)
    assert len(training) > 1000
    assert not training & combinations("eval", 20)
    assert not training & combinations("dev", 20)


def test_dev_and_eval_are_different_worlds():
    questions = {split: {TASK.row(split, i)["question"] for i in range(320)} for split in ("dev", "eval")}
    assert len(questions["dev"] & questions["eval"]) <= 16  # Pools are shared, so a question can come again by chance.
    for number in range(20):
        assert world(f"dev/{number}").facts != world(f"eval/{number}").facts


def test_words_are_distinct_and_belong_to_one_pool():
    assert len({word.lower() for word in WORDS}) == len(WORDS)
    assert all(word.isascii() and word.isalpha() and word.istitle() for word in WORDS)


def test_every_mention_of_a_name_follows_a_space_and_no_pool_word_is_prose():
    texts = TASK.texts(2500)
    names_used, mentions = set(WORDS), collections.Counter()
    joined = "\n".join(texts)
    for before, word in re.findall(r"(.?)\b([A-Z][a-z]+)", joined):
        if word in names_used:
            assert before == " ", word
            mentions[word] += 1
    assert min(mentions[word] for word in WORDS) >= 5
    distinct = set(re.findall(r"[A-Za-z]+|\d+", joined))
    assert len(distinct) <= 550
    assert not {word.lower() for word in WORDS} & distinct


def test_shares_and_hops_of_kinds(rows):
    shares = collections.Counter(row["kind"] for row in rows)
    assert set(shares) == set(KINDS)
    assert all(row["hops"] == KINDS[row["kind"]] == len(set(row["gold_ids"])) for row in rows)
    assert sum(row["hops"] == 3 for row in rows) / len(rows) >= 0.30
    assert shares["yes_no"] / len(rows) <= 0.15
    assert shares["comparison"] / len(rows) >= 0.10
    assert len({(row["world"], row["question"]) for row in rows}) == len(rows)


def test_one_search_with_the_question_does_not_do(rows):
    """Share with all gold passages in the top 5, plus chance (1/2 for comparison and yes/no) on the rest."""
    values = []
    for row in rows:
        (hits,) = retriever(row["world"]).search([row["question"]], top_k=5)
        found = {hit.passage.id for hit in hits}
        chance = 0.5 if row["kind"] in ("comparison", "yes_no") else 0.0
        values.append(1.0 if set(row["gold_ids"]) <= found else chance)
    assert np.mean(values) <= 0.20


def test_answers_follow_from_the_facts(rows):
    for row in rows:
        facts = world(row["world"]).facts
        assert all(facts[hop["subject"], hop["relation"]] == hop["value"] for hop in row["plan"])
        (answer,) = row["answers"]
        if row["kind"] in ("bridge2", "bridge3"):
            links = zip(row["plan"], row["plan"][1:], strict=False)
            assert all(one["value"] == other["subject"] for one, other in links)
            assert answer == row["plan"][-1]["value"]
            assert answer not in row["question"] and answer not in [hop["hasty"] for hop in row["plan"]]
        elif row["kind"] == "yes_no":
            born, claimed = int(row["plan"][-1]["value"]), int(row["question"][-5:-1])
            assert (answer == "yes") == (born < claimed) and abs(born - claimed) >= 4
            assert row["thought"] == f" {born}, {claimed}."
        else:
            years = {h["subject"]: int(h["value"]) for h in row["plan"] if h["relation"] == "birth_year"}
            assert answer == min(years, key=years.get)
            assert max(years.values()) - min(years.values()) >= 4
            told = ", ".join(f"{person} {year}" for person, year in years.items())
            assert row["thought"] == f" {told}: {'first' if answer == next(iter(years)) else 'second'}."


def test_guesses_are_worth_a_half(rows):
    answers = [row["answers"][0] for row in rows if row["kind"] == "yes_no"]
    assert 0.4 < answers.count("yes") / len(answers) < 0.6
    compared = [row for row in rows if row["kind"] == "comparison"]
    first = [next(h["hasty"] for h in row["plan"] if h["hasty"]) == row["answers"][0] for row in compared]
    assert 0.4 < np.mean(first) < 0.6


def test_the_perfect_expert_answers_everything():
    scores = mean_em(PERFECT, "eval", 160)
    assert set(scores) == {*KINDS, "all"} and min(scores.values()) >= 0.99
    assert mean_em(PERFECT, "train", 64)["all"] >= 0.99


def test_the_flawed_expert_leaves_room_to_learn():
    scores = mean_em(TASK, "eval", 300)
    assert 0.40 < scores["all"] < 0.55
    assert scores["bridge3"] < scores["bridge2"] < 0.60


def test_practice_asks_for_what_the_question_names_and_its_expert_never_errs():
    assert mean_em(TASK, "practice", 100)["all"] == 1.0
    rows = [TASK.row("practice", i) for i in range(300)]
    assert {row["kind"] for row in rows} == set(PRACTICE_KINDS)
    for row in rows:
        assert row["hops"] == len(row["plan"]) == PRACTICE_KINDS[row["kind"]]
        assert all(hop["subject"] in row["question"] for hop in row["plan"])


def test_practice_without_a_lookup_can_be_answered_from_the_question():
    for row in (TASK.row("practice", i) for i in range(300)):
        question, (answer,) = row["question"], row["answers"]
        if row["kind"] == "recital":
            assert question == f"Repeat {answer}."
            words = answer.split()
            pairs = {f"{one} {other}" for one, other in zip(words, words[1:], strict=False)}
            assert {name_split(pair) for pair in pairs} == {"train"}
        elif row["kind"] == "older_of":
            years = {person: int(year) for person, year in re.findall(r"(\w+ \w+) (\d{4})", question)}
            assert len(years) == 2 and answer == min(years, key=years.get)
        elif row["kind"] == "before":
            one, other = map(int, re.fullmatch(r"Is (\d{4}) before (\d{4})\?", question).groups())
            assert answer == ("yes" if one < other else "no")


def test_other_seeds_make_other_decisions():
    row = next(r for i in range(99) if (r := TASK.row("train", i))["kind"] == "bridge3")
    assert len({tuple(play(TASK, row, seed=s)[1]) for s in range(30)}) > 3


@pytest.mark.parametrize("flaw", [field.name for field in dataclasses.fields(NO_FLAWS)])
def test_each_flaw_is_a_decision_that_shows(flaw):
    task = make_task("hopworld", flaws=dataclasses.replace(NO_FLAWS, **{flaw: 1.0}))
    row = next(r for i in range(99) if (r := task.row("train", i))["kind"] == "bridge3")
    steps, texts, em = play(task, row, max_steps=12)
    perfect = play(PERFECT, row)[1]
    if flaw == "bridge_answer":
        assert em == 0 and texts == [perfect[0], f"<answer> {row['plan'][0]['value']} </answer>"]
    else:
        assert em == 1 and len(texts) > len(perfect)
    errors = [kind for step in steps for kind in step.info["errors"]]
    assert errors == (["bad_json"] * 3 if flaw == "malformed_call" else [])
    assert (sum(s.raw_reward_parts["repeated_query"] for s in steps) == 3) == (flaw == "repeat_query")
    skipped = RELATIONS[row["plan"][1]["relation"]].query.format(row["plan"][0]["subject"])
    assert any(skipped in text for text in texts) == (flaw == "skip_hop")


def test_an_answer_of_the_expert_is_never_random(rows):
    """It is the right one or one of the hasty ones, all of which it has read."""
    for i, row in enumerate(rows[:200]):
        steps, texts, em = play(TASK, row, seed=i, max_steps=12)
        assert steps[-1].outcome is Outcome.ANSWERED
        thought, answer = re.fullmatch(r"(.*)<answer> (.+) </answer>", texts[-1]).groups()
        assert (thought, answer) in [(row["thought"], row["answers"][0]), *(("", hop["hasty"]) for hop in row["plan"])]


def test_the_expert_reads_only_what_it_is_shown():
    row = next(r for i in range(99) if (r := PERFECT.row("eval", i))["kind"] == "bridge2")
    expert = PERFECT.expert(row, 0)
    said = [expert(None), expert("- Nothing: of use."), expert("No results.")]
    assert row["plan"][0]["subject"] in said[0] and row["plan"][0]["subject"] in said[1] and said[0] != said[1]
    assert said[2] == "<answer> unknown </answer>" == expert("again")


def test_rewards_of_a_perfect_episode():
    row = next(r for i in range(99) if (r := PERFECT.row("eval", i))["kind"] == "bridge3")
    steps, _, _ = play(PERFECT, row)
    total = collections.Counter()
    for step in steps:
        total.update(step.reward_parts)
    paid = {"answer": 1.0, "f1": 0.0, "format": 0.0, "gold_passage": 0.3, "repeated_query": 0.0}
    assert total == pytest.approx(paid)
    assert len({step.observation.state_key for step in steps[:-1]}) == 3


def test_texts_are_of_training_worlds_and_as_many_as_asked():
    texts = TASK.texts(300)
    assert len(texts) == 300 and texts == TASK.texts(300)
    joined = " ".join(TASK.texts(1000))
    kept = {n for i in range(5) for k, ns in world(f"eval/{i}").members.items() if k != "country" for n in ns}
    assert not [name for name in kept if f" {name}" in joined]
