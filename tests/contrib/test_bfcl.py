"""BFCL's multi-turn tasks: ground truth by the documents, end states by hand, mutated calls, the expert."""

from __future__ import annotations

import asyncio
import copy
import json

import jsonschema
import pytest
from bfcl_play import FS, number_of, play, script

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.contrib.bfcl import BfclTask
from agentr1_jax.contrib.bfcl.base import public_methods
from agentr1_jax.contrib.bfcl.rows import offered_functions, read_tasks
from agentr1_jax.contrib.bfcl.state import FUNCTION_SETS, World
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.trajectory import Budget, Outcome

READ_ONLY = {
    "13": "tail and diff",
    "47": "find, cat and statistics",
    "49": "ls, sort (which only shows), tail, wc and a logarithm",
}
"""Tasks whose ground truth changes nothing, by what it does: no call of theirs can be mutated so that it shows."""
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
def tasks(data_dir):
    return read_tasks(data_dir / "bfcl_v4")


@pytest.fixture(scope="module")
def task(data_dir) -> BfclTask:
    return BfclTask(data_dir)


@pytest.fixture(scope="module")
def rows(tasks):
    return {number_of(row): row for row in tasks.rows}


def end_of(row) -> dict:
    """The state after the ground truth."""
    world = World(row["classes"], row["initial_config"])
    owners = {name: of for of in row["classes"] for name in public_methods(FUNCTION_SETS[of])}
    for calls in row["ground_truth"]:
        for call in calls:
            world.call(owners[call["name"]], call["name"], call["arguments"])
    return world.state()


def test_the_fifty_tasks_of_five_function_sets_are_read(tasks, rows):
    assert len(tasks.rows) == 50 and tasks.counts == {"other_classes": 150}
    assert [row["id"] for row in tasks.rows] == [f"multi_turn_base_{i}" for i in range(50)]
    assert {
        i.removeprefix("multi_turn_base_") for i in (r["id"] for r in tasks.rows if r["kind"] == "read_only")
    } == set(READ_ONLY)
    assert json.loads(json.dumps(tasks.rows)) == tasks.rows
    assert sum(map(len, tasks.documents.values())) == 18 + 17 + 10 + 9 + 14


def test_every_call_of_the_ground_truth_gives_what_its_document_says(tasks):
    """Keys and types of results, required even where the document does not say so; exceptions in the table."""
    strange = []
    for row in tasks.rows:
        world = World(row["classes"], row["initial_config"])
        offered = offered_functions(row["classes"], row["excluded"], tasks.documents)
        for call in [call for calls in row["ground_truth"] for call in calls]:
            owner, function = offered[call["name"]]
            result = world.call(owner, call["name"], call["arguments"])
            wanted = {**function.response, "required": list(function.response["properties"])}
            for error in jsonschema.Draft202012Validator(wanted).iter_errors(json.loads(json.dumps(result))):
                strange.append((function.name, ".".join(error.absolute_path), error.message))
                known = NOT_AS_DOCUMENTED.get(function.name, ())
                assert any(strange[-1][1] == at and said in strange[-1][2] for at, said in known), (row["id"], strange)
    assert {name for name, _, _ in strange} == set(NOT_AS_DOCUMENTED)


def test_the_expert_reaches_every_end_state_through_the_loop(task, tasks, data_dir):
    tokenizer = load_tokenizer(str(data_dir / "tokenizers" / "qwen3"))
    budget = Budget(
        max_steps=24, response_tokens=200, observation_tokens=400, context_tokens=12_000, trajectory_tokens=8_000
    )
    loop = EnvLoop(task.env, tokenizer, chat_format(tokenizer), context_rule("append"), budget)
    for row in tasks.rows:
        session = ScriptedSession(Identity("u", 0, 0, task.name, 0), task.expert(row, 0), tokenizer)
        asyncio.run(loop.run(session, row))
        trajectory = session.trajectory()
        calls = sum(map(len, row["ground_truth"]))
        assert trajectory.outcome is Outcome.ANSWERED
        assert trajectory.metrics == {"em": 1, "turns_reached": 1, "tool_calls": calls}
        assert len(trajectory.steps) == calls + len(row["turns"])
        assert sum(step.reward for step in trajectory.steps) == trajectory.steps[-1].reward == 1
        assert [s.observation for s in trajectory.steps if not s.tool_calls] == [*row["turns"][1:], ""]
        assert all(call["ok"] for step in trajectory.steps for call in step.tool_calls)


# Facts of end states: written by hand from `question` and `initial_config` alone. `was` gives a text of the config.


def was(row, *path):
    node = {"type": "directory", "contents": row["initial_config"][FS]["root"]}
    for name in path:
        node = node["contents"][name]
    return node["content"]


def facts_0(row, tree, end):
    """Both reports are moved to a new document/temp."""
    document = tree["workspace"]["document"]
    old = [was(row, "workspace", "document", name) for name in ("final_report.pdf", "previous_report.pdf")]
    assert document == {"temp": {"final_report.pdf": old[0], "previous_report.pdf": old[1]}}
    assert tree["workspace"]["archive"] == {} and len(end["TwitterAPI"]["tweets"]) == 3


def facts_2(row, tree, end):
    """A note is written, and copied to the archive under another name; the ideas stay."""
    documents = tree["simona"]["documents"]
    note = "Collaboration leads to success. Innovation ignites growth."
    assert documents["TeamNotes.txt"] == note and documents["Archived"] == {"IdeasArchive.txt": note}
    assert documents["ideas.txt"] == was(row, "simona", "documents", "ideas.txt") and documents["past_projects"] == {}


def facts_5(row, tree, end):
    """The csv lies in the archive beside it, not in the other one; one tweet, the first, with one comment."""
    csv = was(row, "data", "project", "analysis_report.csv")
    assert tree["data"]["project"]["archive"] == {"analysis_report.csv": csv} and tree["archive"] == {}
    assert "analysis_report.csv" not in tree["data"]["project"]
    twitter = end["TwitterAPI"]
    assert twitter["tweets"]["0"]["content"] == "Managed to archive important data files!"
    assert twitter["tweets"]["0"]["tags"] == ["#DataManagement", "#Efficiency"]
    assert [c["content"] for c in twitter["comments"]["0"]] == ["Another successful task completed today!"]


def facts_6(row, tree, end):
    """The report has nine words, which the new file in shared says."""
    report = "Company Earning: 2000 Company Expenditure: 500 Company Name: Gorilla"
    assert tree["gorilla"]["communal"] == {"Annual_Report_2023.docx": report}
    assert tree["gorilla"]["shared"] == {"report_word_count.txt": "9"}
    assert tree["gorilla"]["reserve"] == tree["gorilla"]["archives"] == {}


def facts_10(row, tree, end):
    """The proposal is moved into a new folder under a new name; beside it an empty note and a summary."""
    workspace = tree["alex"]["workspace"]
    proposal = was(row, "alex", "workspace", "proposal.docx")
    assert workspace["Projects"] == {"final_proposal_2024": proposal, "notes.md": "", "summary.txt": "Hello"}
    assert set(workspace) == {"Projects", "notes.md"}
    assert workspace["notes.md"] == was(row, "alex", "workspace", "notes.md")


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


def facts_38(row, tree, end):
    """File and folder are gone."""
    assert tree == {"researcher": {}}


def facts_39(row, tree, end):
    """A folder with three files."""
    files = {"styles.css": "Hello World!", "index.html": "Hi World!", "script.js": "Halo World!"}
    assert tree == {"current_working_directory": {"WebDevProjects": files}}


def facts_41(row, tree, end):
    """What was sent to Bob is deleted again; USR001 is logged in; the files are as they were."""
    assert end["MessageAPI"]["inbox"] == [] and end["MessageAPI"]["current_user"] == "USR001"
    assert set(tree["workspace"]["initial_directory"]) == {"notes", "other_file.txt"}


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
def test_end_states_are_what_question_and_config_ask_for(rows, number):
    end = end_of(rows[number])
    FACTS[number](rows[number], end[FS]["tree"], end)


@pytest.mark.parametrize("number", FACTS)
def test_no_fact_holds_before_the_first_call(rows, number):
    row = rows[number]
    start = World(row["classes"], row["initial_config"]).state()
    with pytest.raises((AssertionError, KeyError, ValueError)):
        FACTS[number](row, start[FS]["tree"], start)


def changing_calls(row, task):
    """Places (turn, call) of the ground truth whose call changes what is compared."""
    done, _ = play(task, row, script(row["ground_truth"]))
    steps = iter(done)
    before, places = row["start"]["compared"], []
    world = World(row["classes"], row["initial_config"])
    owners = {name: of for of in row["classes"] for name in public_methods(FUNCTION_SETS[of])}
    for turn, calls in enumerate(row["ground_truth"]):
        for at, call in enumerate(calls):
            assert next(steps).tool_calls[0]["ok"]
            world.call(owners[call["name"]], call["name"], call["arguments"])
            after = world.digests()["compared"]
            places += [(turn, at)] if after != before else []
            before = after
        next(steps)
    return places


def change(value):
    """Another value of the same type."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        return {name: change(x) for name, x in value.items()}
    return [*value, "x"] if isinstance(value, list) else value + 1


def mutations(row, places):
    """Ground truths that lack one of these calls, or have another value in one of its arguments."""
    for turn, at in places:
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


def test_a_mutated_call_does_not_reach_the_end_state(rows, task):
    count = 0
    for number, row in rows.items():
        places = changing_calls(row, task)
        assert bool(places) == (number not in READ_ONLY), number
        for what, calls in mutations(row, places):
            done, metrics = play(task, row, script(calls))
            assert done[-1].outcome is Outcome.ANSWERED and done[-1].reward <= 0, (number, what)
            assert metrics["em"] == 0 and metrics["turns_reached"] < 1, (number, what)
            count += 1
    assert count == 307


@pytest.mark.parametrize("which", HARMLESS, ids="-".join)
def test_the_mutations_that_are_left_out_are_harmless(rows, task, which):
    number, function, name = which
    truth = copy.deepcopy(rows[number]["ground_truth"])
    (call,) = (call for calls in truth for call in calls if call["name"] == function)
    call["arguments"][name] += "x"
    assert play(task, rows[number], script(truth))[1]["em"] == 1
