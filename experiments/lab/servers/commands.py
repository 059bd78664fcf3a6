"""The commands ``lab score`` and ``lab fit-host``: tables of measured servers, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.content import Section, write_section
from sarathi_sim.experiments.lab.servers.answers import servers_answer
from sarathi_sim.experiments.lab.servers.figures import draw_score
from sarathi_sim.experiments.lab.servers.mlperf import ScoredMlperf, score_mlperf
from sarathi_sim.experiments.lab.servers.score import ScoredRows, score_servers
from sarathi_sim.experiments.results import (
    SCORE_FORMAT,
    check_replaceable,
    result_folder,
    write_summary,
)
from sarathi_sim.experiments.sweeps.backends import local_backend
from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.profiler.storage.strict import UserError

Answer = tuple[dict[str, Any], Section]
"""The numbers, as ``--json`` prints them, and what is said of them."""


def score(
    files: Sequence[Path],
    *,
    peer: Sequence[Path] = (),
    lengths: Path | None = None,
    launch: Path | None = None,
    out: Path | None = None,
    workers: int | None = None,
    progress: Progress = silent,
    say: Say = silent,
) -> Answer:
    """Predict measured servers, and say how far off that is.

    Each row of FILES is a server (model, GPU, engine, precision, layout) under a load (prompt and
    output lengths, concurrency) with its mean TTFT and TPOT. Rows that are not modelled are
    counted with the reason. Finished simulations are kept for the next time.

    Few constants of the engine's host were fitted to measured servers (data/host_time.yaml). A row
    of such a server gets those that were fitted without it.

    ``peer``: other predictors' files (id, ttft_ms, tpot_ms). ``launch``: how servers with prefill
    and decode on separate workers were started (docs/pools.md); without it they are not answered.
    ``lengths``: FILES are tables of MLPerf's audited runs (docs/mlperf.md), this is the folder of
    their lengths_MODEL.csv; the capacity at their P99 limits is predicted, and latencies at their
    rate. ``out``: a folder for predictions.csv, summary.json and figures.
    """
    return _answer(files, peer, lengths, launch, out, workers, progress, say, fit=False)


def fit_host(
    files: Sequence[Path],
    *,
    peer: Sequence[Path] = (),
    lengths: Path | None = None,
    launch: Path | None = None,
    out: Path | None = None,
    workers: int | None = None,
    progress: Progress = silent,
    say: Say = silent,
) -> Answer:
    """Fit the host's constants anew to FILES, and score them on rows left out; options are those of
    ``lab score``.

    Each row is predicted from other servers' rows alone; then without its stack, its GPU, its
    model. With ``lengths`` the constants of TensorRT's engines are fitted, each system's to the
    others. ``out`` gets the constants, as data/ has them.
    """
    return _answer(files, peer, lengths, launch, out, workers, progress, say, fit=True)


def _answer(
    files: Sequence[Path],
    peers: Sequence[Path],
    lengths: Path | None,
    launch: Path | None,
    out: Path | None,
    workers: int | None,
    progress: Progress,
    say: Say,
    *,
    fit: bool,
) -> Answer:
    if lengths is not None and (launch is not None or peers):
        raise UserError("--lengths goes with MLPerf's tables alone")
    if out is not None:
        check_replaceable(out, SCORE_FORMAT)
    scored: ScoredRows | ScoredMlperf
    with closing(local_backend(workers)) as backend:
        if lengths is not None:
            scored = score_mlperf(files, lengths, backend, progress, say, fit=fit)
        else:
            scored = score_servers(files, peers, backend, progress, say, fit=fit, launch=launch)
    content = scored.content()
    section = servers_answer(content)
    if out is not None:
        with result_folder(out, SCORE_FORMAT) as folder:
            write_summary(folder, SCORE_FORMAT, content | section.words())
            write_section(folder, section)
            scored.write(folder)
            draw_score(scored, folder / "figures")
    return content | section.words(), section
