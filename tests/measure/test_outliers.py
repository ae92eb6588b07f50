"""Tokens with the largest keys. `pytest tests/measure/test_outliers.py`"""

from __future__ import annotations

import torch

from kvdrift.measure.outliers import largest_keys


def test_it_ranks_by_the_mean_of_the_worst_layer_and_not_by_the_first_place():
    tokens = torch.tensor([[5, 1, 2, 3], [6, 2, 1, 4]])
    quiet, loud = torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8)
    quiet[:, :, 0] = 100.0  # the first place, whatever the token
    loud[0, 1, 1, 3] = -9.0  # token 1, once
    loud[0, 0, 2, 0] = loud[1, 0, 1, 0] = 6.0  # token 2, both times
    assert largest_keys(tokens, [quiet, loud], 3) == [(2, 6.0), (1, 5.0), (3, 1.0)]
