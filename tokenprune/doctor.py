"""What `tokenprune doctor` finds out about this installation. Each check says what it saw; none changes anything."""

from __future__ import annotations

import importlib
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tokenprune.errors import TokenpruneError, first_sentence
from tokenprune.loading import EMBEDDED
from tokenprune.plugins import DISTRIBUTION, registry
from tokenprune.policy import list_policies

__all__ = ["Check", "examine"]

Status = Literal["ok", "note", "warn", "fail"]
NAMESAKE = "tokenprune"  # an unrelated distribution on PyPI with our import name


@dataclass(frozen=True)
class Check:
    """One thing looked at. note: worth knowing, nothing wrong. fail: tokenprune cannot work as promised."""

    group: str
    name: str
    status: Status
    detail: str


def examine() -> list[Check]:
    """Return all checks."""
    return [*_versions(), *_kernels(), *_namesake(), *_plugins(), _embedded()]


def _versions() -> Iterator[Check]:
    try:
        ours = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        yield Check(
            "versions", DISTRIBUTION, "fail", "not installed, so no plugin is found; pip install -e . in the checkout"
        )
        return
    yield Check("versions", DISTRIBUTION, "ok", f"{ours.version} in {Path(__file__).parent}")
    yield _in_range("python", platform.python_version(), SpecifierSet(ours.metadata["Requires-Python"] or ""))
    for requirement in map(Requirement, ours.requires or ()):
        if requirement.marker is None:
            yield _in_range(requirement.name, _version(requirement.name), requirement.specifier)


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _in_range(name: str, version: str | None, supported: SpecifierSet) -> Check:
    if version is None:
        return Check("versions", name, "fail", f"not installed; supported {supported}")
    inside = supported.contains(version, prereleases=True)
    return Check("versions", name, "ok" if inside else "fail", f"{version} (supported {supported})")


def _kernels() -> Iterator[Check]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    yield Check("attention", "device", "ok", f"{device} ({name})")
    for label, backend in (
        ("sdpa flash", SDPBackend.FLASH_ATTENTION),
        ("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
        ("sdpa math", SDPBackend.MATH),
    ):
        reason = _why_not(backend, device)
        yield Check("attention", label, "note" if reason else "ok", reason or f"ran on {device}")
    yield _importable("flash-attn", "flash_attn")
    yield _importable("flex attention", "torch.nn.attention.flex_attention")


def _why_not(backend: SDPBackend, device: str) -> str:
    """Run a small attention with this backend and no other; return why that failed, or an empty string."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    states = torch.ones(1, 2, 16, 64, device=device, dtype=dtype)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(states, states, states, is_causal=True)
        except RuntimeError as error:
            said = str(reasons[-1].message) if reasons else str(error)
            return f"not usable on {device}: {first_sentence(said)}"
    return ""


def _importable(label: str, module: str) -> Check:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails with any of them
        return Check("attention", label, "note", f"not usable: {first_sentence(error)}")
    return Check("attention", label, "ok", "can be imported")


def _namesake() -> Iterator[Check]:
    """Look for the unrelated distribution: both write into the folder `tokenprune/`."""
    here = Path(__file__).parent
    try:
        other: Distribution = distribution(NAMESAKE)
    except PackageNotFoundError:
        yield Check("names", f"PyPI {NAMESAKE!r}", "ok", f"not installed; import {NAMESAKE} is {here}")
        return
    folder = Path(str(other.locate_file(NAMESAKE))).resolve()
    if folder == here.resolve():
        detail = f"{other.version} wrote into {folder} too; pip uninstall {NAMESAKE} and reinstall {DISTRIBUTION}"
        yield Check("names", f"PyPI {NAMESAKE!r}", "fail", detail)
    else:
        detail = (
            f"{other.version}, an unrelated project with the same import name, is installed in {folder}; uninstall it"
        )
        yield Check("names", f"PyPI {NAMESAKE!r}", "warn", detail)


def _plugins() -> Iterator[Check]:
    try:
        plugins, policies = registry(), list_policies()
    except TokenpruneError as error:
        yield Check("plugins", "registry", "fail", str(error))
        return
    distributions = sorted({name for _, name in plugins.plugins})
    yield Check("plugins", "loaded", "ok", f"{len(plugins.plugins)} modules of {', '.join(distributions)}")
    for failure in plugins.failures:
        status: Status = "fail" if failure.distribution == DISTRIBUTION else "warn"
        yield Check("plugins", failure.plugin, status, f"{failure.error} (from {failure.distribution})")
    for info in policies:
        if info.error:
            yield Check("plugins", info.name, "fail" if info.distribution == DISTRIBUTION else "warn", info.error)
    readable = sum(not info.error for info in policies)
    yield Check("plugins", "policies", "ok" if readable else "fail", f"{readable} can be read")


def _embedded() -> Check:
    there = (EMBEDDED / "model.safetensors").is_file()
    detail = str(EMBEDDED) if there else "not in this installation; `tokenprune run` needs --model"
    return Check("model", "embedded model", "ok" if there else "warn", detail)
