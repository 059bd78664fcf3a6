"""Output on narrow terminals and in encodings other than UTF-8; commands that are interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from sarathi_sim.experiments import cli
from sarathi_sim.experiments.report.render import consoles
from tests.experiments.small_config import ROOT, called
from tests.patience import PATIENCE_S


def test_tables_are_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert [console.width for console in consoles()] == [72, 72]
    monkeypatch.delenv("COLUMNS")
    assert consoles()[0].width == 10_000


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_interrupted_runs_leave_nothing(
    result: Path, tmp_path: Path, number: signal.Signals, code: int, message: str
) -> None:
    """Stopped while it writes: the figures take longer than all the rest of this run.

    It is the run of ``result``, whose op times are kept already.
    """
    words = ["run", str(result / "config.yaml"), "--out", str(tmp_path / "a")]
    with subprocess.Popen(
        [sys.executable, "-m", "sarathi_sim", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while process.poll() is None and not any(tmp_path.glob(".a.*/figures")):
            sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors.strip()) == (code, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "interrupted\n")],
)
def test_a_signal_counts_whatever_it_was_turned_into(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, message: str
) -> None:
    """Compiled code, such as numpy's, may raise an error of its own when it is interrupted."""

    def load(*_: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raise TypeError("Cannot compare structured arrays") from error

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("sarathi_sim.experiments.config.loading.load_experiment", load)
    monkeypatch.setattr(cli, "signals_received", [])
    cli.end_on_signals()
    try:
        done = called("run", "--dry-run", "gpt3_pp", code=code)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert done.stderr == message
