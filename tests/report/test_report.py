"""The inspector: what its page holds, and that nothing of a model or tool runs in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import html.parser
import json
import re
import shutil
import subprocess
import urllib.parse

import numpy as np
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.report import curves, inspector, timeline
from agentr1_jax.report.account import account_lines
from agentr1_jax.report.facts import parting, trajectory_facts
from agentr1_jax.trajectory import Outcome, Step, Term, Trajectory

HOSTILE = (
    "<script>document.title='owned'</script><!--<script>\"><img src=x onerror=\"document.title='owned'\">&lt;\u2028"
)
ADDED = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


class Words:
    """A tokenizer that learns its pieces as it meets them: added tokens, words with their space, single characters."""

    def __init__(self) -> None:
        self.pieces = list(ADDED)
        self.added = {piece: i for i, piece in enumerate(ADDED)}

    def encode(self, text: str) -> np.ndarray:
        pattern = "|".join(map(re.escape, ADDED)) + r"|\s?\w{1,6}|.|\n"
        found = re.findall(pattern, text, re.DOTALL)
        for piece in found:
            if piece not in self.pieces:
                self.pieces.append(piece)
        return np.array([self.pieces.index(piece) for piece in found], np.int32)

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in ids)


def chat_turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def sample_trajectory(
    words: Words,
    uid: str,
    turns: list[tuple[str, str, float]],
    *,
    question: str,
    answers: list[str],
    outcome: Outcome = Outcome.ANSWERED,
    em: float | None = None,
    window: int | None = None,
    seed: int = 0,
) -> Trajectory:
    """A trajectory of (response, observation, reward) turns; `window` keeps that many tokens of the first prompt."""
    rng = np.random.default_rng(seed)
    ask = "Answer the question with the search tool.\nPut the answer in <answer>.\n"
    prompt = words.encode(chat_turn("system", ask) + chat_turn("user", question) + "<|im_start|>assistant\n")
    first, steps = prompt, []
    for t, (response, observation, reward) in enumerate(turns):
        ids = words.encode(response + "<|im_end|>")
        found = re.search(r"<tool_call>(.*)</tool_call>", response, re.DOTALL)
        calls = []
        if found:
            try:
                calls = [{**json.loads(found[1]), "ok": True, "error": None, "result": observation}]
            except ValueError:
                fault = {"kind": "bad_json", "fault": "model"}
                calls = [{"name": None, "arguments": found[1], "ok": False, "error": fault, "result": observation}]
        last = t == len(turns) - 1
        steps.append(
            Step(
                prompt_ids=prompt,
                response_ids=ids,
                logprobs=np.minimum(0, -rng.exponential(0.4, len(ids)) + 0.15).astype(np.float32),
                reward=reward,
                reward_parts={"answer": reward} if last and not calls else {"format": 0.0, "gold_passage": reward},
                observation=observation,
                tool_calls=calls,
                state_key=f"docs:{t}" if t else "docs:none",
                context_rule="append" if window is None else f"window({window})",
                policy_version=12,
                info={"finish_reason": "stop"},
            )
        )
        glue = words.encode("\n" + chat_turn("tool", observation) + "<|im_start|>assistant\n")
        kept = [prompt, ids] if window is None else [first[:window]]
        prompt = np.concatenate([*kept, glue])
    return Trajectory(
        uid=uid,
        group=seed // 4,
        sample=seed % 4,
        task=f"hopworld/{seed}",
        seed=seed,
        steps=tuple(steps),
        outcome=outcome,
        final_prompt_ids=prompt if outcome == Outcome.MAX_STEPS else None,
        final_value=0.25 if outcome == Outcome.MAX_STEPS else None,
        metrics={} if em is None else {"em": em, "f1": em},
        row={"question": question, "answers": answers, "kind": "bridge", "hops": 2},
    )


FILM = (
    "[1] The Silent Harbour\nThe Silent Harbour is a 1987 drama film directed by Ilse Varga.\tIt runs 104 minutes.\n"
    "[2] Harbour of Glass\nA novel by P. Oduya."
)
BORN = (
    "[1] Ilse Varga\nIlse Varga (born 3 May 1941) is a film director from Tolmezzo.\n"
    "[2] Tolmezzo\nTolmezzo is a city in Friuli."
)


def call(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


def sample_set(words: Words) -> list[Trajectory]:
    """Hand-made trajectories of every phase and several outcomes, one of them hostile, with advantages for some."""
    question = "In which city was the director of The Silent Harbour born?"
    good = [
        (f"First I need the director of the film.\n{call('The Silent Harbour director')}", FILM, 0.2),
        (f"Ilse Varga. Where was she born?\n{call('Ilse Varga born')}", BORN, 0.2),
        ("<answer>Tolmezzo</answer>", "", 1.0),
    ]
    bridge = [good[0], ("<answer>Ilse Varga</answer>", "", -0.1)]
    broken = [('<tool_call>{"name": "search", "argu</tool_call>', "Error: the call is not valid JSON: line 1", -0.5)]
    hostile = [(f"{HOSTILE}<answer>{HOSTILE}</answer>", HOSTILE, 0.0)]
    looping = [good[0]] * 4
    make = {"question": question, "answers": ["Tolmezzo", "Tolmezzo, Friuli"]}
    out = [
        sample_trajectory(words, "demonstration/000000/00000/0", good, em=1.0, seed=1, **make),
        sample_trajectory(words, "train/000012/00034/0", good, em=1.0, seed=2, **make),
        sample_trajectory(words, "train/000012/00034/1", bridge, em=0.0, seed=3, **make),
        sample_trajectory(words, "train/000012/00034/2", broken, outcome=Outcome.PARSE_FAILURE, em=0.0, seed=4, **make),
        sample_trajectory(words, "train/000012/00034/3", looping, outcome=Outcome.MAX_STEPS, em=0.0, seed=5, **make),
        sample_trajectory(words, "train/000012/00035/0", good[:1], outcome=Outcome.TOOL_FAILURE, seed=6, **make),
        sample_trajectory(words, "train/000012/00035/1", good, window=8, em=1.0, seed=7, **make),
        sample_trajectory(words, "eval/000020/00001/0", good, em=1.0, seed=8, **make),
        sample_trajectory(words, f"eval/{HOSTILE}", hostile, question=HOSTILE, answers=[HOSTILE], em=0.0, seed=9),
    ]
    rng = np.random.default_rng(0)
    for place in range(1, 5):
        value = 1.2 if out[place].metrics["em"] else -0.7

        def advantages(t: int, step: Step, place: int = place, value: float = value) -> np.ndarray | None:
            if (place, t) == (4, 1):
                return None
            alike = np.full(len(step.response_ids), value - 0.3 * t, np.float32)
            return alike if out[place].sample else alike + rng.normal(0, 0.5, len(alike)).astype(np.float32)

        steps = [dataclasses.replace(s, advantages=advantages(t, s)) for t, s in enumerate(out[place].steps)]
        if place == 1:
            terms = {
                "outcome": Term({"return": 1.4}, {"group mean": 0.6}, std=0.8),
                HOSTILE: Term({HOSTILE: 0.5}, weight=0.5),
            }
            total = np.full(len(steps[0].response_ids), sum(term.total for term in terms.values()), np.float32)
            values = rng.normal(0.5, 0.1, len(total)).astype(np.float16)
            steps[0] = dataclasses.replace(
                steps[0], advantages=total, account=terms, values=values, value_targets=values
            )
        out[place] = dataclasses.replace(out[place], steps=tuple(steps))
    return out


def write_sample(folder) -> None:
    """The page that people look at when they work on the inspector."""
    words = Words()
    curve_png, timeline_png = folder / "curve.png", folder / "timeline.png"
    curves.plot_learning_curve(curve_png, [{"phase": "rl", "update": k, "rollout/em": k / 9} for k in range(10)])
    states = ("prefill", "decode", "decode", "tool", "decode")
    spans = [
        {"slot": slot, "state": state, "start": k + slot / 9, "end": k + slot / 9 + 0.8}
        for slot in range(8)
        for k, state in enumerate(states[slot % 3 :])
    ]
    timeline.plot_timeline(timeline_png, spans, slots=8)
    inspector.write_report(
        folder / "report.html",
        sample_set(words),
        decode=words.decode,
        title="quickstart: HopWorld, seed 0",
        head=inspector.PageHead(
            summary={
                "em_before_greedy": 0.313,
                "em_after_greedy": 0.941,
                "seconds": 412.53,
                "em_by_kind": {"bridge": 0.93, "comparison": 0.96, "yes_no": 1.0},
            },
            curve_png=curve_png,
            timeline_png=timeline_png,
            config={"seed": 0, "updates": 40, "algo": {"credit": "step_gae", "clip": [0.2, 0.28]}, "note": HOSTILE},
        ),
        template_ids=words.added.values(),
    )


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report")
    write_sample(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["curve.png", "report.html", "timeline.png"]
    return (folder / "report.html").read_text("utf-8")


def test_page_makes_no_request_and_runs_one_script(page):
    tags = Tags()
    tags.feed(page)
    links = [
        v for _, attributes in tags.seen for k, v in attributes.items() if k in ("src", "href", "action", "srcset")
    ]
    assert len(links) == 2
    assert all(link.startswith("data:image/png;base64,") for link in links)
    kinds = [a.get("type") for tag, a in tags.seen if tag == "script"]
    assert kinds == ["application/gzip"] * 9 + ["application/json", None]
    assert not [a for _, a in tags.seen for name in a if name.startswith("on")]
    assert not re.search(r"url\(|@import|innerHTML|insertAdjacentHTML|document\.write", page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for _, a in tags.seen if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_pictures_are_shown_only_where_there_are_any(page, tmp_path):
    images = re.findall(r'<img class="(\w+)" alt="[\w ]+" src="data:image/png;base64,([^"]+)">', page)
    assert [kind for kind, _ in images] == ["curve", "timeline"]
    assert all(base64.b64decode(data, validate=True).startswith(b"\x89PNG") for _, data in images)
    assert images[0][1] != images[1][1]
    assert len(re.findall(r"<summary>Decode slots over time</summary>\s*<p>One band for each slot", page)) == 1
    places = [
        page.index(part) for part in ('class="numbers"', 'class="curve"', "<main>", "Decode slots", "Configuration")
    ]
    assert places == sorted(places), "trajectories come before the timeline and the configuration"
    inspector.write_report(tmp_path / "bare.html", [], decode=str, title="t")
    bare = (tmp_path / "bare.html").read_text("utf-8")
    assert "<img" not in bare
    assert "Decode slots" not in bare
    assert "<dl" not in bare and "<table" not in bare


def test_a_table_heads_the_page(tmp_path):
    rows = [{"mode": "agent", "EM": "0.5 <0.4>"}, {"mode": "rag", "EM": "-"}]
    inspector.write_report(tmp_path / "page.html", [], decode=str, title="t", head=inspector.PageHead(table=rows))
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", (tmp_path / "page.html").read_text("utf-8"))
    assert cells == ["mode", "EM", "agent", "0.5 &lt;0.4&gt;", "rag", "-"]


def test_hostile_text_stays_text_and_survives(page):
    assert "<img src=x" not in page
    assert "<script>document" not in page
    encoded = re.findall(r'<script type="application/[a-z]+" id="\w+">(.*?)</script>', page, re.DOTALL)
    assert len(encoded) == 1 + len(pages.unpack(page))
    assert not set("<>&") & set("".join(encoded))
    assert "".join(encoded).isascii()
    data = pages.island(page)
    last = pages.unpack(page)[f"eval/{HOSTILE}"]
    assert last["question"] == last["info"]["question"] == HOSTILE
    assert last["texts"][last["steps"][0]["observation"]] == HOSTILE
    response = "".join(data["pieces"][place] for place in last["steps"][0]["response"])
    assert response == f"{HOSTILE}<answer>{HOSTILE}</answer><|im_end|>"


@settings(max_examples=30)
@given(st.recursive(st.text() | st.integers() | st.none(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_script_json_is_inert_and_lossless(value):
    encoded = inspector.script_json(value)
    assert not set("<>&\u2028\u2029") & set(encoded)
    assert json.loads(encoded) == value


def test_data_holds_every_token_exactly(page):
    words = Words()
    trajectories = sample_set(words)
    data, unpacked = pages.island(page), pages.unpack(page)
    assert {data["ids"][place] for place in data["template"]} == set(words.added.values())
    for trajectory in trajectories:
        previous: list[int] = []
        for step, record in zip(trajectory.steps, unpacked[trajectory.uid]["steps"], strict=True):
            prompt = previous[: record["reuse"]] + [data["ids"][place] for place in record["new"]]
            response = [data["ids"][place] for place in record["response"]]
            assert prompt == step.prompt_ids.tolist()
            assert response == step.response_ids.tolist()
            previous = prompt + response
            for name, stored in (("logprobs", step.logprobs), ("values", step.values), ("advantages", step.advantages)):
                if stored is None:
                    assert record[name] is None
                else:
                    np.testing.assert_allclose(np.broadcast_to(record[name], stored.shape), stored, rtol=6e-3)
    reuses = [[step["reuse"] for step in unpacked[trajectories[i].uid]["steps"]] for i in (1, 6)]
    assert reuses[0][:2] == [0, len(trajectories[1].steps[0].prompt_ids) + len(trajectories[1].steps[0].response_ids)]
    assert reuses[1][0] == 0
    assert 8 <= reuses[1][1] < len(trajectories[6].steps[0].prompt_ids)


def test_what_counts_as_trained_and_rewarded(page):
    shown = pages.unpack(page)
    assert shown["demonstration/000000/00000/0"]["phase"] == "demonstration"
    assert shown["train/000012/00034/0"]["trained"]
    assert shown["train/000012/00034/0"]["reward"] == pytest.approx(1.4)
    assert not shown["eval/000020/00001/0"]["trained"]
    failed = shown["train/000012/00035/0"]
    cut = [x for x in shown.values() if x["final"]]
    assert cut and all(x["final_value"] == 0.25 for x in cut) and failed["final_value"] is None
    assert failed["outcome"] == "tool_failure"
    assert not failed["trained"]
    assert failed["reward"] is None


def test_a_step_has_the_account_of_its_advantage(page):
    first, second, *_ = pages.unpack(page)["train/000012/00034/0"]["steps"]
    outcome, process = first["account"]
    assert outcome["plus"] == {"return": 1.4} and outcome["minus"] == {"group mean": 0.6} and outcome["std"] == 0.8
    assert process["name"] == HOSTILE and process["weight"] == 0.5
    assert first["advantage"] == pytest.approx(outcome["total"] + process["total"], rel=1e-5)
    assert second["account"] == [] and second["advantage"] is not None


def test_members_of_a_group_part_where_state_or_action_first_differ():
    words = Words()
    members = [trajectory_facts(t, words.decode) for t in sample_set(words)[1:5]]
    good, bridge, broken, looping = members
    assert {facts["group"] for facts in members} == {"train/000012/00034"}
    assert good["answer"] == "Tolmezzo" and good["steps"][0]["action"] == 'search("The Silent Harbour director")'
    assert broken["steps"][0]["action"] == '<tool_call>{"name": "search", "argu</tool_call>'
    assert parting(good, good) is None
    assert parting(good, bridge) == parting(good, looping) == (1, "action")
    assert parting(good, broken) == (0, "action")
    assert parting(good, {**good, "path": good["path"][:2]}) == (2, "end")
    elsewhere = [["other", action] for _, action in good["path"]]
    assert parting(good, {**good, "path": [*good["path"][:1], *elsewhere[1:]]}) == (1, "state")


def test_missing_rewards_and_values_that_are_not_finite_do_not_break_the_page(tmp_path):
    none = np.zeros(0, np.float32)
    step = Step(np.array([1], np.int32), np.array([2], np.int32), np.array([-np.inf], np.float32), reward=None)
    empty = Step(
        np.array([1], np.int32), none.astype(np.int32), none, advantages=none, account={"a": Term({"b": np.nan})}
    )
    odd = {"em": float("nan"), "f1": np.float64(0.5)}
    trajectory = Trajectory(
        "train/0", 0, 0, "task", 0, (step, empty), Outcome.ANSWERED, metrics=odd, info={"path": object}
    )
    inspector.write_report(tmp_path / "page.html", [trajectory], decode=lambda ids: "ab"[: len(ids)], title="t")
    shown = pages.unpack((tmp_path / "page.html").read_text())["train/0"]
    assert shown["reward"] is None
    assert shown["metrics"] == {"em": "nan", "f1": 0.5}
    assert shown["steps"][0]["logprobs"] == "-inf"
    assert shown["steps"][1]["advantage"] is None and shown["steps"][1]["account"][0]["total"] == "nan"


def test_numbers_have_three_digits():
    assert inspector.short_numbers(np.float32([0.12345, -1234.6, 0, np.inf, 1e-9])) == [
        0.123,
        -1230.0,
        0.0,
        "inf",
        1e-9,
    ]
    assert inspector.short_numbers(np.float16([0.1, 0.1])) == 0.1
    assert inspector.short_numbers(np.float32([])) == [] and inspector.short_numbers(None) is None


def test_token_piece_keeps_the_space_that_sentencepiece_drops_first():
    pieces = ["▁the", "re", "▁", "\n"]

    def sentencepiece(ids):
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert [inspector.token_piece(sentencepiece, i) for i in range(4)] == [" the", "re", " ", "\n"]

    def byte_level(ids):
        return b"".join([b" the", b"\xc3", b"\xa9"][i] for i in ids).decode(errors="replace")

    assert [inspector.token_piece(byte_level, i) for i in range(3)] == [" the", "\ufffd", "\ufffd"]


def test_many_trajectories_stay_small(tmp_path):
    rng = np.random.default_rng(0)

    def step(t):
        prompt, ids = rng.integers(0, 2000, 200 * (t + 1)), rng.integers(0, 2000, 60)
        logprobs = -rng.exponential(1, 60).astype(np.float32)
        return Step(
            prompt.astype(np.int32),
            ids.astype(np.int32),
            logprobs,
            0.1,
            observation="passage " * 100,
            advantages=np.ones(60, np.float32),
        )

    many = [
        Trajectory(f"train/{i}", i, 0, "task", i, tuple(step(t) for t in range(4)), Outcome.ANSWERED)
        for i in range(100)
    ]
    path = tmp_path / "report.html"
    inspector.write_report(path, many, decode=lambda ids: " ".join(map(str, ids)), title="t")
    tokens = sum(200 * (t + 1) + 60 for t in range(4)) * 100
    assert path.stat().st_size < 9 * tokens


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_the_page_and_nothing_hostile_runs(tmp_path):
    write_sample(tmp_path)
    page = (tmp_path / "report.html").read_text()
    uid = pages.island(page)["trajectories"][-1]["uid"]
    address = f"{(tmp_path / 'report.html').as_uri()}#{urllib.parse.quote(uid, safe='')}"
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--virtual-time-budget=4000",
    ]
    profile = f"--user-data-dir={tmp_path / 'profile'}"

    def draw(address: str) -> str:
        command = ["chromium", *quiet, profile, "--dump-dom", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    dom = draw(address)
    assert "<title>quickstart: HopWorld, seed 0</title>" in dom
    assert "[object" not in dom
    assert uid in html.unescape(re.search(r'<p class="uid">(.*?)</p>', dom)[1])
    assert 'class="t off"' in dom
    assert 'class="t act"' not in dom
    assert dom.count('class="item"') == 9
    assert "Step 1" in dom
    assert "gold answer" in dom
    tags = Tags()
    tags.feed(re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL))
    assert [tag for tag, _ in tags.seen if tag in ("img", "script")] == ["img", "img"]

    # The account of a step, one of whose terms has a hostile name, with its group.
    dom = draw(f"{(tmp_path / 'report.html').as_uri()}#{urllib.parse.quote('train/000012/00034/0', safe='')}/1")
    (account,) = re.findall(r'<section class="account">.*?</section>', dom, re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", " ", account))
    assert all(
        part in text for part in ("group mean", "÷ 0.8", "× 0.5", HOSTILE.split("\u2028")[0], "4 members", "step 2")
    )
    assert "<img" not in account and "<script" not in account and account.count('class="square parts"') == 3


def test_an_account_reads_as_arithmetic():
    outcome = Term({"return": 1.2}, {"group mean": 1.2875}, std=0.033)
    state = Term({"later rewards": -0.5}, {"mean of the state": -0.75}, weight=2.0)
    assert account_lines({"outcome in its group": outcome, "among equal states": state}) == [
        "outcome in its group: return 1.2 − group mean 1.2875 = −0.0875, ÷ std 0.033 = −2.6515",
        "among equal states: later rewards −0.5 − mean of the state −0.75 = 0.25, × 2 = 0.5",
        "advantage: −2.6515 + 0.5 = −2.1515",
    ]
    assert account_lines({"alone": Term({"return": 1.2}, {"group mean": 1.2}, std=1e-6)}) == [
        "alone: return 1.2 − group mean 1.2 = 0"
    ]
    assert account_lines({"the same for all": Term({"return": -1.0})}) == ["the same for all: return −1"]
    assert account_lines({}) == []
