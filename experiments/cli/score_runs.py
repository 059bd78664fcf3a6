"""What ``score --config`` prints and writes: recorded runs beside their simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.cli.common import (
    consoles,
    print_json,
    print_notes,
    print_table,
    print_written,
)

_SMALLEST_S = 0.005
"""Parts of the latency below this are not printed."""


def score_recorded(
    files: Sequence[Path],
    config: str,
    assignments: Sequence[str],
    out: Path | None,
    *,
    json: bool,
    quiet: bool,
) -> None:
    """Score runs under a configuration; print, and write ``summary.json``, ``requests.csv`` and a
    figure a run to ``out``."""
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.figures.style import save, styled
    from sarathi_sim.experiments.results import SCORE_FORMAT, result_folder, write_summary
    from sarathi_sim.experiments.score.figure import distributions
    from sarathi_sim.experiments.score.runs import cases_of, content_of, requests_table, score_runs

    cases = cases_of(load_experiment(config, assignments), files)
    with ProgressBar(consoles()[1], enabled=not (quiet or json)) as progress:
        scored = score_runs(cases, progress)
    content = content_of(scored)
    if out is not None:
        with result_folder(out, SCORE_FORMAT) as folder, styled():
            write_summary(folder, SCORE_FORMAT, content)
            table = requests_table(scored)
            table.to_csv(folder / "requests.csv", index=False, float_format="%.6g")
            (folder / "figures").mkdir()
            for each in scored:
                save(distributions(each), folder / "figures", each.case.file_name)
    if json:
        print_json(content)
    else:
        print_notes(note for each in scored for note in each.case.deployment.remarks)
        _print(content["runs"])
    print_written(out, figures=out is not None, err=True)


def _print(runs: Mapping[str, Any]) -> None:
    from sarathi_sim.experiments.run.compare import part_label
    from sarathi_sim.experiments.score.figure import LABELS
    from sarathi_sim.experiments.score.server_run import NUMBERS
    from sarathi_sim.simulator.views.metric_registry import known

    lacking, groups = [], []
    for name, run in runs.items():
        variants = {key: label for key, label in LABELS.items() if "off_pct" in run.get(key, {})}
        rows = [
            [
                known(path).axis,
                cell(run["measured"], path),
                *(cell(run[key]["off_pct"], path, "{:+.1f}") for key in variants),
            ]
            for path in NUMBERS
        ]
        headings = ["measured", *(f"{label} (off, %)" for label in variants.values())]
        title = f"{name} ({run['scenario']}, {run['requests']} requests)"
        print_table((title,), headings, rows)
        remains = run["remains"]
        parts = ", ".join(
            f"{part_label('mean_latency', part)} {value:+.3f}"
            for part, value in sorted(remains["parts"].items(), key=lambda one: -abs(one[1]))
            if abs(value) >= _SMALLEST_S
        )
        keys = ("latency_s", "host", "frontend", "first_token", "later_tokens")
        lacking.append([name, parts, *(f"{remains[key]:+.3f}" for key in keys)])
        for group in run["by_batch"]:
            times = [f"{1e3 * group[f'{k}_s']:.1f}" for k in ("measured", "zero", "fitted")]
            groups.append([name, str(group["requests"]), f"{group['running']:.0f}", *times])
    what = ["in all", "host, fitted", "frontend, fitted", "first token", "later tokens"]
    title = "What the mean latency lacks without host time (s)"
    print_table(("", "of which the host's"), what, lacking, title=title)
    columns = ("requests", "running", "TPOT measured (ms)", "no host time", "fitted")
    print_table(("by requests running beside",), columns, groups)


def cell(numbers: Mapping[str, Any], path: str, form: str = "{:.4g}") -> str:
    """The number at ``KEY`` or ``KEY.STATISTIC``; a dash where there is none."""
    key, _, statistic = path.partition(".")
    value = numbers.get(key)
    value = value[statistic] if statistic and value is not None else value
    return "-" if value is None else form.format(value)
