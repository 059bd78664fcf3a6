"""Arrays kept on disk: the same as computed ones, and never in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.simulator.op_times.cache import VARIABLE, cache_folder, cached
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.simulator.test_predictor import shipped

ARRAY = np.array([[0.1, 2**-40], [np.pi, 0.0]])


def fail() -> np.ndarray:
    raise AssertionError("computed again")


def test_an_array_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "folder"))
    assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)
    assert np.array_equal(cached("key", fail), ARRAY)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["key.2.npz"]
    with pytest.raises(AssertionError):
        cached("other", fail)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"no archive", None])
def test_a_damaged_file_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    file = tmp_path / "key.2.npz"
    if content is None:  # objects would have to be unpickled
        np.savez(file, array=np.array([{}], dtype=object))
    else:
        file.write_bytes(content)
    assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)
    assert np.array_equal(cached("key", fail), ARRAY)


def test_a_file_with_any_byte_changed_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags and methods of the archive among them, which zipfile answers in ways of their own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    file = tmp_path / "key.2.npz"
    cached("key", lambda: ARRAY)
    good = file.read_bytes()
    for place in range(len(good)):
        for change in (0x01, 0xFF):
            file.write_bytes(good[:place] + bytes([good[place] ^ change]) + good[place + 1 :])
            assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)


def other_content(array: np.ndarray) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        with np.load(file) as stored:
            digest = stored["sha256"]
        np.savez(file, array=array, sha256=digest)

    return write


@pytest.mark.parametrize(
    "damage",
    [
        other_content(ARRAY[:1]),
        other_content(ARRAY.reshape(4)),
        other_content(ARRAY * 2),
        other_content(ARRAY.astype(np.float32)),
        lambda file: np.savez(file, array=ARRAY),
        lambda file: file.write_bytes(file.with_name("other.2.npz").read_bytes()),
    ],
    ids=["a row less", "another shape", "other values", "another type", "no hash", "another's"],
)
def test_another_content_is_found_out_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    cached("key", lambda: ARRAY)
    cached("other", lambda: ARRAY + 1)
    assert caplog.messages == []
    damage(tmp_path / "key.2.npz")
    assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)
    (message,) = caplog.messages
    assert str(tmp_path / "key.2.npz") in message and "computed anew" in message
    assert "\n" not in message
    assert np.array_equal(cached("key", fail), ARRAY)


def test_it_can_be_switched_off_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert cache_folder() is None
    assert cached("key", lambda: ARRAY) is ARRAY
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    assert cached("key", lambda: ARRAY) is ARRAY
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sarathi-sim"


def test_times_are_the_same_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, lazily tabulated chunks included; a hit fits nothing."""
    bundle, _ = shipped("a6000", "llama-13b", 1)

    def tables(ops: OpTimes) -> list[object]:
        predict = BundlePredictor(ops, max_tokens=64, max_length=512, max_batch=4)
        predict._tabulate_chunks(40)
        return [predict._whole, predict._decode_rows, predict._chunk_rows, predict._by_tokens]

    monkeypatch.setenv(VARIABLE, "off")
    without = tables(bundle_times(bundle))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert tables(bundle_times(bundle)) == without
    again = bundle_times(bundle)
    assert tables(again) == without
    assert "_surface" not in vars(again.prefill) and "_surface" not in vars(again.decode)
