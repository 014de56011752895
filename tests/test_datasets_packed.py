"""Round trips of the compressed file of integer arrays."""

from __future__ import annotations

import io
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featsync.datasets import packed


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "empty": np.zeros(0, dtype=np.int64),
        "zeros": np.zeros(3, dtype=np.int64),
        "bytes": np.array([0, 255], dtype=np.uint8),
        "wide": np.array([0, 256, 2**40, 2**63 - 1]),
    }

    packed.save(tmp_path / "file.xz", arrays)
    loaded = packed.load(tmp_path / "file.xz")

    assert {name: values.tolist() for name, values in loaded.items()} == {
        name: values.tolist() for name, values in arrays.items()
    }
    assert all(values.dtype == np.int64 for values in loaded.values())


@given(st.lists(st.lists(st.integers(0, 10**6), unique=True)))
def test_deltas_of_any_lists_can_be_undone(lists):
    lists = [sorted(values) for values in lists]
    lengths = np.array([len(values) for values in lists], dtype=np.int64)
    flat = np.array([value for values in lists for value in values], dtype=np.int64)

    deltas = packed.to_deltas(lengths, flat)

    assert (deltas >= 0).all()
    assert packed.from_deltas(lengths, deltas).tolist() == flat.tolist()


def test_deltas_are_steps_within_a_list():
    deltas = packed.to_deltas(np.array([3, 0, 2]), np.array([5, 7, 8, 1, 9]))

    assert deltas.tolist() == [5, 2, 1, 1, 8]


def test_a_file_that_holds_a_pickle_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.savez(buffer, evil=np.array([object()], dtype=object))
    (tmp_path / "file.xz").write_bytes(lzma.compress(buffer.getvalue()))

    with pytest.raises(ValueError, match="allow_pickle"):
        packed.load(tmp_path / "file.xz")
