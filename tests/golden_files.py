"""Numbers of the authors' own code. `TOKENPRUNE_GOLDEN` names another folder of the same layout (held-out cases)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

GOLDEN = Path(os.environ.get("TOKENPRUNE_GOLDEN") or Path(__file__).parent / "golden")


def cases(method: str) -> list[Any]:
    """Return (hyper-parameters, tensors) of every case the file lists."""
    text = json.loads((GOLDEN / f"{method}.json").read_text())
    tensors = load_file(GOLDEN / f"{method}.safetensors")
    found = []
    for case in text["cases"]:
        prefix = f"case{case['case']}/"
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        found.append(pytest.param(case["hyper_parameters"], own, id=f"{method}-{case['case']}"))
    assert found
    return found
