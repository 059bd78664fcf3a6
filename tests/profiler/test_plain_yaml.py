"""One reader for every YAML file: what it reads, what it refuses, and with which of the parsers."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.profiler.bundle.schema import BundleError, load_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.storage import plain_yaml
from sarathi_sim.profiler.storage.files import LARGEST_FILE
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, parse_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import SpecError, UserError

PARSERS = [yaml.CSafeLoader, yaml.SafeLoader]


@pytest.fixture(params=PARSERS, ids=["libyaml", "python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_yaml, "_PARSER", request.param)


SCALARS: dict[str, object] = {
    "1:30": "1:30", "yes": "yes", "NO": "NO", "true": True, "False": False, "~": None,
    "null": None, "": None, "010": 10, "0o10": 8, "0x1F": 31, "-12": -12, "1_000": "1_000",
    "1e-3": 0.001, "1.5E+3": 1500.0, ".5": 0.5, "5.": 5.0, "-.inf": -math.inf,
    "2026-02-30": "2026-02-30", "2026-02-03T04:05:06Z": "2026-02-03T04:05:06Z", "=": "=",
    "'12'": "12",
    '"~"': "~", "{a: {b: []}}": {"a": {"b": []}}, "&anchor 7": 7, "{<<: 1}": {"<<": 1},
}  # fmt: skip


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_of_the_core_schema(text: str, value: object) -> None:
    found = parse_yaml(text, "here")
    assert found == value
    assert type(found) is type(value)
    assert math.isnan(parse_yaml(".nan", "here"))


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: !!bool foo", "line 2: not valid YAML: the tag !!bool is not allowed"),
        ("!!map {a: b}", "line 1: not valid YAML: the tag !!map is not allowed"),
        ("! 12", "line 1: not valid YAML: the tag ! is not allowed; quotes make text"),
        ("!mine a", "line 1: not valid YAML: the tag !mine is not allowed"),
        ("{!!set [a]: 1}", "line 1: not valid YAML: the tag !!set is not allowed"),
        ("a: &x [1]\nb: *x", "line 2: aliases (*name) are not allowed"),
        ("&x [*x]", "line 1: aliases (*name) are not allowed"),
        ("a: 1\nb:\n  c: 1\n  c: 1", "line 4: key 'c' is given twice"),
        ("a: 1\n'a': 1", "line 2: key 'a' is given twice"),
        ("7: a\n'7': b", "line 2: key '7' is given twice"),
        ("0.5: a", "line 1: key 0.5: keys must be text"),
        ("? [a]\n: 1", "line 1: key ['a']: keys must be text"),
        ("a: 1\n---\nb: 1", "line 2: not valid YAML: a second document begins"),
        ("a: " + "9" * 5000, "line 1: a number has more than 1000 digits"),
        ("0x" + "f" * 5000, "line 1: a number has more than 1000 digits"),
        ("a: 1\nb: [" + "[" * 100_000, "line 2: not valid YAML: nested too deeply, at most 100"),
        ("a: 1\n- b", "line 2: not valid YAML: "),
        ("a: 1\nb: \0", "line 2: not valid YAML: the character '\\x00' is not allowed"),
        ("a: \ud800", "line 1: not valid YAML: the character '\\ud800' is not allowed"),
        ('a: "\\ud800"', "line 1: not valid YAML: "),
        ("%YAML 2.0\n---\na: 1", "line 1: not valid YAML: found incompatible YAML document"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "here")
    assert str(caught.value).startswith(f"here: {problem}")
    assert "\n" not in str(caught.value)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
looks = st.from_regex(r"[-+.0-9oxeEfFaAn_:~]{1,8}", fullmatch=True)  # what may look like a number
trees = st.recursive(
    scalars | looks,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(looks | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_what_is_written_reads_back(tree: Any) -> None:
    for each in PARSERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain_yaml, "_PARSER", each)
            assert parse_yaml(dump_yaml(tree), "here") == tree


@given(st.text(max_size=60))
def test_both_parsers_agree_or_refuse(text: str) -> None:
    found = []
    for each in PARSERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain_yaml, "_PARSER", each)
            try:
                found.append(repr(parse_yaml(text, "here")))
            except SpecError as error:
                assert "\n" not in str(error)
    assert len(set(found)) <= 1


def _meta(path: Path) -> object:
    folder = path.parent / "bundle"
    folder.mkdir(exist_ok=True)
    (folder / "meta.yaml").write_bytes(path.read_bytes())
    return load_bundle(folder)


#: Kinds of YAML files, and who reads it.
DOORS: dict[str, Callable[[Path], object]] = {
    "experiment": load_experiment,
    "device": load_device,
    "model": load_model,
    "meta": _meta,
}


def test_tags_in_set() -> None:
    with pytest.raises(UserError, match=r"^--set .*: line 1: not valid YAML: the tag !!int"):
        load_experiment("gpt3_pp", ["seed={a: !!int 1}"])


LAUGHS = "".join(
    f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" if n else "l0: &l0 [x]\n" for n in range(9)
)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (LAUGHS, "line 2: aliases (*name) are not allowed"),
        ("name: a\nname: b\n", "line 2: key 'name' is given twice"),
        ("? !!set [a]\n: 1\n", "line 1: not valid YAML: the tag !!set is not allowed"),
        ("name: [\n", "line "),
        ("- a\n", "expected keys and values"),
        ("name: \udcff\n", "line 1: not valid YAML: it is not UTF-8 text"),
        ("#" * (LARGEST_FILE + 1), "holds 8,388,609 bytes: must be at most 8,388,608 (8 MiB)"),
    ],
)
def test_the_same_at_every_door(tmp_path: Path, door: str, content: str, problem: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises((UserError, SpecError, BundleError)) as caught:
        DOORS[door](path)
    text = str(caught.value)
    assert f"yaml: {problem}" in text and "\n" not in text


def test_nothing_is_read_of_a_huge_file_or_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no space
    with pytest.raises(SpecError, match="holds 1,099,511,627,776 bytes"):
        read_mapping(path)
    with pytest.raises(SpecError, match="/dev/zero: not a regular file"):
        read_mapping(Path("/dev/zero"))


def test_nested_aliases_take_no_memory(tmp_path: Path) -> None:
    """503 bytes of them took 813 MB."""
    path = tmp_path / "laughs.yaml"
    path.write_text(LAUGHS)
    tracemalloc.start()
    with pytest.raises(SpecError):
        load_device(path)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
