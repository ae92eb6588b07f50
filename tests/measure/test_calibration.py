"""Channel ranges, and tokens with the largest keys. `pytest tests/measure/test_calibration.py`"""

from __future__ import annotations

import pytest
import torch

from kvdrift.measure.calibration import channel_range, largest_keys


def test_a_range_spans_all_batches_channel_by_channel():
    first, second = torch.zeros(2, 1, 3, 2), torch.zeros(1, 1, 5, 2, dtype=torch.bfloat16)
    first[1, 0, 2] = torch.tensor([-4.0, 1.0])
    second[0, 0, 4] = torch.tensor([3.0, 0.5])
    low, high = channel_range([first, second], "keys of layer 0")
    assert (low.tolist(), high.tolist()) == ([[-4.0, 0.0]], [[3.0, 1.0]])


def test_case_11_a_warm_up_batch_of_zeros_is_no_calibration():
    """Case 11: it would give a scale of 1, or none, without a word."""
    with pytest.raises(ValueError, match="values of layer 3 are constant on all calibration prompts"):
        channel_range([torch.zeros(2, 3, 16, 8), torch.zeros(1, 3, 16, 8)], "values of layer 3")


def test_it_ranks_by_the_mean_of_the_worst_layer_and_not_by_the_first_place():
    tokens = torch.tensor([[5, 1, 2, 3], [6, 2, 1, 4]])
    quiet, loud = torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8)
    quiet[:, :, 0] = 100.0  # the first place, whatever the token
    loud[0, 1, 1, 3] = -9.0  # token 1, once
    loud[0, 0, 2, 0] = loud[1, 0, 1, 0] = 6.0  # token 2, both times
    assert largest_keys(tokens, [quiet, loud], 3) == [(2, 6.0), (1, 5.0), (3, 1.0)]
