"""What comes in by the other doors than YAML's grammar: one line and exit code 2, soon. And
whatever is in a file, a message or a result.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.sweeps.plan import plan_sweep
from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import TABLES, BundleError, _content_sha256, load_bundle
from sarathi_sim.profiler.bundle.tables import read_table
from sarathi_sim.profiler.storage.files import data_dir, user_path
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import SpecError, UserError
from tests.experiments.small_config import ROOT, SMALL, Write, called, refused
from tests.experiments.small_sweep import SWEEP
from tests.sampled import profile_folder

ALONE = SMALL[: SMALL.index("scenarios:")]


@pytest.mark.parametrize(
    "assignment", ["seed=3", "workload.requests=3", "scenarios.a.seed=3", "compare={}"]
)
@pytest.mark.parametrize("scenarios", ["5", "true", "[a, b]", "text"])
def test_scenarios_that_are_none(write_config: Write, scenarios: str, assignment: str) -> None:
    path = write_config(f"{ALONE}scenarios: {scenarios}\n")
    assert "scenario" in refused("run", "--dry-run", path, "--set", assignment)


TRACE = "workload={{lengths: {{kind: trace, path: {}}}}}"
PATHS = ["model={}", "device={}", "profiles={}", TRACE]


@pytest.mark.parametrize("form", PATHS)
@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("~nosuch/x", "~nosuch/x: there is no home folder ~nosuch"),
        ("~nosuch/x.yaml", "~nosuch/x.yaml: there is no home folder ~nosuch"),
        (r'"a\0b"', "must not hold the character NUL"),
        (r'"a\0b.yaml"', "must not hold the character NUL"),
    ],
)
def test_a_place_that_cannot_be(write_config: Write, form: str, place: str, problem: str) -> None:
    line = refused("run", "--dry-run", write_config(SMALL), "--set", form.format(place))
    assert problem in line and "--set " in line


def test_a_home_means_the_same_everywhere(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CONFIG, in CONFIG and in ``--set``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    for kind, name in (("models", "gpt3-175b"), ("devices", "a100-80g-sxm")):
        shutil.copy(data_dir() / kind / f"{name}.yaml", tmp_path / "mine" / f"{name}.yaml")
    (tmp_path / "mine" / "profiles").symlink_to(
        profile_folder("a100-80g-sxm", "gpt3-175b", 8).parents[2]
    )
    home = ALONE.replace("gpt3-175b", "~/mine/gpt3-175b.yaml").replace(
        "a100-80g-sxm", "~/mine/a100-80g-sxm.yaml\nprofiles: ~/mine/profiles"
    )
    shutil.copy(write_config(home), tmp_path / "mine" / "config.yaml")
    assignments = ["--set", "model=~/mine/gpt3-175b.yaml", "--set", "profiles=~/mine/profiles"]
    for more in ([], [*assignments, "--set", "device=~/mine/a100-80g-sxm.yaml"]):
        called("run", "--dry-run", "~/mine/config.yaml", *more)
    assert user_path("~/x") == tmp_path / "x"
    with pytest.raises(SpecError, match=r"a folder of this name is \./~nosuch"):
        user_path("~nosuch/x")


KEYS = ["seed", "cluster.pp", "cluster.tp", "cluster.max_length", "batching.max_batch"]
KEYS += ["workload.requests", "workload.pd_ratio"]
MANY = f"grid: {{{', '.join(f'{key}: {{from: 1, to: 2000, step: 1}}' for key in KEYS)}}}"
WIDE = f"grid: {{{', '.join(f'k{n}: {{from: 1, to: 2, num: 100000}}' for n in range(3000))}}}"
LONG = ".".join("a" * 5000)


def gamma(cv: str) -> str:
    return f"workload.arrivals={{kind: gamma, rate: 1, cv: {cv}}}"


def seeds(axis: str) -> str:
    return f"sweep={{grid: {{seed: {{{axis}}}}}}}"


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        (gamma("1.0e-300"), "--set workload.arrivals.cv: value 1e-300: must be at least 0.001"),
        (gamma("1000"), "--set workload.arrivals.cv: value 1000: must be at most 10"),
        (f"{LONG}=1", "expected KEY.PATH=VALUE"),
        (f"sweep={{grid: {{{LONG[:801]}: [1]}}}}", "is not a key path"),
        (TRACE.format("~nosuch/x"), "lengths.path: ~nosuch/x: there is no home folder ~nosuch"),
        (seeds("from: 1, to: 2, step: 1.0e-320"), "too small for a range from 1 to 2, which may"),
        (seeds("from: 0, to: 1.0e+12, step: 1"), "which may have at most 200000 values"),
        (seeds("from: 0, to: 1.0e+308, step: 1"), "to: value 1e+308: must be at most 1e+12"),
        (seeds("from: 0, to: 1, step: 1.0e+308"), "step: value 1e+308: must be at most 2e+12"),
        (seeds("from: 5, to: 5, num: 3"), "the range has 3 values, but 5 more than once"),
        (seeds("from: 1, to: 1.00000000000001, num: 4"), "has 4 values, but 1 more than once"),
        (f"sweep={{sample: {{points: 3}}, {MANY}}}", "more than 10^21 points: at most 9,223,372"),
        (f"sweep={{{WIDE}}}", "its keys have more than 200,000 values together"),
    ],
    ids=lambda text: text[-60:],
)
def test_values_that_are_none(write_config: Write, assignment: str, problem: str) -> None:
    path = write_config(ALONE.replace("  pd_ratio: 5\n", "") if "trace" in assignment else ALONE)
    line = refused("sweep", "--dry-run", path, "--set", assignment)
    assert problem in line
    assert "sweep.grid.seed" in line or not assignment.startswith("sweep={grid: {seed: ")


def test_long_lists_and_long_values(write_config: Write) -> None:
    """They are compared soon, mistakes are counted, and megabytes are not repeated."""
    values = ", ".join(map(str, range(150_000)))
    path = write_config(f"{ALONE}sweep: {{grid: {{seed: [{values}, 0]}}}}\n")
    assert "sweep.grid.seed: value 0: is given twice" in refused("sweep", "--dry-run", path)
    path = write_config(f"{ALONE}sweep: {{seeds: [{'a, ' * 5000}]}}\n")
    lines = called("sweep", "--dry-run", path, code=2).stderr.splitlines()
    assert len(lines) == 21
    assert lines[-1].endswith("... and 4980 more mistakes")
    line = refused(
        "run", "--dry-run", write_config(ALONE.replace("seed: 7", f"seed: {'x' * 2_000_000}"))
    )
    assert line.endswith("must be a whole number")
    assert len(line) < 5000


def spoilt(tmp_path: Path, time: str) -> Path:
    """A root of profiles whose bundle is the shipped one, but for one time."""
    root = tmp_path / "profiles"
    shipped = profile_folder("a100-80g-sxm", "gpt3-175b", 8)
    bundle = root / "a100-80g-sxm" / "gpt3-175b" / "tp8"
    shutil.copytree(shipped, bundle)
    csv, meta = bundle / "linear.csv", bundle / "meta.yaml"
    before = _content_sha256(bundle)
    lines = csv.read_text().splitlines(keepends=True)
    row = next(n for n, line in enumerate(lines) if line.startswith("ffn_ln1,256,"))
    lines[row] = f"ffn_ln1,256,{time}\n"
    csv.write_text("".join(lines))
    text = meta.read_text()
    assert before in text
    meta.write_text(text.replace(before, _content_sha256(bundle)))
    return root


@pytest.mark.parametrize(
    ("time", "problem"),
    [
        ("1e308", "time_us must be from 1e-06 to 1e+09, got '1e308'"),
        ("1e-308", "time_us must be from 1e-06 to 1e+09, got '1e-308'"),
        ("1e7", "ffn_ln1: impossible: 1e+07 us at num_tokens=256, after 1"),
        ("1e-3", "ffn_ln1: faster than the device can: 0.001 us at num_tokens=256"),
    ],
)
def test_a_run_applies_the_errors_of_fit(
    write_config: Write, tmp_path: Path, time: str, problem: str
) -> None:
    root = spoilt(tmp_path, time)
    path, out = write_config(ALONE), tmp_path / "out"
    for command in (
        ["run", path, "--out", out],
        ["run", "--dry-run", path],
        ["sweep", "--dry-run", path],
    ):
        line = refused(*command, "--set", f"profiles={root}")
        assert "--set profiles: " in line
        assert problem in line
    assert not out.exists()
    assert problem in called("fit", root / "a100-80g-sxm" / "gpt3-175b" / "tp8", code=2).output


def test_warnings_about_a_bundle_do_not_keep_a_run_from_starting(
    write_config: Write, tmp_path: Path
) -> None:
    root = spoilt(tmp_path, "900")
    findings = check_folder(root / "a100-80g-sxm" / "gpt3-175b" / "tp8").findings
    assert any("outlier: 900 us at num_tokens=256" in found.message for found in findings)
    called("run", "--dry-run", write_config(ALONE), "--set", f"profiles={root}")


class Untold(Exception):
    def __str__(self) -> str:
        raise KeyError("no message")


@pytest.mark.parametrize(
    ("fault", "named", "code"),
    [
        (MemoryError(), "out of memory", 2),
        (OverflowError("(34, 'Numerical\nresult out of range')"), "OverflowError: (34, 'Num", 70),
        (Untold(), "Untold; ", 70),
        (SystemExit(3), "SystemExit: 3", 70),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), "/a/b: Read-only file system", 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_of_ours_is_one_line_and_70(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, named: str, code: int
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr("sarathi_sim.experiments.config.loading.load_experiment", fail)
    (line,) = called("run", "--dry-run", "gpt3_pp", code=code).stderr.splitlines()
    assert line.startswith(f"error: {named}")
    assert ("a bug in sarathi-sim, not your mistake: please report it" in line) == (code == 70)
    for arguments, variable in (
        (["--debug", "run", "--dry-run", "gpt3_pp"], None),
        (["run", "--dry-run", "gpt3_pp"], "1"),
    ):
        done = CliRunner().invoke(app, arguments, env={"SARATHI_SIM_DEBUG": variable})
        assert done.exit_code == code
        assert done.stderr.startswith("Traceback (most recent call last)")
        assert "in fail" in done.stderr
        assert done.stderr.splitlines()[-1] == line


def test_a_wrong_option_is_typers_and_its_value_not_repeated_whole() -> None:
    for arguments in (
        ["run", "gpt3_pp", f"--{'x' * 5000}"],
        ["sweep", "pd_sweep", "--workers", "9" * 5000],
        [f"--{'x' * 5000}"],
        ["x" * 5000],
    ):
        assert len(called(*arguments, code=2).stderr) < 1500, arguments
    said = called("run", "--dry-run", "gpt3_pp", "--sett", "a=1", code=2).stderr
    assert "Usage:" in said and "No such option" in said


# Whatever is in a file --------------------------------------------------------------------------


# Digits are left out: a longer number of requests is not a mistake, it only takes long.
edits = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 12),
        st.text(alphabet=" \n\t:{}[],-&*!|>'\"#%@`?~abexXnul.é\x00\ud800", max_size=6),
    ),
    min_size=1,
    max_size=4,
)


same_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120
)


def edited(text: str, changes: list[tuple[int, int, str]]) -> bytes:
    for place, cut, new in changes:
        place %= len(text) + 1
        text = text[:place] + new + text[place + cut :]
    return text.encode("utf-8", "surrogatepass")


@given(edits)
@example([(0, 0, "\x00")])
@same_folder
def test_a_damaged_sweep_file(tmp_path: Path, changes: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(edited(SWEEP, changes))
    for read in (plan_sweep, load_experiment):
        with contextlib.suppress(UserError):
            read(path)


@given(st.sampled_from(sorted(TABLES)), edits)
@same_folder
def test_a_damaged_profile(tmp_path: Path, name: str, changes: list[tuple[int, int, str]]) -> None:
    shipped = profile_folder("a100-80g-sxm", "gpt3-175b", 8) / f"{name}.csv"
    if shipped.is_file():
        lines = shipped.read_text(encoding="utf-8").splitlines(keepends=True)[:60]
    else:  # a table that only measured bundles have
        columns = (*TABLES[name].columns, *TABLES[name].extras)
        lines = [
            ",".join(row) + "\n"
            for row in (columns, *(map(str, [i] * len(columns)) for i in (1, 2)))
        ]
    path = tmp_path / f"{name}.csv"
    path.write_bytes(edited("".join(lines), changes))
    with contextlib.suppress(BundleError):
        read_table(path, TABLES[name])


def test_a_row_with_more_cells_than_the_header(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.csv"
    path.write_text("num_bytes,time_us\n1024,2.0,5\n2048,3.0,5\n")
    with pytest.raises(BundleError, match="more cells than the header"):
        read_table(path, TABLES["all_reduce"])


@pytest.mark.parametrize("name", ["object/apply:os.system", "name:os.system", "object/new:os.x"])
def test_no_tag_is_executed(tmp_path: Path, name: str) -> None:
    proof, path = tmp_path / "proof", tmp_path / "meta.yaml"
    path.write_text(f"name: x\nmodel: !!python/{name} ['touch {proof}']\n")
    for read, place in ((plan_sweep, path), (read_mapping, path), (load_bundle, tmp_path)):
        with pytest.raises((UserError, SpecError), match="not valid YAML"):
            read(place)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["../../escape", "/escape", "a/b", "..", ".hidden", "a\\b"])
def test_no_name_leaves_the_output_folder(name: str) -> None:
    tree = yaml.safe_load(SWEEP)
    for change in ({"name": name}, {"scenarios": {name: tree["scenarios"]["orca"]}}):
        with pytest.raises(UserError, match="letters, digits"):
            plan_sweep(tree | change)


def test_nothing_unpickles() -> None:
    reads = re.compile(
        r"^\s*(import|from) (pickle|dill|shelve)\b|read_pickle|allow_pickle=True|joblib\.load", re.M
    )
    for package in ("policies", "profiler", "simulator", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            assert not reads.search(path.read_text(encoding="utf-8")), path
