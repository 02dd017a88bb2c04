"""Joins evaluations into one table: a row for each algorithm, a table for each data set, and the gain over one of them.

    python -m experiments.evaluation.table [--base=NAME] [--out=TABLE.md] [NAME=]OUT[:MODE] ...

    python -m experiments.evaluation.table --base="warm start" --out=docs/table.md \\
        "Naive RAG=runs/ws/evaluation:rag" "warm start=runs/ws/evaluation" "GRPO=runs/grpo/evaluation"

OUT is the folder of an evaluation. A row is a mode of it, `agent` unless another is named; an OUT without a name and a
mode gives a row for each of its modes. Several folders of one NAME are seeds of the same algorithm: intervals are then
taken over seeds and questions. The gain over --base is paired by question (and seed), on the questions that both have.
With --out the table is written there, and its figures as JSON beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from rich.console import Console

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from experiments.evaluation.comparison import join, markdown, read_rows, remarks, write

BASE = flags.DEFINE_string("base", "", "name of the row that the others are compared with")
OUT = flags.DEFINE_string("out", "", "Markdown file to write; the figures go beside it as JSON")


def main(argv: Sequence[str]) -> None:
    """Reads, joins, shows."""
    rows, folders = read_rows(argv[1:])
    if BASE.value and BASE.value not in rows:
        raise UserError(f"--base={BASE.value}: no such row; rows are {', '.join(rows)}")
    records = join(rows, BASE.value)
    text = markdown(records, BASE.value, remarks(folders))
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    if OUT.value:
        write(OUT.value, text, records)


if __name__ == "__main__":
    configs.run_main(main, arguments=("[NAME=]OUT[:MODE]", "[...]"))
