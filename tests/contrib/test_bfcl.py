"""BFCL's multi-turn tasks: ground truth by the documents, end states by hand, mutated calls, episodes."""

from __future__ import annotations

import asyncio
import copy
import json

import jsonschema
import pytest
from bfcl_play import FS, number_of, play, script
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.contrib.bfcl.rows import offered_functions, read_tasks
from agentr1_jax.contrib.bfcl.state import World
from agentr1_jax.contrib.bfcl.task import DONE, INSTRUCTION, BfclConfig, make_bfcl
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, render_call
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Budget, Outcome

READ_ONLY = {"13", "47", "49"}
"""Tasks whose ground truth changes nothing: no call of theirs can be mutated so that it shows."""
NOT_AS_DOCUMENTED = {
    # The document gives the type string, and says in words that it is None where a file was written.
    "echo": [("terminal_output", "None is not of type 'string'")],
    # Shows what initial_config says of ticket 987654: no title, priority or creator, but an (empty) resolution.
    "get_ticket": [("", "is a required property"), ("", "'resolution' was unexpected")],
}
"""Where results of ground-truth calls differ from their documents."""
HARMLESS = {
    ("27", "ticket_login", "password"): "the data name no accounts, so that any password will do",
    ("41", "send_message", "message"): "what was sent is deleted in the next turn (whose turn_state tells it)",
}
"""Arguments whose change the end state cannot show."""


@pytest.fixture(scope="module")
def task(data_dir):
    return make_bfcl(BfclConfig(), TaskContext(data_dir=str(data_dir)))


@pytest.fixture(scope="module")
def data(data_dir):
    """Rows by number, and documents."""
    rows, documents = read_tasks(data_dir / "bfcl_v4")
    return {number_of(row): row for row in rows}, documents


@pytest.fixture(scope="module")
def rows(data):
    return data[0]


def replay(row, documents):
    """(call, result, state after it) for each call of the ground truth."""
    world = World(row["classes"], row["initial_config"])
    offered = offered_functions(row["classes"], row["excluded"], documents)
    for calls in row["ground_truth"]:
        for call in calls:
            owner, function = offered[call["name"]]
            result = json.loads(json.dumps(world.call(owner, call["name"], call["arguments"])))
            yield function, result, world


def test_the_fifty_tasks_of_five_function_sets_are_read(data):
    rows, documents = data
    assert [row["id"] for row in rows.values()] == [f"multi_turn_base_{i}" for i in range(50)]
    assert {number for number, row in rows.items() if row["kind"] == "read_only"} == READ_ONLY
    assert json.loads(json.dumps(rows)) == rows
    assert sum(map(len, documents.values())) == 18 + 17 + 10 + 9 + 14


def test_every_call_of_the_ground_truth_gives_what_its_document_says(data):
    """Keys and types of results, required even where the document does not say so; exceptions in the table."""
    strange = []
    for row in data[0].values():
        for function, result, _ in replay(row, data[1]):
            wanted = {**function.response, "required": list(function.response["properties"])}
            for error in jsonschema.Draft202012Validator(wanted).iter_errors(result):
                strange.append((function.name, ".".join(error.absolute_path), error.message))
                known = NOT_AS_DOCUMENTED.get(function.name, ())
                assert any(strange[-1][1] == at and said in strange[-1][2] for at, said in known), (row["id"], strange)
    assert {name for name, _, _ in strange} == set(NOT_AS_DOCUMENTED)


def test_the_expert_reaches_end_states_through_the_loop(task, rows, data_dir):
    tokenizer = load_tokenizer(str(data_dir / "tokenizers" / "qwen3"))
    budget = Budget(
        max_steps=24, response_tokens=200, observation_tokens=400, context_tokens=12_000, trajectory_tokens=8_000
    )
    loop = EnvLoop(task.env, tokenizer, chat_format(tokenizer), context_rule("append"), budget)
    for number in ("0", "5", "14", "24", "44"):
        row = rows[number]
        session = ScriptedSession(Identity("u", 0, 0, task.name, 0), task.expert(row, 0), tokenizer)
        asyncio.run(loop.run(session, row))
        trajectory = session.trajectory()
        calls = sum(map(len, row["ground_truth"]))
        assert trajectory.outcome is Outcome.ANSWERED
        assert trajectory.metrics == {"em": 1, "turns_reached": 1, "tool_calls": calls}
        assert len(trajectory.steps) == calls + len(row["turns"])
        assert sum(step.reward for step in trajectory.steps) == trajectory.steps[-1].reward == 1
        assert [s.observation for s in trajectory.steps if not s.tool_calls] == [*row["turns"][1:], ""]


# Facts of end states: written by hand from `question` and `initial_config` alone. `was` gives a text of the config.


def was(row, *path):
    node = {"type": "directory", "contents": row["initial_config"][FS]["root"]}
    for name in path:
        node = node["contents"][name]
    return node["content"]


def facts_5(row, tree, end):
    """The csv lies in the archive beside it, not in the other one; one tweet, the first, with one comment."""
    csv = was(row, "data", "project", "analysis_report.csv")
    assert tree["data"]["project"]["archive"] == {"analysis_report.csv": csv} and tree["archive"] == {}
    assert "analysis_report.csv" not in tree["data"]["project"]
    twitter = end["TwitterAPI"]
    assert twitter["tweets"]["0"]["content"] == "Managed to archive important data files!"
    assert twitter["tweets"]["0"]["tags"] == ["#DataManagement", "#Efficiency"]
    assert [c["content"] for c in twitter["comments"]["0"]] == ["Another successful task completed today!"]


def facts_14(row, tree, end):
    """Files are only read; the new contact has got the message of USR001."""
    messages = end["MessageAPI"]
    assert messages["current_user"] == "USR001"
    assert [m["message"] for m in messages["inbox"]] == ["Latest Quarter Performance has been well."]
    assert messages["inbox"][0]["receiver_id"] == messages["users"]["John Levy"]
    csv = was(row, "active_project", "ResearchDocs", "report.csv")
    assert tree == {"active_project": {"ResearchDocs": {"report.csv": csv}}}


def facts_18(row, tree, end):
    """The four text files, and not the docx, are in the new folder too; a tweet mentions Jerry."""
    reports = tree["Quarter1_Reports"]
    texts = ["report1.txt", "report2.txt", "History101.txt", "History202.txt"]
    assert reports["Archived_Quarter1"] == {name: was(row, "Quarter1_Reports", name) for name in texts}
    assert set(reports) == {*texts, "Archived_Quarter1", "Backup", "MonthlySummary.docx"} and reports["Backup"] == {}
    tweet = end["TwitterAPI"]["tweets"]["3"]
    assert tweet["mentions"] == ["@Jerry"] and tweet["username"] == "techie_sarah"
    assert all(reports[name] in tweet["content"] for name in ("History101.txt", "History202.txt"))


def facts_21(row, tree, end):
    """The overview says something else now, the draft what it said; the tweet is the first and mentions two."""
    workspace = tree["workspace"]
    assert workspace["ProjectOverview.txt"] == "To be discussed"
    assert workspace["Draft.txt"] == was(row, "workspace", "Draft.txt") and workspace["Backups"] == {}
    twitter = end["TwitterAPI"]
    assert list(twitter["tweets"]) == ["0"] and twitter["authenticated"] and twitter["tweets"]["0"]["id"] == 0
    assert twitter["tweets"]["0"]["content"] == "Initial summary of the project. To be discussed."
    assert twitter["tweets"]["0"]["mentions"] == ["@manager", "@team_lead"]
    assert twitter["tweets"]["0"]["username"] == "tech_guru"


def facts_24(row, tree, end):
    """The notes are in the archive under a new name; the ticket is resolved as told."""
    project = tree["project"]
    assert project["archives"] == {"notes_2024.txt": was(row, "project", "temp_notes.txt")}
    assert set(project) == {"archives", "report_draft.txt", "report_final.txt"}
    (ticket,) = end["TicketAPI"]["queue"]
    assert (ticket["id"], ticket["status"].lower()) == (987654, "resolved")
    assert ticket["resolution"] == "Fixed through manual troubleshooting techniques."


def facts_27(row, tree, end):
    """The plan is renamed; two new tickets of tech_guru, the second one urgent."""
    assert tree["alex"]["workspace"] == {"project_overview.md": was(row, "alex", "workspace", "project_plan.md")}
    old, first, second = end["TicketAPI"]["queue"]
    assert old["id"] == 12 and len({old["id"], first["id"], second["id"]}) == 3
    assert [(t["title"], t["priority"], t["created_by"]) for t in (first, second)] == [
        ("emergency", 3, "tech_guru"),
        ("emergency", 5, "tech_guru"),
    ]
    assert first["description"] == "Initial project plan details." and second["description"] == "Additional insights."


def facts_29(row, tree, end):
    """A file named by the bytes of the folder, which holds the user's request before the last."""
    vision = tree["Akab"]["VisionX"]
    used = len(was(row, "Akab", "VisionX", "config_main.txt").encode())
    assert set(vision) == {"config_main.txt", f"{used}.pdf"} and used == 79
    assert vision["79.pdf"] == row["turns"][1]


def facts_35(row, tree, end):
    """The new file beside the two that differ holds both, the first one's line struck."""
    deep = tree["alex"]["projects"]["deep_folder"]
    at = ("alex", "projects", "deep_folder")
    one, other = was(row, *at, "config.py"), was(row, *at, "real_config.py")
    assert deep == {"config.py": one, "real_config.py": other, "diff.txt": f"- {one}\n+ {other}"}
    assert tree["alex"]["temp"] == {}


def facts_44(row, tree, end):
    """(5000 + 7000 + 6000 + 8000) / 4 = 6500."""
    files = {"annual_report.txt": "Q1: $5000, Q2: $7000, Q3: $6000, Q4: $8000", "MeanRevenue.txt": "6500"}
    assert tree == {"alex": {"documents": files}}


def facts_48(row, tree, end):
    """`This is a test file.` has 20 characters and the other text fewer: none has more than 20, so priority 2."""
    tests = [was(row, "workspace", "test", name) for name in ("test_file1.txt", "test_file2.txt")]
    assert [len(text) for text in tests] == [20, 18]
    priorities = {ticket["id"]: ticket["priority"] for ticket in end["TicketAPI"]["queue"]}
    assert priorities == {654321: 2, 123456: "High"}


FACTS = {name.removeprefix("facts_"): x for name, x in list(globals().items()) if name.startswith("facts_")}


@pytest.mark.parametrize("number", FACTS)
def test_end_states_are_what_question_and_config_ask_for(data, number):
    row = data[0][number]
    start = World(row["classes"], row["initial_config"]).state()
    with pytest.raises((AssertionError, KeyError, ValueError)):
        FACTS[number](row, start[FS]["tree"], start)
    *_, (_, _, world) = replay(row, data[1])
    FACTS[number](row, world.state()[FS]["tree"], world.state())


def change(value):
    """Another value of the same type."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        return {name: change(x) for name, x in value.items()}
    return [*value, "x"] if isinstance(value, list) else value + 1


def mutations(row, documents):
    """Ground truths that lack a call that changes something, or have another value in one of its arguments."""
    before = row["start"]["compared"]
    digests = [world.digests()["compared"] for _, _, world in replay(row, documents)]
    places = [(turn, at) for turn, calls in enumerate(row["ground_truth"]) for at in range(len(calls))]
    for (turn, at), after in zip(places, digests, strict=True):
        changes, before = after != before, after
        if not changes:
            continue
        without = copy.deepcopy(row["ground_truth"])
        call = without[turn].pop(at)
        yield f"without {call}", without
        for name in call["arguments"]:
            if (number_of(row), call["name"], name) in HARMLESS:
                continue
            other = copy.deepcopy(row["ground_truth"])
            arguments = other[turn][at]["arguments"]
            arguments[name] = change(arguments[name])
            yield f"{call}, other {name}", other


def test_the_ground_truth_reaches_the_end_state_and_no_mutation_does(data, task):
    count = 0
    for number, row in data[0].items():
        done, metrics = play(task, row, script(row["ground_truth"]))
        assert metrics["em"] == metrics["turns_reached"] == 1
        assert all(call["ok"] for transition in done for call in transition.tool_calls)
        before = count
        for what, calls in mutations(row, data[1]):
            done, metrics = play(task, row, script(calls))
            assert done[-1].outcome is Outcome.ANSWERED and done[-1].reward <= 0, (number, what)
            assert metrics["em"] == 0 and metrics["turns_reached"] < 1, (number, what)
            count += 1
        assert (count > before) == (number not in READ_ONLY), number
    assert count == 307


@pytest.mark.parametrize("which", HARMLESS, ids="-".join)
def test_the_mutations_that_are_left_out_are_harmless(rows, task, which):
    number, function, name = which
    truth = copy.deepcopy(rows[number]["ground_truth"])
    (call,) = (call for calls in truth for call in calls if call["name"] == function)
    call["arguments"][name] += "x"
    assert play(task, rows[number], script(truth))[1]["em"] == 1


def test_splits_are_disjoint(task):
    assert (task.size("train"), task.size("eval")) == (30, 20)
    assert len({task.row(split, i)["id"] for split in ("train", "eval") for i in range(task.size(split))}) == 50


def test_the_opening_tells_functions_by_their_documents_but_for_excluded_ones(task, rows):
    row = rows["24"]
    first = asyncio.run(task.env().reset(row, 0))
    system, user = first.messages
    assert system["role"] == "system" and system["content"].startswith(INSTRUCTION)
    assert system["content"].count("Gorilla file system") == 1 and "ticketing system" in system["content"]
    assert user == {"role": "user", "content": row["turns"][0]}
    offered = {tool["function"]["name"]: tool["function"] for tool in first.tools}
    assert row["excluded"] == ["cp"] and "cp" not in offered and len(offered) == 17 + 9
    assert offered["cat"]["description"].startswith("Display the contents of a file")
    assert offered["du"]["parameters"]["properties"]["human_readable"]["type"] == "boolean"
    assert first.state_key == f"multi_turn_base_24|0|{row['start']['state']}"


def test_calls_of_one_response_run_in_order_and_the_user_goes_on(task, rows):
    row = rows["0"]
    responses = ["".join(render_call(c["name"], c["arguments"]) for c in calls) for calls in row["ground_truth"]]
    done, metrics = play(task, row, [text for response in responses for text in (response, DONE)])
    assert [t.observation.role for t in done[:-1]] == ["tool", "user"] * 3 + ["tool"]
    assert [t.observation.text for t in done[1:-1:2]] == row["turns"][1:]
    assert len(done[0].observation.texts) == 3 and metrics["em"] == metrics["turns_reached"] == 1
    assert [t.raw_reward_parts["turn_state"] for t in done] == [0, 0.25] * 4
    assert done[-1].reward_parts == {"state": 1, "turn_state": 0, "format": 0} and done[-1].terminated


def test_what_comes_late_reaches_the_end_but_not_every_turn(task, rows):
    row = rows["39"]
    late = [[], sum(row["ground_truth"][:2], []), *row["ground_truth"][2:]]
    done, metrics = play(task, row, script(late))
    assert metrics["em"] == 1 and metrics["turns_reached"] == 0.75 and done[-1].reward == 1
    _, early = play(task, rows["38"], list(script(rows["38"]["ground_truth"]))[:-1])
    assert early == {"em": 0, "turns_reached": 0.5, "tool_calls": 5}  # The episode is not over.


def test_mistakes_are_told_and_cost_only_where_they_are_of_form(task, rows):
    unknown = render_call("cp", {"source": "a", "destination": "b"})
    told = [
        ("<tool_call>{</tool_call>", PARSE_MESSAGES["bad_json"], "bad_json", -0.1),
        (unknown, "Error: no such tool; tools are close_ticket, ", "unknown_tool", -0.1),
        (render_call("cat", {"file": "x"}), "Error: bad arguments for cat", "bad_arguments", -0.1),
        (render_call("cat", {"file_name": "x"}), "Error: cat: there is no 'x' in /project", "no_such_file", 0),
        (render_call("get_ticket", {"ticket_id": 1.0}), "Error: get_ticket: there is no ticket 1", "no_such_ticket", 0),
    ]
    done, metrics = play(task, rows["24"], [text for text, *_ in told])
    for transition, (_, said, kind, reward) in zip(done, told, strict=True):
        assert transition.observation.text.startswith(said) and transition.observation.role == "tool"
        assert transition.info["errors"] == {kind: 1} and transition.reward == reward and transition.outcome is None
    assert metrics == {"em": 0, "turns_reached": 0, "tool_calls": 5}


def test_equal_states_have_equal_keys_and_others_do_not(task, rows):
    key = lambda *texts: play(task, rows["10"], texts)[0][-1].observation.state_key  # noqa: E731
    cd, ls, mkdir = (
        render_call(*x) for x in (("cd", {"folder": "workspace"}), ("ls", {}), ("mkdir", {"dir_name": "x"}))
    )
    assert key(ls) == key(ls, ls) == key("<tool_call>")
    assert len({key(ls), key(cd), key(mkdir), key(cd, mkdir), key(DONE)}) == 5
    assert key(cd, mkdir) == key(ls, cd + mkdir)


def test_a_state_does_not_share_what_it_was_given():
    config, post = {"TwitterAPI": {"authenticated": True, "tweets": {}}}, {"content": "", "mentions": ["@b"]}
    world = World(["TwitterAPI"], config)
    world.call("TwitterAPI", "post_tweet", post)
    world.call("TwitterAPI", "mention", {"tweet_id": 0, "mentioned_usernames": ["@a"]})
    assert world.call("TwitterAPI", "get_tweet", {"tweet_id": 0})["mentions"] == ["@b", "@a"]
    assert post == {"content": "", "mentions": ["@b"]} and config["TwitterAPI"]["tweets"] == {}


def test_limits_go_around_the_tools(data_dir, rows):
    metrics, limits = ToolMetrics(), ToolsConfig(max_characters=60)
    context = TaskContext(data_dir=str(data_dir), wrap=lambda tool: wrap_tool(tool, limits, metrics))
    limited = make_bfcl(BfclConfig(), context)
    played = [play(limited, rows[number], script(rows[number]["ground_truth"])) for number in ("0", "24", "27")]
    assert all(figures["em"] == 1 for _, figures in played)
    assert metrics.metrics()["tools/error/oversized"] > 0 and metrics.metrics()["tools/retries"] == 0


def test_texts_are_of_training_tasks_and_as_many_as_asked(task):
    texts = task.texts(10_000)
    assert texts[:40] == task.texts(40) and len(task.texts(40)) == 40
    said = {text for i in range(30) for text in task.row("train", i)["turns"]}
    assert said <= set(texts) and not {task.row("eval", i)["turns"][0] for i in range(20)} & set(texts)
    assert render_call("cd", {"folder": "workspace"}) in texts and DONE in texts
    assert not [text for text in texts if text.startswith("Error")]


def responses_of(functions):
    """Random responses, with calls whose arguments may break their schema and with none."""
    texts = st.text(max_size=4) | st.sampled_from(["USR001", "USR002", "analyst_pro"])
    values = st.one_of(texts, st.integers(-2, 4), st.booleans(), st.lists(texts, max_size=2), st.none())

    def call(name, drawn):
        return render_call(name, dict(zip(functions[name][1].parameters["properties"], drawn, strict=False)))

    made = st.builds(call, st.sampled_from(list(functions)), st.lists(values, min_size=3, max_size=3))
    return st.lists(st.lists(made, max_size=4).map("".join), max_size=8)


@settings(max_examples=25)
@given(draws=st.data())
def test_no_response_breaks_an_episode(task, data, draws):
    row = data[0][draws.draw(st.sampled_from(["0", "17", "24", "31"]))]
    responses = draws.draw(responses_of(offered_functions(row["classes"], row["excluded"], data[1])))
    done, metrics = play(task, row, responses)
    assert json.dumps([[t.tool_calls, t.info, t.metrics] for t in done], allow_nan=False)
    assert not any(call["error"] == "exception" for t in done for call in t.tool_calls)
    assert all((t.observation is None) == (t.outcome is not None) for t in done)
    assert sum(t.outcome is Outcome.ANSWERED for t in done) == (sum(not r for r in responses) >= len(row["turns"]))
