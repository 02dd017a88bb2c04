"""The notebook of the quickstart, executed as a user does, with fewer updates."""

from __future__ import annotations

import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Of the Jupyter libraries.
def test_the_notebook_of_the_quickstart(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", os.fspath(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # The file in the repository holds none.
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = f"WARM_START_UPDATES, UPDATES, QUESTIONS = 8, 1, 8\nRUN = {os.fspath(tmp_path / 'run')!r}"
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": ROOT / "notebooks"}})
    client.execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "--- step 1, reward" in text and "update 0: reward" in text and "after exact match" in text
