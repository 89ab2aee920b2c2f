"""notes/one_iteration.ipynb: it runs, has its outputs, and computes what the script does in the same iteration."""

import re

import pytest
from helpers import ROOT

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOK = ROOT / "notes" / "one_iteration.ipynb"


def texts(notebook):
    """What each code cell prints; a picture counts as a line."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["\n".join(output.get("text", "picture") for output in cell.outputs) for cell in cells]


@pytest.mark.slow
def test_the_notebook_runs_and_agrees_with_the_script():
    """The numbers may differ from the stored ones by rounding, and so may what is sampled. The comparison may not."""
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    assert len(stored.cells) <= 30
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    options = {"timeout": 600, "coalesce_streams": True, "kernel_name": "python3"}
    nbclient.NotebookClient(fresh, resources={"metadata": {"path": str(NOTEBOOK.parent)}}, **options).execute()
    for notebook in stored, fresh:
        rows = re.findall(r"(?m)^(\w+/\w+) +(\S+) +(\S+)$", texts(notebook)[-1])
        assert len(rows) == 5 and all(abs(float(ours) - float(its)) <= 2e-5 for _, ours, its in rows), rows
    for old, new in zip(texts(stored), texts(fresh), strict=True):
        assert bool(old) == bool(new) and old.count("picture") == new.count("picture")
