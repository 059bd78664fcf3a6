"""Device files: what is there, and what a mistake in one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.storage.strict import SpecError


def test_every_shipped_device_loads_under_its_own_name() -> None:
    assert list_devices() == [
        *("a100-40g-sxm", "a100-80g-sxm", "a40", "a6000", "b200-sxm", "b300-sxm", "gb200"),
        *("h100-80g-sxm", "h200-sxm", "l40s", "rtx-4090", "rtx-pro-6000"),
    ]
    assert [load_device(name).name for name in list_devices()] == list_devices()


def test_memory_is_decimal_as_on_the_data_sheet() -> None:
    assert load_device("a100-80g-sxm").memory_bytes == 80e9
    assert load_device("a6000").memory_bytes == 48e9


def test_what_the_driver_reports_is_another_number() -> None:
    assert load_device("rtx-4090").reported_bytes == 25_250_627_584
    assert load_device("a100-80g-sxm").reported_bytes == pytest.approx(79.15 * 2**30, rel=1e-3)
    for name in list_devices():
        assert load_device(name).reported_bytes is not None, name


def test_unknown_device_names_a_close_one() -> None:
    with pytest.raises(SpecError, match=r"did you mean a100-80g-sxm\?"):
        load_device("a100-80g")


@pytest.mark.parametrize("name", ["a100-40g-sxm", "h100-80g-sxm", "h200-sxm", "rtx-4090"])
def test_device_with_specifications_only_refuses_to_predict(name: str) -> None:
    with pytest.raises(SpecError, match=f"device {name} has specifications only"):
        load_device(name).op("gemm")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_sms", "sms", r"mine\.yaml: sms: unknown key.*\n?.*num_sms"),
        ("num_sms: 132", "num_sms: many", "num_sms: value 'many': must be a whole number"),
        ("num_sms: 132", "num_sms: 0", "num_sms must be positive, got 0"),
        ("4800.0e+9", ".nan", "memory_bandwidth"),
        (
            "bandwidth: 450.0e+9",
            "bandwith: 1.0",
            r"intra_node\.bandwith: unknown key \(did you mean bandwidth\?\)",
        ),
    ],
)
def test_mistakes_in_a_device_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    from sarathi_sim.profiler.storage.files import data_dir

    text = (data_dir() / "devices" / "h200-sxm.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError, match=message) as caught:
        load_device(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("7: x", "line 1: key 7: keys must be text"),
        ("notes: &a [*a]", r"line 1: aliases \(\*name\) are not allowed"),
        ("notes: " + "[" * 3000, "line 1: not valid YAML: nested too deeply, at most 100 levels"),
    ],
)
def test_odd_yaml_is_one_message(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(line + "\n")
    with pytest.raises(SpecError, match=f"odd.yaml: {message}"):
        load_device(path)
