"""Tap ids are 0-based decoder layers; both libraries count the same stream one higher."""

from __future__ import annotations

import pytest

from dflash2_train.taps import check_taps, hf_hidden_state_index, vllm_layer_id


def test_a_tap_is_the_stream_after_its_layer_in_both_libraries() -> None:
    assert [hf_hidden_state_index(tap) for tap in (0, 2, 29)] == [1, 3, 30]
    assert [vllm_layer_id(tap) for tap in (0, 2, 29)] == [1, 3, 30]


@pytest.mark.parametrize("taps", [[], [-1, 2], [0, 4], [2, 1], [1, 1]])
def test_taps_out_of_range_repeated_or_unsorted_are_refused(taps: list[int]) -> None:
    with pytest.raises(ValueError, match="taps="):
        check_taps(taps, num_layers=4)


def test_every_layer_of_the_target_can_be_tapped() -> None:
    check_taps([0, 1, 2, 3], num_layers=4)
