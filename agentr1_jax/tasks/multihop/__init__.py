"""Real multi-hop questions: the files they come from, their splits, and the Task."""

from agentr1_jax.envs.datasets import data_folder
from agentr1_jax.tasks.multihop.reading import Files
from agentr1_jax.tasks.multihop.rows import DATASETS, Question, make_row
from agentr1_jax.tasks.multihop.sources import Source, read_source
from agentr1_jax.tasks.multihop.task import INSTRUCTION, MultihopTask, opening

__all__ = [
    "DATASETS",
    "INSTRUCTION",
    "Files",
    "MultihopTask",
    "Question",
    "Source",
    "data_folder",
    "make_row",
    "opening",
    "read_source",
]
