"""Put the tables of the shipped kernels' errors into data/README.md:
``python -m sarathi_sim.experiments.figures.kernel_page data/README.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from sarathi_sim.experiments.figures.accuracy import by_class
from sarathi_sim.experiments.figures.kernel_errors import scores_of
from sarathi_sim.experiments.figures.page_tables import markdown, update
from sarathi_sim.profiler.facts.formats import STACKS
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, MOE
from sarathi_sim.profiler.kernels.stack_attention import STATE
from sarathi_sim.profiler.kernels.stack_file import KernelFit, StackSpec, load_stack
from sarathi_sim.profiler.kernels.stack_fit import fitted_devices
from sarathi_sim.profiler.storage.files import write_whole

Rows = Iterator[Sequence[str]]


def shipped_stacks() -> list[StackSpec]:
    """Every shipped stack, in the order of the devices."""
    return [
        load_stack(device, stack)[0]
        for device in fitted_devices("vllm")
        for stack in STACKS
        if device in fitted_devices(stack)
    ]


def tables(specs: Sequence[StackSpec]) -> str:
    """All tables, as Markdown with a title each."""
    where = "device, stack"
    block = (where, "version", "rows", "prompts: chunk sizes", "head counts",
             "decodes: batches, contexts", "head counts")  # fmt: skip
    fit = ("rows", "repaired > 5 %, > 50 %", "token counts")
    return "\n".join(
        markdown(title, header, rows)
        for title, header, rows in (
            ("classes", ("left out", "tables", "aim", "tables that meet it",
                         "median of their medians, of their p95", "covered by the band"),
             _classes(specs)),
            ("gemm", (where, "weights", *fit, "shapes", "shapes, raw", "beyond"),
             _each(specs, "gemm", ("between", "shapes", "shapes,raw", "beyond"))),
            ("experts", (where, "experts", *fit, "shapes", "alone"),
             _each(specs, MOE, ("between", "shapes", "beyond"), "power_law_1.2")),
            ("attention", (where, "chunk sizes", "heads, prefill", "several prompts",
                           "batch or context", "heads, decode", "messages, most GPUs"),
             _attention(specs)),
            ("latent", block, _pairs(specs, "bf16.mla")),
            ("sparse", block, _pairs(specs, "bf16.dsa192-bf16")),
            ("recurrent", block, _pairs(specs, STATE)),
            ("windows", ("", "numbers a head", "window", "tables", "sizes", "head counts"),
             _windows(specs)),
        )
    )  # fmt: skip


def _classes(specs: Sequence[StackSpec]) -> Rows:
    for one in by_class([score for spec in specs for score in scores_of(spec)]):
        aim = f"{one.aim[0]:g} / {one.aim[1]:g}" if one.aim else ""
        met = "" if one.met is None else str(one.met)
        least, most = one.covered_range or (0.0, 0.0)
        covered = f"{one.covered:.0f} % ({least:.0f} to {most:.0f})"
        yield one.group, str(one.scores), aim, met, f"{one.median:.1f} / {one.p95:.1f}", covered


def _each(specs: Sequence[StackSpec], family: str, kinds: Sequence[str], spread: str = "") -> Rows:
    """Every table of a family (of one spread of tokens), and its errors by these kinds."""
    for spec in specs:
        for table, fit in spec.kernels.items():
            of, _, name = table.partition(".")
            dtype, _, tail = name.partition(".")
            if (of, tail) == (family, spread):
                errors = (_error(fit, *kind.partition(",")[::2]) for kind in kinds)
                yield f"{spec.device}, {spec.stack} {fit.version}", dtype, *_rows(fit), *errors


def _attention(specs: Sequence[StackSpec]) -> Rows:
    wanted = (("prefill", "sizes"), ("prefill", "heads"), ("added", "batches"),
              ("decode", "sizes"), ("decode", "heads"))  # fmt: skip
    for spec in specs:
        cells = [_error(spec.kernels.get(f"{f}.bf16.128"), kind) for f, kind in wanted]
        reduces = sorted(
            (int(name.partition(".")[2]), name)
            for name in spec.having(ALL_REDUCE)
            if name.startswith("graph.")
        )
        last = spec.kernels.get(f"{ALL_REDUCE}.{reduces[-1][1]}") if reduces else None
        source = f"{spec.device}, {spec.stack} {spec.kernels['decode.bf16.128'].version}"
        yield source, *cells, _error(last, "sizes")


def _pairs(specs: Sequence[StackSpec], table: str) -> Rows:
    for spec in specs:
        prompts, decodes = (spec.kernels.get(f"{f}.{table}") for f in ("prefill", "decode"))
        if prompts is not None and decodes is not None:
            version, _, of_block = decodes.version.partition(" ")
            errors = (
                _error(fit, k, digits=0) for fit in (prompts, decodes) for k in ("sizes", "heads")
            )
            yield (f"{spec.device}, {spec.stack}", version + (" (block)" if of_block else ""),
                   f"{prompts.rows + decodes.rows:,}", *errors)  # fmt: skip


def _windows(specs: Sequence[StackSpec]) -> Rows:
    for called, family in (("prompts", "prefill"), ("decodes", "decode")):
        for head_dim, window in ((64, 128), (256, 1024), (128, 8192)):
            table = f"{family}.bf16.{head_dim}w{window}"
            fits = [spec.kernels[table].left_out for spec in specs if table in spec.kernels]
            cells = []
            for kind in ("sizes", "heads"):
                found = [left[kind] for left in fits if kind in left]
                middle = median(left.median_pct for left in found)
                cells.append(f"{middle:.1f} / {median(left.p95_pct for left in found):.0f}")
            yield called, str(head_dim), f"{window:,}", str(len(fits)), *cells


def _rows(fit: KernelFit) -> tuple[str, str]:
    return f"{fit.rows:,}", f"{fit.repaired_pct:.0f}, {fit.repaired_far_pct:.1f}"


def _error(fit: KernelFit | None, kind: str, raw: str = "", digits: int = 1) -> str:
    """Median / 95th percentile, the latter with so many digits; ``raw``: of the measured rows."""
    if fit is None or (left := fit.left_out.get(kind)) is None:
        return "-"
    middle, far = left.median_pct, left.p95_pct
    if raw:
        middle, far = left.measured_median_pct, left.measured_p95_pct
    return f"{middle:.1f} / {far:.{digits}f}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_whole(page, update(page.read_text(encoding="utf-8"), tables(shipped_stacks())))
