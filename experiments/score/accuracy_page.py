"""Put the tables and the figure of ``sarathi-sim score FILE --fit --peer FILE --out DIR`` into
docs/accuracy.md: ``python -m experiments.score.accuracy_page DIR DOCS``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.figures.page_tables import update
from experiments.results import SUMMARY
from experiments.score.host_fit import BASE
from experiments.score.measured import METRICS
from profiler.storage.files import write_whole

ALL = "class dense"
"""The rows of the league: dense models, no flags."""
OTHERS = (
    ("AISimulate (its own mixtures of experts)", "76.7", "28.4"),
    ("LLMServingSim (its own runs)", "not found", "not found"),
    ("BLIS (its own runs)", "not found", "not found"),
)
"""What others state for theirs, where we know of a number: mean errors on sets of their own."""

Groups = Mapping[str, Mapping[str, Any]]


def tables(content: Mapping[str, Any]) -> str:
    """All tables of the page, as Markdown with a title each."""
    variants: Mapping[str, Groups] = content["variants"]
    return "\n".join(
        f"## {title}\n\n{text}\n"
        for title, text in {
            "league": _league(content),
            "groups": _groups(content["groups"], variants[BASE]),
            "transfer": _transfer({n: v for n, v in variants.items() if n != BASE}),
            "constants": _constants(content["host_time"]),
            "refused": _table(
                ("reason", "rows"), [(k, str(n)) for k, n in content["refused"].items()]
            ),
        }.items()
    )


def _league(content: Mapping[str, Any]) -> str:
    zero = content["variants"][BASE][ALL]
    rows = [
        ("ours, nothing fitted to such rows", *_both(zero)),
        ("ours, fitted to other servers (cross-validated)", *_both(content["groups"][ALL])),
    ]
    for peer in content.get("peers", {}).values():
        both = peer["groups"][ALL]
        rows += [
            ("AIConfigurator 0.12.0, on the rows that it answers", *_both(both, "theirs")),
            ("ours on those, cross-validated", *_both(both, "ours")),
        ]
    rows += [(name, "other rows", ttft, tpot) for name, ttft, tpot in OTHERS]
    return _table(("", "rows", "TTFT", "TPOT"), rows)


def _groups(best: Groups, zero: Groups) -> str:
    rows = []
    for name, one in best.items():
        if one["n"] and not name.startswith(("class", "mode")):
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
    return _table(("", "rows", *names), rows)


def _transfer(variants: Mapping[str, Groups]) -> str:
    rows = [
        (
            name.replace("_", " "),
            *_both(groups[ALL], of=(*METRICS, "latency")),
            *(f"{groups[ALL][m]['coverage']:.0f} %" for m in (*METRICS, "latency")),
        )
        for name, groups in variants.items()
        if groups.get(ALL, {"n": 0})["n"]
    ]
    names = ("TTFT", "TPOT", "latency")
    return _table(("left out", "rows", *names, *(f"{name} in band" for name in names)), rows)


def _constants(hosts: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (stack, f"{1e3 * h['host_iteration_s']:.2f}", f"{1e3 * h['host_sequence_s']:.4f}",
         f"{1e3 * h['frontend_s']:.1f}")
        for stack, h in hosts.items()
    ]  # fmt: skip
    return _table(("stack", "ms an iteration", "ms a sequence", "ms a request"), rows)


def _both(
    one: Mapping[str, Any], side: str | None = None, of: Iterable[str] = METRICS
) -> tuple[str, ...]:
    errors = one[side] if side else one
    return str(one["n"]), *(f"{errors[m]['mape']:.1f} / {errors[m]['median']:.1f}" for m in of)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(names) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (names, rule, *rows))


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page = docs / "accuracy.md"
    content = json.loads((result / SUMMARY).read_text("utf-8"))
    text = update(page.read_text(encoding="utf-8"), tables(content))
    shutil.copy(result / "figures" / "measured_predicted.png", docs / "images" / "score.png")
    write_whole(page, text)
