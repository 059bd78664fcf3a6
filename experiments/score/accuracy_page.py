"""Put the tables and the figure of ``sarathi-sim score FILE --fit --peer FILE --out DIR`` into
docs/accuracy.md: ``python -m sarathi_sim.experiments.score.accuracy_page DIR DOCS``. FILE has rows
of dense models alone, or of mixtures of experts alone; the tables of the others stay.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.figures.page_tables import markdown, update
from sarathi_sim.experiments.results import SUMMARY
from sarathi_sim.experiments.score.host_fit import BASE
from sarathi_sim.experiments.score.measured import METRICS
from sarathi_sim.profiler.storage.files import write_whole

ALL, MIXTURES = "class dense", "class mixture of experts"
"""The rows of the league (dense models, no flags), and those of mixtures."""
FITTED = ("host_iteration_s", "host_sequence_s", "frontend_s")
_COLUMNS = {
    "host_iteration_s": (1e3, ".2f", "ms an iteration"),
    "host_sequence_s": (1e3, ".4f", "ms a sequence"),
    "frontend_s": (1e3, ".1f", "ms a request"),
    "frontend_token_s": (1e6, ".1f", "us a prompt's token"),
    "launch_s": (1e6, ".0f", "us a launch"),
}
"""A constant's factor, digits and heading."""
OTHERS = (
    ("AISimulate (its own mixtures of experts)", "76.7", "28.4"),
    ("LLMServingSim (its own runs)", "not found", "not found"),
    ("BLIS (its own runs)", "not found", "not found"),
)
"""What others state for theirs, where we know of a number: mean errors on sets of their own."""

Groups = Mapping[str, Mapping[str, Any]]
Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""Its header and its rows."""


def tables(content: Mapping[str, Any]) -> str:
    """All tables of the page that follow from these rows, as Markdown with a title each."""
    groups, variants = content["groups"], content["variants"]
    fits = {name: of for name, of in variants.items() if name != BASE}
    if _dense(content):
        found = {
            "league": _league(content, ALL, OTHERS),
            "groups": _groups(groups, variants[BASE], ("class ", "mode ", "model ")),
            "transfer": _transfer(fits, ALL),
            "constants": _constants(content["host_time"], FITTED),
            "refused": _refused(content),
        }
    else:
        found = {
            "league of mixtures": _league(content, MIXTURES),
            "groups of mixtures": _groups(groups, variants[BASE], ("class ", "mode ")),
            "transfer of mixtures": _transfer(fits, MIXTURES),
            "constants of mixtures": _constants(content["host_time_of_mixtures"], [*_COLUMNS]),
            "refused mixtures": _refused(content),
        }
    return "\n".join(markdown(title, *table) for title, table in found.items())


def _dense(content: Mapping[str, Any]) -> bool:
    """Whether the rows are those of dense models."""
    return bool(content["groups"].get(ALL, {"n": 0})["n"])


def _refused(content: Mapping[str, Any]) -> Table:
    return ("reason", "rows"), [(k, str(n)) for k, n in content["refused"].items()]


def _league(
    content: Mapping[str, Any], which: str, others: Iterable[tuple[str, str, str]] = ()
) -> Table:
    zero = content["variants"][BASE][which]
    rows = [
        ("ours, nothing fitted to such rows", *_both(zero)),
        ("ours, fitted to other servers (cross-validated)", *_both(content["groups"][which])),
    ]
    for peer in content.get("peers", {}).values():
        both = peer["groups"][which]
        rows += [
            ("AIConfigurator 0.12.0, on the rows that it answers", *_both(both, "theirs")),
            ("ours on those, cross-validated", *_both(both, "ours")),
        ]
    rows += [(name, "other rows", ttft, tpot) for name, ttft, tpot in others]
    return ("", "rows", "TTFT", "TPOT"), rows


def _groups(best: Groups, zero: Groups, apart: tuple[str, ...]) -> Table:
    rows = []
    for name, one in best.items():
        if one["n"] and not name.startswith(apart):
            cells = [f"{one[m]['mape']:.1f} / {one[m]['median']:.1f}" for m in METRICS]
            bias = [f"{one[m]['bias']:+.1f}" for m in METRICS]
            inside = [f"{one[m]['coverage']:.0f} %" for m in METRICS]
            plain = [
                f"{zero[name][m]['mape']:.1f} / {zero[name][m]['median']:.1f}" for m in METRICS
            ]
            per_metric = zip(cells, bias, inside, plain, strict=True)
            rows.append((name, str(one["n"]), *(cell for each in per_metric for cell in each)))
    names = [
        f"{m.upper()}{what}" for m in METRICS for what in ("", ", bias", " in band", ", zero-fit")
    ]
    return ("", "rows", *names), rows


def _transfer(variants: Mapping[str, Groups], which: str) -> Table:
    rows = [
        (
            name.replace("_", " "),
            *_both(groups[which], of=(*METRICS, "latency")),
            *(f"{groups[which][m]['coverage']:.0f} %" for m in (*METRICS, "latency")),
        )
        for name, groups in variants.items()
        if groups.get(which, {"n": 0})["n"]
    ]
    names = ("TTFT", "TPOT", "latency")
    return ("left out", "rows", *names, *(f"{name} in band" for name in names)), rows


def _constants(hosts: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Table:
    columns = {name: _COLUMNS[name] for name in names}
    rows = [
        (stack, *(f"{factor * host[n]:{digits}}" for n, (factor, digits, _) in columns.items()))
        for stack, host in hosts.items()
    ]
    return ("stack", *(heading for _, _, heading in columns.values())), rows


def _both(
    one: Mapping[str, Any], side: str | None = None, of: Iterable[str] = METRICS
) -> tuple[str, ...]:
    errors = one[side] if side else one
    return str(one["n"]), *(f"{errors[m]['mape']:.1f} / {errors[m]['median']:.1f}" for m in of)


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page = docs / "accuracy.md"
    content = json.loads((result / SUMMARY).read_text("utf-8"))
    text = update(page.read_text(encoding="utf-8"), tables(content), some=True)
    if _dense(content):
        shutil.copy(result / "figures" / "measured_predicted.png", docs / "images" / "score.png")
    write_whole(page, text)
