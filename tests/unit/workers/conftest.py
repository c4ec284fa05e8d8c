"""In-process tests of workers run like workers on any processor, with reproducible random numbers in any order."""

import random

import numpy as np
import pytest
import torch

from rlhf_workers.devices.reproducible_sums import ask_for_reproducible_sums

ask_for_reproducible_sums()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
