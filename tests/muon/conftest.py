"""One seed for every test here: the figures must not vary."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)
