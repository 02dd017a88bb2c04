"""A run folder that not all processes share is refused by all of them, with the reason."""

from __future__ import annotations

import os

from pair import run_two

CHILD = """
import os, sys
from agentr1_jax.runtime import processes
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.shared import check_shared

processes.initialize()
index = processes.process_index()
check_shared(sys.argv[1])
os.chdir(os.path.join(sys.argv[1], str(index)))
try:
    check_shared("run")
except UserError as error:
    os.write(1, f"refused: {error}".encode())
"""


def test_a_folder_that_is_two_places_is_refused_by_both_processes(tmp_path):
    for index in range(2):
        (tmp_path / str(index)).mkdir()
    first, second = (out.partition("refused: ")[2] for out in run_two(CHILD, str(tmp_path)))
    assert first == second
    assert first.startswith(f"run: not all processes share this folder: what process 0 writes ({tmp_path}/0/run on ")
    assert (
        f"is not seen by process 1 ({tmp_path}/1/run on " in first and "process 0 (" not in first.partition("is not")[2]
    )
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert os.listdir(tmp_path / "0" / "run") == [] and os.listdir(tmp_path / "1") == []
