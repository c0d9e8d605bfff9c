from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))  # zoo and policies, under importlib import mode


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    torch.set_num_threads(1)  # models are tiny: threads cost more than they give, and CI has two cores
    transformers.utils.logging.set_verbosity_error()
