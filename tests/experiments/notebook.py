"""docs/library.ipynb, run in one process: ``python -m tests.experiments.notebook`` writes what its
cells give. Jupyter opens the same file; it is not needed here."""

from __future__ import annotations

import ast
import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from typing import Any

import matplotlib
from matplotlib import pyplot

from tests.experiments.small_config import ROOT

NOTEBOOK = ROOT / "docs" / "library.ipynb"
Outputs = list[dict[str, Any]]


def outputs(notebook: dict[str, Any]) -> Iterator[Outputs]:
    """What each cell of code gives: printed text, the value of its last expression, figures."""
    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "a_notebook"}
    pyplot.close("all")  # those that others left open
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            yield list(_outputs("".join(cell["source"]), f"cell {number}", names, number))


def _outputs(code: str, where: str, names: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    tree, value, printed = ast.parse(code), None, StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        yield {"name": "stdout", "output_type": "stream", "text": lines}
    if value is not None and not code.endswith(";"):
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        about = {"execution_count": number, "metadata": {}, "output_type": "execute_result"}
        yield {"data": shown, **about}
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=60, metadata={"Software": None})
        data = {"image/png": b64encode(picture.getvalue()).decode()}
        yield {"data": data, "metadata": {}, "output_type": "display_data"}
    pyplot.close("all")


def write() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    found = outputs(notebook)
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            cell |= {"execution_count": number, "outputs": next(found)}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
