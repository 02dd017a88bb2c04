"""Show recorded trajectories of a run, step by step: why each step got its advantage, what its group did.

    python -m experiments.report RUN [--update=17,18] [--worst=32] [--group=624] [--out=FILE] [--text]

RUN is the folder of a run that is running, stopped or finished; it is only read. Without a choice the page has whole
groups of the newest and the first RL batch, and some evaluations and demonstrations. It is written to RUN/report.html,
or to FILE; --text prints it in the terminal instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from absl import flags, logging
from rich.console import Console
from rich.text import Text

from agentr1_jax.errors import UserError
from agentr1_jax.report.run_report import Tokens, print_run_report, write_run_report
from agentr1_jax.report.selection import Selection
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.train import build
from experiments.setup import read_run, read_settings

configs.define_trust_flag()
UPDATE = flags.DEFINE_list("update", [], "RL batches to show, all their trajectories: numbers as in rl_000017, or last")
WORST = flags.DEFINE_integer("worst", None, "show so many trajectories, those of lowest reward", lower_bound=1)
GROUP = flags.DEFINE_integer("group", None, "show one group: the prompt's number, as in rl/000624/3", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "HTML file to write; RUN/report.html unless given")
TEXT = flags.DEFINE_bool("text", False, "print in the terminal and write nothing")
MOST_IN_TERMINAL = 8
"""Trajectories of the newest batch in the terminal where nothing is chosen."""


def main(argv: Sequence[str]) -> None:
    """Read the run, write the page or print it."""
    run = argv[1]
    if TEXT.value and OUT.value:
        raise UserError("--text prints and writes no file; leave --out or --text away")
    jax.config.update("jax_platforms", "cpu")  # The run may hold this machine's accelerators.
    selection = Selection(parse_updates(UPDATE.value), WORST.value, GROUP.value)
    if TEXT.value:
        selection = dataclasses.replace(selection, most=MOST_IN_TERMINAL)
    folder, console = RunFolder(run), Console()
    settings = read_settings(read_run(run))
    tokens, notes = Tokens(lambda ids: ""), list[str]()
    try:
        tokenizer = build.make_tokenizer(settings, None, resumes=True)
        tokens = Tokens(tokenizer.decode, frozenset(tokenizer.added.values()))
    except (UserError, OSError) as error:
        notes.append(f"Tokens are shown by their ids: {error}")
    if TEXT.value:
        return print_run_report(console, folder, selection, tokens, notes)
    out = OUT.value or folder.file("report.html")
    for fault in write_run_report(folder, selection, tokens, out=out, notes=notes):
        logging.warning("%s", fault)
    console.print(Text(f"Look at {out}"), soft_wrap=True)


def parse_updates(names: Sequence[str]) -> list[int]:
    """Return updates of `17`, `last`; -1 for the last one. Raises UserError for anything else."""
    for name in names:
        if name != "last" and not name.isdecimal():
            raise UserError(f"--update={','.join(names)}: write numbers of RL batches, e.g. --update=17,18, or last")
    return [-1 if name == "last" else int(name) for name in names]


if __name__ == "__main__":
    configs.run_main(main, arguments=("RUN",))
