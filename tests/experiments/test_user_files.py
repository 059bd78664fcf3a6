"""Every file that a user names goes through one opener: pipes, devices, gzip, giant numbers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest

from sarathi_sim.experiments import cli
from sarathi_sim.experiments.report.render import consoles
from sarathi_sim.experiments.results import read_summary, result_folder
from sarathi_sim.profiler.storage.files import LARGEST_FILE, open_file, read_bounded
from sarathi_sim.profiler.storage.folder_lock import held, is_held
from sarathi_sim.profiler.storage.strict import SpecError, UserError
from tests.experiments.small_config import ROOT, SMALL, Write, called, refused
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """A command that waits for a writer, or reads without end, ends here: with a failure."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.parametrize(
    "words",
    [
        "score {} --config score_llama70b_a100_tp8",
        "lab score {}",
        "lab score {table} --peer {}",
        "lab lockstep {}",
        "workload {}.csv",
        "run --dry-run {config} --set policy={{file:\u00a0{},name:\u00a0x}}",
    ],
)
def test_pipes_and_devices_are_refused(
    write_config: Write, tmp_path: Path, words: str, kind: str
) -> None:
    for name in ("pipe", "pipe.csv", "pipe.yaml"):
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to(kind)
    table = tmp_path / "table.csv"
    needed = "id,backend,model,system,isl,osl,concurrency,ttft_ms,tpot_ms"
    table.write_text(f"{needed}\na,vllm,m,s,1,2,1,1,1\n")
    names = {"table": table, "config": write_config(SMALL)}
    call = [
        word.format(tmp_path / "pipe", **names).replace("\u00a0", " ") for word in words.split(" ")
    ]
    assert "not a regular file" in refused(*call)


def test_the_opener(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_bounded(tmp_path / "file") == b"content"
    assert read_bounded(tmp_path / "file", 7) == b"content"
    with pytest.raises(SpecError, match=r"file: holds 7 bytes: must be at most 6$"):
        read_bounded(tmp_path / "file", 6)
    with pytest.raises(SpecError, match="No such file"):
        open_file(tmp_path / "none")
    for odd in (tmp_path, Path("/dev/null")):
        with pytest.raises(SpecError, match="not a regular file"):
            open_file(odd)
    with pytest.raises(SpecError, match="is no name of a file"):
        open_file(Path("a\0b"))
    with pytest.raises(SpecError, match=r"^'two\\nlines': No such file or directory$"):
        open_file(Path("two\nlines"))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(SpecError, match=r"\(8 MiB\)$"):
        read_bounded(tmp_path / "large")


def test_a_number_of_400_digits_in_a_summary(result: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(result, folder)
    summary = json.loads((folder / "summary.json").read_text())
    for numbers in summary["scenarios"].values():
        numbers["makespan_s"] = 10**400
    (folder / "summary.json").write_text(json.dumps(summary))
    assert read_summary(folder) == {}
    for command in ("report", "plot"):
        line = refused(command, folder, "--out", tmp_path / f"{command}.html")
        assert str(folder) in line


def test_an_out_that_cannot_be_written_names_the_option(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", write_config(SMALL), "--no-figures", "--quiet", "--out")
    for out in ("x" * 300, "x" * 300 + "/y"):
        line = refused(*words, out)
        assert line.startswith("error: --out 'xxx")
        assert "File name too long" in line and "Errno" not in line

    def fail(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", fail)
    line = refused(*words, tmp_path / "out")
    assert line.startswith(f"error: --out {tmp_path / 'out'}: Read-only file system")


def test_one_command_at_a_time_writes_a_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with result_folder(out) as first:
        (first / "a").write_text("first")
        with (
            pytest.raises(UserError, match=r"--out .*out: another command is writing this"),
            result_folder(out),
        ):
            raise AssertionError("two at a time")
        with result_folder(tmp_path / "out.b") as other:
            (other / "b").write_text("another folder")
    assert (out / "a").read_text() == "first"
    with result_folder(out) as again:
        (again / "a").write_text("second")
    assert (out / "a").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.b"]
    assert not is_held(out) and not is_held(tmp_path / "none")
    with held(out):
        assert is_held(out)
    assert not is_held(out)


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_failure() -> None:
    command = f"{sys.executable} -m sarathi_sim list support | head -1 > /dev/null; "
    words = ["bash", "-c", command + "echo ${PIPESTATUS[0]}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.slow
def test_names_beyond_ascii_in_the_locale_c(write_config: Write, tmp_path: Path) -> None:
    folder = tmp_path / "f\u00fcnf"
    folder.mkdir()
    shutil.copy(write_config(SMALL), folder / "k\u00e4se.yaml")
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sarathi_sim", "run", "k\u00e4se.yaml", "--no-figures"]
    command += ["--quiet", "--out", "\u00e9"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    assert (folder / "\u00e9/summary.json").is_file()


# Encodings and terminals; commands that are interrupted -----------------------------------------


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
