"""Feature hashing against a plain Python reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from featsync.datasets import hashed_words
from featsync.datasets.hashed_words import COLUMNS_PER_WORD, Bags, hash_rows

MASK = (1 << 64) - 1


def mix_by_hand(value):
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def row_by_hand(words, width):
    row = [0.0] * width
    for word in words:
        for salt in range(COLUMNS_PER_WORD):
            mixed = mix_by_hand(word + (salt << 32))
            row[(mixed >> 32) * width >> 32] += -1 if mixed & 1 else 1
    length = math.sqrt(sum(value * value for value in row))
    return [value * math.sqrt(width) / length if length else 0.0 for value in row]


def bags(rows):
    return Bags(
        np.array([len(row) for row in rows], dtype=np.int64),
        np.array([word for row in rows for word in row], dtype=np.int64),
    )


def test_first_number_of_splitmix64():
    # The published first output of SplitMix64 for seed 0.
    assert int(hashed_words.mix(np.zeros(1, dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("width", [1, 7, 128])
def test_rows_equal_the_reference(width):
    rows = [[1, 2**32 - 1, 12345], [], [7, 7], [99]]

    features = hash_rows([bags(rows)], width)

    assert features.dtype == np.float32
    np.testing.assert_allclose(features, [row_by_hand(row, width) for row in rows], rtol=1e-6)


def test_several_bags_of_a_row_are_one_bag(monkeypatch):
    monkeypatch.setattr(hashed_words, "_BLOCK_ELEMENTS", 16)  # blocks of two rows
    first, second = [[1], [2, 3], [], [4], [5]], [[6], [], [], [7, 8], [9]]

    features = hash_rows([bags(first), bags(second)], 8)

    together = [row_by_hand(a + b, 8) for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(features, together, rtol=1e-6)


def test_no_rows():
    assert hash_rows([bags([])], 4).shape == (0, 4)


def test_a_wide_row_folds_into_a_narrow_one():
    words = [[3, 1000, 77, 2**31], [5]]

    wide, narrow = hash_rows([bags(words)], 256), hash_rows([bags(words)], 128)

    # The column is the leading part of one hash, so two neighbours at 256 are one at 128.
    folded = wide.reshape(-1, 128, 2).sum(axis=2)
    folded *= np.sqrt(128) / np.linalg.norm(folded, axis=1, keepdims=True)
    np.testing.assert_allclose(folded, narrow, atol=1e-5)
