"""The figures of an evaluation, against a slow computation of their own from the lines of its files.

Nothing of the library is used in `slow_*`: they read JSON, decode bytes, and follow the definitions: SQuAD's
normalisation and EM, HotpotQA's F1, pass@k by trying all choices of k samples, recall by the passages shown in results.
"""

from __future__ import annotations

import asyncio
import glob
import gzip
import itertools
import json
import math
import random
import string

import numpy as np
import pytest
from byte_tokens import PASSAGES, TOKENIZER, Broken, agent
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.envs.rewards import exact_match, f1
from agentr1_jax.errors import UserError
from agentr1_jax.report.evaluation import markdown, quality_rows
from agentr1_jax.report.figures import (
    Score,
    figures,
    intervals,
    pass_at_k,
    question_values,
    read_scores,
    score,
    write_scores,
)
from agentr1_jax.report.statistics import two_stage_interval
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.trajectory import Budget, Outcome
from agentr1_jax.trajectory_io import write_jsonl
from experiments.evaluation import chunks

ANSWERS = [
    (["The Glass-Harbor!"], ["glassharbor", "the glass harbor", "a GLASSHARBOR.", "glass"]),
    (["yes"], ["Yes.", "yes it is", "no", "the yes"]),
    (["no", "never"], ["no!", "Never", "no never", "yes"]),
    (["1,942"], ["1942", "1 942", "1942.0", "in 1942"]),
    (["Ōe Kenzaburō"], ["ōe kenzaburō", "oe kenzaburo", "Ōe", "Kenzaburō Ōe"]),
    (["Theatre of a Thousand"], ["theatre of thousand", "the theatre of an thousand", "theatre", "A"]),
    (["U.S.A.", "United States", "the States"], ["usa", "States", "united states of america", "U S A"]),
    (["the"], ["", "a", "an the", "the the"]),
    (["naïve — “quoted”"], ["naïve — “quoted”", "naïve quoted", "a—naïve", "“quoted” — naïve"]),
    (["snow_white"], ["snowwhite", "snow white", "Snow_White", "_"]),
]
KINDS = ["bridge", "comparison", "compositional"]


def play(identity, row, texts, loop):
    session = ScriptedSession(identity, lambda observation: next(texts), TOKENIZER)
    asyncio.run(loop.run(session, row))
    return session


def look_up(title):
    return render_call("search", {"query": title})


def scripts(said):
    """Ways to come, or not to come, to an answer."""
    return [
        [render_answer(said)],
        [look_up("Glass Harbor"), render_answer(said)],
        [look_up("Pale River"), look_up("Ada Corvin"), render_answer(said)],
        [f"{look_up('Port Vale')}{look_up('Gray Tower')}", f"<answer>no</answer> or {render_answer(said)}"],
        [f"{look_up('Milo Trent')}{render_answer(said)}", "<tool_call>{</tool_call>", "hm"],
        ["hm", "hm", "hm"],
        [look_up("Glass Harbor"), "so " * 100],
        [render_call("find", {}), render_call("search", {}), f"<answer>{said}</answer>"],
    ]


def trajectory_of(rng, chunk, index, row, sample):
    """One of all the ways in which an episode can go."""
    (identity,) = chunks.identities(chunk, index, "test", 0, 1)
    identity = Identity(f"{identity.uid[:-1]}{sample}", index, sample, "test", 0)
    chance = rng.random()
    if chance < 0.06:
        return play(identity, row, iter([look_up("x")]), agent(Broken())).trajectory()
    if chance < 0.12:
        session = ScriptedSession(identity, lambda observation: "", TOKENIZER)
        outcome = rng.choice([Outcome.ENV_FAILURE, Outcome.ENGINE_FAILURE])
        return session.fail(outcome, OSError("gone"))
    if chance < 0.18:
        small = Budget(3, response_tokens=5, observation_tokens=9, context_tokens=10, trajectory_tokens=99)
        return play(identity, row, iter([]), agent(budget=small)).trajectory()
    if chance < 0.22:
        session = ScriptedSession(identity, lambda observation: look_up("Pale River"), TOKENIZER)
        session.abort(Outcome.TIME_LIMIT, "too slow")
        return session.trajectory()
    said = rng.choice(row["right"] if rng.random() < 0.6 else [x for _, xs in ANSWERS for x in xs])
    return play(identity, row, iter(rng.choice(scripts(said))), agent()).trajectory()


def rows(dataset, count):
    out = []
    for i in range(count):
        answers, right = ANSWERS[i % len(ANSWERS)]
        gold = [[], ["p0"], ["p1", "p2"], ["p0", "p4", "p5"]][i % 4]
        facts = {"id": f"q{i}", "dataset": dataset, "question": "who?", "answers": answers, "gold_ids": gold}
        out.append(facts | ({"kind": KINDS[i % 3]} if dataset != "plain" else {}) | {"right": right})
    return out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder of trajectories: two modes, two splits, three data sets, three samples, every outcome."""
    folder = str(tmp_path_factory.mktemp("recorded"))
    rng = random.Random(0)
    asked = {"eval": rows("hop", 14) + rows("plain", 9), "held_out": rows("two", 8)}
    for mode, (split, these) in itertools.product(("agent", "rag"), asked.items()):
        for chunk in chunks.chunks_of(folder, mode, {split: len(these)}, 16):
            out = []
            for index in chunk.rows:
                row = dict(these[index])
                for sample in range(3):
                    sampled = trajectory_of(rng, chunk, index, row, sample)
                    out.append(chunks.with_facts(sampled, chunk, row, "test"))
            write_jsonl(chunk.path, out)
    return folder


def read_back(folder):
    paths = sorted(glob.glob(f"{folder}/trajectories/*/*/*.jsonl.gz"))
    return chunks.read_chunks([chunks.Chunk("", "", range(0), path) for path in paths])


def slow_normal(text):
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    runs = ["".join(run) for _, run in itertools.groupby(kept, lambda c: c.isalnum() or c == "_")]
    return " ".join("".join(" " if run in ("a", "an", "the") else run for run in runs).split())


def slow_em(said, answers):
    return float(said is not None and any(slow_normal(said) == slow_normal(answer) for answer in answers))


def slow_f1(said, answers):
    best = 0.0
    for answer in answers if said is not None else ():
        ours, theirs = slow_normal(said).split(), slow_normal(answer).split()
        if ours != theirs and any(" ".join(words) in ("yes", "no", "noanswer") for words in (ours, theirs)):
            continue
        left, common = list(theirs), 0
        for word in ours:
            if word in left:
                left.remove(word)
                common += 1
        if common:
            precision, recall = common / len(ours), common / len(theirs)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def slow_metrics(record):
    """What a line of a file came to; None if the infrastructure failed it."""
    if record["outcome"] in ("tool_failure", "env_failure", "engine_failure", "stale"):
        return None
    said = None
    if record["steps"]:
        last = bytes(i - 3 for i in record["steps"][-1]["response_ids"] if i > 2).decode(errors="replace")
        if record["outcome"] == "answered":
            said = last[last.rindex("<answer>") + len("<answer>") : last.rindex("</answer>")].strip()
    prompts = [s["prompt_ids"]["reuse"] + len(s["prompt_ids"]["new"]) for s in record["steps"]]
    calls = [call for step in record["steps"] for call in step["tool_calls"]]
    out = {
        "em": slow_em(said, record["row"]["answers"]),
        "f1": slow_f1(said, record["row"]["answers"]),
        "steps": len(record["steps"]),
        "tool_calls": len(calls),
        "prompt_tokens": sum(prompts),
        "response_tokens": sum(len(step["response_ids"]) for step in record["steps"]),
    }
    gold = record["row"]["gold_ids"]
    if gold:
        shown = {
            p.id for p in PASSAGES for c in calls if c["ok"] for line in c["result"].split("\n") if p.title in line
        }
        out |= {"recall": len(shown & set(gold)) / len(gold), "all_gold": float(shown >= set(gold))}
    return out


def slow_table(records):
    """Question -> name -> value, over the samples that count."""
    table = {}
    for question in {r["row"]["id"] for r in records}:
        found = [slow_metrics(r) for r in records if r["row"]["id"] == question]
        found = [m for m in found if m is not None]
        if found:
            table[question] = {name: sum(m[name] for m in found) / len(found) for name in found[0]}
            for k in range(1, len(found) + 1):
                draws = [any(m["em"] == 1 for m in some) for some in itertools.combinations(found, k)]
                table[question][f"pass@{k}"] = sum(draws) / len(draws)
    return table


def slow_means(table):
    names = {name for values in table.values() for name in values}
    return {n: (np.mean([v[n] for v in table.values() if n in v]), sum(n in v for v in table.values())) for n in names}


def slow_records(folder):
    out = []
    for path in glob.glob(f"{folder}/trajectories/*/*/*.jsonl.gz"):
        with gzip.open(path, "rt") as lines:
            out += map(json.loads, lines)
    return out


def test_figures_of_a_recorded_run_equal_a_slow_computation(recorded):
    found = figures([score(t) for t in read_back(recorded)], samples=3, draws=50)
    records = slow_records(recorded)
    assert {"answered", "max_steps", "response_truncated", "context_overflow", "time_limit", "tool_failure"} <= {
        r["outcome"] for r in records
    }
    places = {(r["row"]["mode"], r["row"]["split"], r["row"]["dataset"]) for r in records}
    pooled = {(mode, "eval", name) for mode in ("agent", "rag") for name in ("all", "mean")}
    assert {(g["mode"], g["split"], g["dataset"]) for g in found["groups"]} == places | pooled
    ems = {slow_metrics(r)["em"] for r in records if slow_metrics(r) and r["outcome"] == "answered"}
    assert ems == {0.0, 1.0}
    for group in found["groups"]:
        mode, split, dataset = group["mode"], group["split"], group["dataset"]
        members = [r for r in records if (r["row"]["mode"], r["row"]["split"]) == (mode, split)]
        if dataset not in ("all", "mean"):
            members = [r for r in members if r["row"]["dataset"] == dataset]
        for r in members:  # The data sets have equal ids.
            r["row"] = {**r["row"], "id": f"{r['row']['dataset']} {r['row']['id']}"}
        tables = {d: slow_table([r for r in members if r["row"]["dataset"] == d]) for _, s, d in places if s == split}
        check_group(group, members, tables)


def check_group(group, members, tables):
    asked = {r["row"]["id"] for r in members}
    table = slow_table(members)
    assert group["questions"] == len(asked) and group["failed_questions"] == len(asked - table.keys())
    assert group["trajectories"] == len(members)
    assert group["failed_trajectories"] == sum(slow_metrics(r) is None for r in members)
    counts = {name: sum(r["outcome"] == name for r in members) for name in {r["outcome"] for r in members}}
    assert group["outcomes"] == {n: {"count": c, "share": pytest.approx(c / len(members))} for n, c in counts.items()}
    if group["dataset"] == "mean":
        parts = [slow_means(part) for part in tables.values()]
        expected = {n: (np.mean([p[n][0] for p in parts]), sum(p[n][1] for p in parts)) for n in parts[0]}
    else:
        expected = slow_means(table)
        kinds = {r["row"]["kind"] for r in members if "kind" in r["row"]}
        assert group["kinds"].keys() == kinds
        for kind in kinds:
            of_kind = slow_means(slow_table([r for r in members if r["row"].get("kind") == kind]))
            for name, figure in group["kinds"][kind].items():
                assert (figure["mean"], figure["n"]) == pytest.approx(of_kind[name])
    assert group["figures"].keys() == expected.keys() >= {"em", "f1", "recall", "all_gold", "pass@1", "pass@3"}
    for name, figure in group["figures"].items():
        assert (figure["mean"], figure["n"]) == pytest.approx(expected[name]), (group["mode"], name)
        assert figure["low"] <= figure["mean"] <= figure["high"]


def test_modes_are_compared_on_the_questions_that_both_have(recorded):
    found = figures([score(t) for t in read_back(recorded)], samples=3, draws=50)["differences"]
    records = slow_records(recorded)

    def table(mode, dataset):
        return slow_table([r for r in records if (r["row"]["mode"], r["row"]["dataset"]) == (mode, dataset)])

    by_place = {(d["dataset"], d["metric"]): d for d in found}
    names = {"hop", "plain", "two", "all", "mean"}
    assert by_place.keys() == set(itertools.product(names, ("em", "f1", "recall", "all_gold")))
    everything = {}
    for dataset in ("hop", "plain", "two"):
        ours, theirs = table("agent", dataset), table("rag", dataset)
        shared = ours.keys() & theirs.keys()
        for metric in ("em", "f1", "recall"):
            both = [(ours[q][metric], theirs[q][metric]) for q in shared if metric in ours[q]]
            everything[dataset, metric] = [a - b for a, b in both]
            figure = by_place[dataset, metric]
            assert (figure["ours"], figure["theirs"], figure["n"]) == ("agent", "rag", len(both))
            assert figure["mean"] == pytest.approx(np.mean(everything[dataset, metric]))
    for metric in ("em", "f1", "recall"):
        pair = [everything[dataset, metric] for dataset in ("hop", "plain")]
        assert by_place["all", metric]["mean"] == pytest.approx(np.mean(np.concatenate(pair)))
        assert by_place["mean", metric]["mean"] == pytest.approx(np.mean([np.mean(x) for x in pair]))


@given(st.lists(st.text(alphabet=st.one_of(st.characters(), st.sampled_from(" aThen._-—"))), min_size=2, max_size=4))
def test_em_and_f1_are_those_of_squad(texts):
    said, *answers = texts
    assert exact_match(said, answers) == slow_em(said, answers)
    assert f1(said, answers) == pytest.approx(slow_f1(said, answers))
    assert exact_match(answers[0], answers) == 1.0


def test_pass_at_k():
    for n, k in itertools.product(range(1, 7), repeat=2):
        for correct in range(n + 1):
            if k > n:
                continue
            choices = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_at_k(10_000, 1, 10_000) == 1.0


def make_score(question, em, sample=0, outcome="answered", dataset="d", **metrics):
    measured = {"em": em, "f1": em, **metrics} if em is not None else {}
    return Score("agent", "eval", dataset, "", question, sample, outcome, measured)


def test_intervals_are_those_of_the_library_and_samples_are_no_questions():
    rng = np.random.default_rng(1)
    values = rng.random(60)
    one = [make_score(str(i), v) for i, v in enumerate(values)]
    found = intervals([question_values(one)])["f1"]
    expected = two_stage_interval([values])
    assert found["n"] == 60 and found["mean"] == pytest.approx(expected.mean)
    assert (found["low"], found["high"]) == pytest.approx(expected[1:], abs=0.01)
    assert found == intervals([question_values(one[::-1])])["f1"]
    many = [make_score(each.question, each.metrics["em"], sample) for each in one for sample in range(9)]
    assert intervals([question_values(many)])["f1"] == found


def test_an_interval_over_data_sets_resamples_each():
    parts = [question_values([make_score(str(i), float(i < right)) for i in range(40)]) for right in (4, 36)]
    apart, together = (
        intervals(parts)["em"],
        intervals([{**parts[0], **{f"x{k}": v for k, v in parts[1].items()}}])["em"],
    )
    assert apart["mean"] == together["mean"] == 0.5 and apart["n"] == together["n"] == 80
    assert 0.5 < (apart["high"] - apart["low"]) / (together["high"] - together["low"]) < 0.7  # .6 = √(.09 / .25)


def test_failures_of_the_infrastructure_are_no_answers():
    failed_ones = [make_score("a", None, outcome="env_failure"), make_score("b", None, outcome="stale")]
    found = figures([*failed_ones, make_score("a", 1.0, sample=1), make_score("c", 0.0)], samples=2)
    (group,) = found["groups"]
    assert group["questions"] == 3 and group["failed_questions"] == 1 and group["failed_trajectories"] == 2
    assert group["figures"]["em"]["mean"] == 0.5 and group["figures"]["em"]["n"] == 2
    assert "pass@2" not in group["figures"] and group["outcomes"]["stale"] == {"count": 1, "share": 0.25}
    (nothing,) = figures(failed_ones)["groups"]
    assert nothing["figures"] == {} and nothing["failed_questions"] == 2 and not math.isnan(nothing["questions"])


def test_a_metric_that_few_questions_have():
    scores = [make_score("a", 1.0, recall=0.5), *(make_score(str(i), 0.0) for i in range(50))]
    found = intervals([question_values(scores)])
    assert found["recall"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1} and found["em"]["n"] == 51


def test_the_page_says_all_of_it(recorded):
    found = figures([score(t) for t in read_back(recorded)], samples=3, draws=50)
    request = {
        "samples": 3,
        "temperature": 1.0,
        "seed": 0,
        "config": {"task": {"name": "test"}},
        "policies": {"agent": "aa", "rag": "bb"},
        "sources": {"agent": "runs/x", "rag": "start"},
    }
    unfinished = [{"mode": "rag", "split": "dev", "answered": 3, "questions": 9}]
    page = markdown({"request": request, "unfinished": unfinished, "versions": {"jax": "1"}, **found})
    assert "not finished: rag on dev, 3 of 9 questions answered" in page
    assert page.count("## Split ") == 2 and "agent − rag" in page and "mean of data sets" in page
    for group in found["groups"]:
        em = group["figures"]["em"]
        assert f"{em['mean']:.3f} [{em['low']:.3f}, {em['high']:.3f}]" in page
        assert f"{group['failed_trajectories']} of {group['trajectories']}" in page
    rows = quality_rows(found | {"request": request})
    assert len(rows) == len(found["groups"]) and {len(row) for row in rows} == {len(rows[0])}


def test_scores_are_read_back_and_damage_is_told(recorded, tmp_path):
    written = [score(t) for t in read_back(recorded)]
    with pytest.raises(UserError, match="no finished evaluation"):
        read_scores(str(tmp_path))
    path = tmp_path / "scores.jsonl.gz"
    write_scores(str(path), written)
    assert read_scores(str(tmp_path)) == written
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"{}\n"))
    with pytest.raises(UserError, match=rf"scores.jsonl.gz, line {len(written) + 1}: not a score"):
        read_scores(str(tmp_path))
