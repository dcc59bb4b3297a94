"""The notebooks of launch/, and how a test runs one."""

import json
import warnings

import pytest
from scripts import LAUNCH

NOTEBOOKS = sorted((LAUNCH / "notebooks").glob("*.ipynb"))
SECONDS = 240  # that a notebook may take
CELL_SECONDS = 600  # that a cell may take where others keep the machine busy


def cells(notebook, kind):
    """Its cells of a kind, as they are stored."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def text(cell):
    """The source of a cell."""
    return "".join(cell["source"])


def settings(notebook):
    """The cell whose values a person, or a test, changes."""
    (cell,) = [cell for cell in cells(notebook, "code") if "parameters" in cell["metadata"].get("tags", [])]
    return text(cell)


def run(notebook, folder, **values):
    """The executed notebook, its settings replaced by `values`; it lies in `folder`, on a path through the checkout."""
    nbclient = pytest.importorskip("nbclient", reason="needs the extra test: nbclient and ipykernel")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(notebook, as_version=4)
    for cell in book.cells:
        if "parameters" in cell["metadata"].get("tags", []):
            cell["source"] = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    client = nbclient.NotebookClient(
        book, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's own, about its event loop and its folders
        client.execute()
    return book


def printed(cell):
    """What a cell wrote to the console."""
    return "".join(output.get("text", "") for output in cell["outputs"] if output["output_type"] == "stream")


def shown(cell, kind="text/html"):
    """What a cell shows in this form."""
    return [output["data"][kind] for output in cell["outputs"] if kind in output.get("data", {})]


def code_of(book):
    """The executed cells of code, without the settings."""
    return [cell for cell in book.cells if cell["cell_type"] == "code"][1:]
