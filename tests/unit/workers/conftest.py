"""In-process tests of workers run as their workers do, on a processor of any kind, and draw the same random numbers
wherever and after whatever else they run."""

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
