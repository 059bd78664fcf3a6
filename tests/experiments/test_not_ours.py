"""What a command did not write itself it neither deletes nor overwrites: exit code 2, and why."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from sarathi_sim.profiler.bundle.schema import BundleError, bundle_path, load_bundle, write_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.measuring.measure import asked_for, missing_degrees
from sarathi_sim.profiler.measuring.to_bundle import write_device
from sarathi_sim.profiler.planning.grid import Limits, Settings
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import SMALL, Write, called, refused
from tests.experiments.small_sweep import tree
from tests.sampled import device_bundle, profile_folder


def put(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def untouched(folder: Path, *words: object) -> str:
    """The line of a command that is refused, and leaves the folder as it is."""
    before = tree(folder)
    line = refused(*words)
    assert tree(folder) == before
    return line


@pytest.fixture
def swept(tiny_sweep: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_sweep, tmp_path / "out"))


def resumed(config: Path, out: Path) -> tuple[object, ...]:
    return "sweep", config, "--out", out, "--resume", "--workers", 1


def test_a_sweep_is_not_resumed_in_a_folder_that_only_looks_like_one(
    tmp_path: Path, tiny_config: Path
) -> None:
    out = tmp_path / "precious"
    for name in ("runs/.git/HEAD", "runs/notes.md", "failed/thesis.txt", "summary.json", "lock"):
        put(out / name)
    put(out / "results.parquet")
    for flags in ([], ["--resume"]):
        line = untouched(out, "sweep", tiny_config, "--out", out, "--workers", 1, *flags)
        assert "exists and is not an earlier" in line and "runs/.git/HEAD" in line
        assert "failed/thesis.txt" in line
        assert "--resume" not in line, "nobody is invited to try that"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("runs/.git/HEAD", "not ours: runs/.git/HEAD"),
        ("runs/notes.md", "not ours: runs/notes.md"),
        ("failed/notes.txt", "not ours: failed/notes.txt"),
        ("analysis.ipynb", "not ours: analysis.ipynb"),
        ("summary.json", "changed: summary.json"),
        ("results.parquet", "changed: results.parquet"),
        ("lock", "lock: is not a lock of ours"),
    ],
)
def test_a_resumed_sweep_touches_only_what_is_its_own(
    tiny_config: Path, swept: Path, name: str, named: str
) -> None:
    put(swept / name)
    assert named in untouched(swept, *resumed(tiny_config, swept))


def test_figures_in_a_sweep_are_no_obstacle_and_stay(tiny_config: Path, swept: Path) -> None:
    put(swept / "figures" / "mine.svg")
    before = tree(swept)
    called(*resumed(tiny_config, swept))
    assert tree(swept) == before


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("orca/analysis.ipynb", "not ours: orca/analysis.ipynb"),
        ("figures/mine.svg", "not ours: figures/mine.svg"),
        ("orca/.git/objects/ab/cd", "not ours: orca/.git/objects/ab/cd"),
        ("config.yaml", "changed: config.yaml"),
        ("orca/ledger.csv", "changed: orca/ledger.csv"),
    ],
)
def test_a_result_with_a_file_of_the_users_is_not_replaced(
    write_config: Write, copy: Path, name: str, named: str
) -> None:
    put(copy / name)
    words = ("run", write_config(SMALL), "--out", copy, "--no-figures", "--quiet")
    assert named in untouched(copy, *words)


@pytest.mark.slow
def test_figures_with_a_file_of_the_users_are_not_replaced(
    copy: Path, plotted: Path, tiny_sweep: Path, tmp_path: Path
) -> None:
    """Of a run, and of a sweep: ours alone are replaced."""
    out = Path(shutil.copytree(plotted, tmp_path / "plotted"))
    called("plot", copy, "--out", out)
    put(out / "figures" / "mine.svg")
    assert "not ours: figures/mine.svg" in untouched(out, "plot", copy, "--out", out)
    out = tmp_path / "figures"
    for _ in range(2):
        called("plot", tiny_sweep, "--out", out)
    put(out / "mine.svg")
    put(out / "cdf.svg")
    line = untouched(out, "plot", tiny_sweep, "--out", out)
    assert "changed: cdf.svg" in line and "not ours: mine.svg" in line


# profiles -----------------------------------------------------------------------------------------


def test_a_bundle_with_a_file_of_the_users_and_no_bundle_are_not_replaced(tmp_path: Path) -> None:
    root = tmp_path / "P"
    bundle = written(root)
    assert written(root) == bundle, "ours is replaced"
    put(bundle / "raw" / "nsight.rep")
    put(bundle / "linear.csv")
    before = tree(root)
    for force in (False, True):
        with pytest.raises(BundleError, match=r"changed: linear.csv.*not ours: raw/nsight.rep"):
            written(root, force=force)
        assert tree(root) == before
    put(tmp_path / "Q" / "a6000" / "tiny-llama-40m" / "tp1" / "thesis.tex")
    with pytest.raises(BundleError, match=r"not an earlier result.*thesis.tex"):
        written(tmp_path / "Q")
    assert tree(tmp_path / "Q") == {"a6000/tiny-llama-40m/tp1/thesis.tex": b"mine"}


def written(
    root: Path,
    device: str = "a6000",
    source: Literal["measured", "modelled"] = "modelled",
    force: bool = False,
    **facts: str | int | float,
) -> Path:
    bundle = device_bundle("a6000", load_model("tiny-llama-40m"), 1)
    meta = replace(bundle.meta, device=device, source=source, environment=facts)
    path = bundle_path(root, device, bundle.meta.model, 1)
    write_bundle(replace(bundle, meta=meta), path, force=force)
    return path


def measured(root: Path, device: str, **facts: str | int | float) -> Path:
    return written(root, device, "measured", **facts)


def test_a_measured_bundle_is_replaced_only_with_force(tmp_path: Path) -> None:
    bundle = measured(tmp_path, "a6000")
    before = tree(tmp_path)
    with pytest.raises(BundleError, match=r"measured bundle.*--force"):
        written(tmp_path)
    assert tree(tmp_path) == before
    assert written(tmp_path, force=True) == bundle
    assert load_bundle(bundle).meta.source == "modelled"
    assert written(tmp_path) == bundle, "what is modelled needs no force"


def measuring(out: Path, **more: Any) -> Settings:
    limits = Limits(max_tokens=64, max_context=64, max_batch=4)
    model = load_model("tiny-llama-40m")
    return Settings(
        model=model, tps=(1, 2), device="cpu", dtype="float32", out=out, limits=limits, **more
    )


def test_the_same_measurement_goes_on_and_another_one_needs_force(tmp_path: Path) -> None:
    """Killed in the second degree: the first is neither lost nor measured again."""
    identities: dict[int, dict[str, object]] = {tp: {"tp": tp, "torch": "2"} for tp in (1, 2)}
    settings, said = measuring(tmp_path), list[str]()
    bundle = measured(tmp_path, "cpu", settings=asked_for(settings, identities[1]))
    assert missing_degrees(settings, "cpu", identities, said.append) == [2]
    assert said == ["tp 1: measured already; --force measures it again"]
    with pytest.raises(UserError, match=r"tp1: holds a measured bundle.*--force"):
        missing_degrees(measuring(tmp_path, target=0.01), "cpu", identities, said.append)
    with pytest.raises(UserError, match=r"tp1: holds a measured bundle.*--force"):
        missing_degrees(settings, "cpu", {1: {"tp": 1, "torch": "3"}}, said.append)
    forced = measuring(tmp_path, force=True)
    assert missing_degrees(forced, "cpu", identities, said.append) == [1, 2]
    (bundle / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"not ours: notes\.md"):
        missing_degrees(forced, "cpu", identities, said.append)


def test_a_device_file_of_the_users_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text("name: mine\n")
    for name in ("cpu", "other"):
        measured(tmp_path, name)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"cpu\.yaml: is not in manifest\.json"):
        missing_degrees(measuring(tmp_path), "cpu", {}, print)
    with pytest.raises(UserError, match=r"cpu\.yaml: is not in manifest\.json"):
        write_device(tmp_path, "cpu", 1e9, 1e9, 4, 1, "a machine")
    assert tree(tmp_path) == before
    for units in (4, 8):
        write_device(tmp_path, "other", 1e9, 1e9, units, 1, "a machine")
    assert load_device(tmp_path / "other.yaml").num_sms == 8
    assert (tmp_path / "cpu.yaml").read_text() == "name: mine\n"


# --json and --out ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("lab", "reproduce", "--json", "FILE"),
        ("lab", "reproduce", "tp_batch", "--out", "FILE"),
        ("lab", "accuracy", "--json", "FILE"),
        ("lab", "accuracy", "--datasets", ".", "--out", "FILE"),
        ("run", "first_experiment", "--out", "FILE"),
        ("fit", str(profile_folder("a6000", "llama-13b", 1)), "--out", "FILE"),
    ],
)
def test_a_file_is_not_overwritten(tmp_path: Path, words: tuple[str, ...]) -> None:
    put(keep := tmp_path / "keep.json")
    called(*(keep if word == "FILE" else word for word in words), code=2)
    assert tree(tmp_path) == {"keep.json": b"mine"}


# where --out leads --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_out_on_a_loop_of_links(tmp_path: Path, tiny_config: Path, name: str) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    config = tiny_config if name == "sweep" else "first_experiment"
    for out in (tmp_path / "a", tmp_path / "a" / "below"):
        assert "its links lead in a circle" in refused(name, config, "--out", out)


def test_out_through_a_link_is_written_where_it_leads(write_config: Write, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "there")
    for _ in range(2):
        called("run", write_config(SMALL), "--out", link, "--no-figures", "--quiet")
    assert link.is_symlink()
    assert (tmp_path / "there" / "summary.json").is_file()
