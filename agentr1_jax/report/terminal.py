"""Trajectories in a terminal: steps with the account of each advantage, members of a group side by side."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentr1_jax.errors import inert
from agentr1_jax.report.account import account_lines, number_text
from agentr1_jax.report.facts import Decode, Facts, action_text, mean_advantage, parting, shorten, trajectory_facts
from agentr1_jax.report.selection import Source
from agentr1_jax.trajectory import Step, Trajectory

OBSERVATION_CHARACTERS = 160


def print_source(console: Console, source: Source, decode: Decode, faults: list[str]) -> None:
    """Print the trajectories of a file, each group side by side before its first member.

    The file is read twice, one trajectory at a time: for the facts of all, and to print each.

    Args:
      console: to print to.
      source: trajectories to print.
      decode: token ids -> text.
      faults: gets a sentence if the file cannot be read.
    """
    groups: dict[str, list[Facts]] = {}
    for trajectory in source.read(faults):
        facts = trajectory_facts(trajectory, decode)
        groups.setdefault(facts["group"], []).append(facts)
    console.rule(Text(source.name, style="bold"), align="left")
    for trajectory in source.read(faults):
        if source.is_shown(trajectory.uid):
            facts = trajectory_facts(trajectory, decode)
            members = groups.get(facts["group"], [])
            groups[facts["group"]] = []  # It is printed once.
            if len(members) > 1:
                console.print(group_table(sorted(members, key=lambda member: member["sample"])))
            console.print(trajectory_table(trajectory, facts, decode))


def group_table(members: list[Facts]) -> Table:
    """Return the members of a group side by side: return, advantage of each step, outcome, answer, where they part.

    They are compared with the member of highest return.
    """
    best = max(members, key=lambda member: _order(member["reward"]))
    heading = Text.assemble(("group ", "dim"), inert(members[0]["group"]), "  ", inert(_question(best)))
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in ("sample", "return", "advantages of its steps", "outcome", "answer"):
        table.add_column(name, justify="right" if name in ("sample", "return") else "left")
    table.add_column(f"where it parts from sample {best['sample']}")
    for member in members:
        advantages = Text(" ").join(sign_text(step["advantage"]) for step in member["steps"])
        table.add_row(
            str(member["sample"]),
            sign_text(member["reward"]),
            advantages,
            member["outcome"].replace("_", " "),
            inert(shorten(member["answer"], 40)),
            inert(_difference(best, member)),
        )
    return table


def trajectory_table(trajectory: Trajectory, facts: Facts, decode: Decode) -> Table:
    """Return a trajectory as a table with a row for each step: reward, advantage, what it did, and the account."""
    metrics = "".join(f", {name} {x:.3g}" for name, x in trajectory.metrics.items())
    heading = Text.assemble(
        (inert(facts["uid"]), "bold"),
        f"  {facts['outcome'].replace('_', ' ')}, return ",
        sign_text(facts["reward"]),
        inert(metrics),
        ("\n" + inert(_question(facts)), ""),
        (f"\ngold answer: {inert(' · '.join(facts['gold']))}" if facts["gold"] else "", "dim"),
    )
    table = Table(title=heading, title_justify="left", title_style="", box=box.SIMPLE_HEAD, show_lines=False)
    for name in ("step", "r", "A"):
        table.add_column(name, justify="right", vertical="top")
    table.add_column("what it did, and why it has this advantage")
    for number, step in enumerate(trajectory.steps, start=1):
        table.add_row(str(number), sign_text(step.reward), sign_text(mean_advantage(step)), _step_text(step, decode))
    return table


def sign_text(x: float | str | None) -> Text:
    """Return a number with its sign, green above 0 and red below; a dash for None."""
    if not isinstance(x, int | float):
        return Text("–" if x is None else str(x), style="dim")
    return Text(
        ("+" if x > 0 else "") + number_text(float(f"{x:.3g}")), style="green" if x > 0 else "red" if x < 0 else ""
    )


def _step_text(step: Step, decode: Decode) -> Group:
    lines: list[RenderableType] = [Text(inert(action_text(step, decode)), style="bold")]
    lines += [Padding(Text(inert(line), style="cyan"), (0, 0, 0, 2)) for line in account_lines(step.account)]
    if step.values is not None and step.value_targets is not None and len(step.values):
        value, target = (number_text(float(f"{float(x[0]):.3g}")) for x in (step.values, step.value_targets))
        lines.append(Padding(Text(f"value {value}, its target {target}", style="dim"), (0, 0, 0, 2)))
    if step.observation:
        text = inert(shorten(step.observation, OBSERVATION_CHARACTERS))
        lines.append(Padding(Text(f"→ {text}", style="dim"), (0, 0, 0, 2)))
    return Group(*lines)


def _question(facts: Facts) -> str:
    return shorten(facts["question"] or facts["task"])


def _difference(best: Facts, member: Facts) -> str:
    """Return where a member leaves the best one, and what it does there."""
    if member is best:
        return "–"
    if (parted := parting(best, member)) is None:
        return "the same throughout"
    number, what = parted
    if number >= len(member["steps"]):
        return f"ends before step {number + 1}"
    other = ", another state" if what == "state" else ""
    return f"step {number + 1}{other}: {shorten(member['steps'][number]['action'], 60)}"


def _order(reward: float | str | None) -> float:
    return reward if isinstance(reward, int | float) else float("-inf")
