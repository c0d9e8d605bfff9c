"""Arithmetic over the valid tokens of each row, shared by scorers and selectors; padding never counts."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["best", "mean_size", "minmax", "places", "quantile", "standardised", "to_sum", "whole"]


def whole(x: Tensor, valid: Tensor) -> Tensor:
    """Return x with 0 on padding."""
    return x.masked_fill(~valid, 0.0)


def places(x: Tensor, valid: Tensor) -> Tensor:
    """Return [B, N] int64: 0 for the highest of each row, 1 for the next ...; ties to the lower index, padding last."""
    order = x.masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~valid).gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, torch.arange(x.shape[1], device=x.device).expand_as(order))


def best(x: Tensor, keep: Tensor, valid: Tensor) -> Tensor:
    """Return [B, N] bool: the `keep[b]` highest valid ones of each row."""
    return (places(x, valid) < keep.unsqueeze(1)) & valid


def minmax(x: Tensor, valid: Tensor) -> Tensor:
    """Return x moved to [0, 1]; 0 where all of a row are equal."""
    low = x.masked_fill(~valid, torch.inf).amin(dim=1, keepdim=True)
    span = x.masked_fill(~valid, -torch.inf).amax(dim=1, keepdim=True) - low
    there = valid & (span > 0)
    return torch.where(there, (x - torch.where(there, low, 0.0)) / torch.where(there, span, 1.0), 0.0)


def to_sum(x: Tensor, valid: Tensor) -> Tensor:
    """Return x over the sum of its absolute values; 0 where that is 0."""
    total = whole(x, valid).abs().sum(dim=1, keepdim=True)
    return whole(x, valid) / torch.where(total > 0, total, 1.0)


def mean_size(x: Tensor, valid: Tensor) -> Tensor:
    """Return [B, 1]: the mean absolute value."""
    return whole(x, valid).abs().sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)


def standardised(x: Tensor, valid: Tensor) -> Tensor:
    """Return (x - mean) / standard deviation; 0 where all of a row are equal."""
    count = valid.sum(dim=1, keepdim=True).clamp(min=1)
    centred = whole(x - whole(x, valid).sum(dim=1, keepdim=True) / count, valid)
    deviation = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
    # Rounding leaves a deviation of about eps x value on equal numbers; without the bound it would be blown up to 1.
    there = deviation > 1e-6 * mean_size(x, valid)
    return torch.where(there, centred / torch.where(there, deviation, 1.0), 0.0)


def quantile(x: Tensor, q: float, valid: Tensor) -> Tensor:
    """Return [B] float64: the linear percentile, as numpy computes it; 0 for rows without tokens."""
    if x.shape[1] == 0:
        return x.new_zeros(len(x), dtype=torch.float64)
    ordered = x.double().masked_fill(~valid, torch.inf).sort(dim=1).values
    at = (valid.sum(dim=1, keepdim=True) - 1).clamp(min=0).double() * q
    low, high = (ordered.gather(1, place.long()) for place in (at.floor(), at.ceil()))
    value = low + (high - low) * (at - at.floor())
    return value.squeeze(1).nan_to_num(0.0, 0.0, 0.0)
