"""What nearly every decoder-only LVLM of transformers shares: how to find its decoder, its layers and its visual tokens.

Facts come from the configuration and from the module tree, never from class names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedModelError
from tokenprune.interfaces import Adapter
from tokenprune.tokens import TokenSpan

_ID_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "image_patch_id")

# Parts of a text model that the engine does not cut yet, found by the configuration key that switches them on.
_NOT_YET = {
    "num_kv_shared_layers": "layers that share keys and values",
    "altup_num_inputs": "parallel residual streams (AltUp)",
    "hidden_size_per_layer_input": "per-layer input embeddings",
    "cross_attention_layers": "cross-attention to the image, so that there is no visual token to drop",
    "attention_chunk_size": "chunked attention",
}
_DEEPSTACK = ("deepstack_visual_indexes", "deepstack_layer_map", "spatial_target_layers")


class DecoderAdapter(Adapter):
    """Base of the built-in adapters."""

    name: ClassVar[str] = "decoder"

    def check(self, config: Any) -> None:
        """Refuse what the engine cannot keep exact."""
        kind = getattr(config, "model_type", type(config).__name__)
        text = self.text_config(config)
        if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{kind} is an encoder-decoder model; tokenprune serves decoder-only LVLMs")
        if not isinstance(getattr(text, "num_hidden_layers", None), int):
            raise UnsupportedModelError(f"{kind}: its configuration names no decoder layers (num_hidden_layers)")
        for key, what in _NOT_YET.items():
            if getattr(text, key, None):
                raise UnsupportedModelError(f"{kind} has {what} ({key}), which cannot be pruned exactly yet")
        vision = getattr(config, "vision_config", None)
        for key in _DEEPSTACK:
            if getattr(vision, key, None) or getattr(config, key, None):
                raise UnsupportedModelError(
                    f"{kind} adds visual features again in early layers ({key}), which cannot be pruned exactly yet"
                )
        kinds = set(getattr(text, "layer_types", None) or ())
        if others := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise UnsupportedModelError(f"{kind} has {', '.join(others)} layers, which cannot be pruned exactly yet")
        if not self.visual_token_ids(config):
            raise UnsupportedModelError(
                f"{kind}: its configuration names no placeholder token ({', '.join(_ID_NAMES)}); is it a vision-language model?"
            )

    def text_config(self, config: Any) -> Any:
        """Return the configuration of the language model."""
        return config.get_text_config(decoder=True)

    def visual_token_ids(self, config: Any) -> frozenset[int]:
        """Return the placeholder ids the configuration names, at its top or under `vision_config`."""
        places = (config, getattr(config, "vision_config", None))
        ids = (getattr(place, name, None) for place in places for name in _ID_NAMES)
        return frozenset(value for value in ids if isinstance(value, int) and value >= 0)

    def visual_tokens_per_image(self, config: Any) -> int | None:
        """Return the fixed number of visual tokens an image gives, if the configuration states one."""
        for key in ("image_seq_length", "mm_tokens_per_image"):
            value = getattr(config, key, None)
            if isinstance(value, int):
                return value
        return None

    def decoder(self, model: nn.Module) -> nn.Module:
        """Return the module whose `layers` are the decoder layers the configuration counts."""
        depth = self.text_config(model.config).num_hidden_layers
        get = getattr(model, "get_decoder", None)
        candidates = [get()] if callable(get) else []
        candidates += [getattr(part, name, None) for part in list(candidates) for name in ("model", "decoder")]
        candidates += list(model.modules())
        for candidate in candidates:
            layers = getattr(candidate, "layers", None)
            if isinstance(layers, nn.ModuleList) and len(layers) == depth and hasattr(candidate, "config"):
                found: nn.Module = candidate
                return found
        raise UnsupportedModelError(
            f"no decoder with {depth} layers was found in {type(model).__name__}; write an adapter (docs/adapters.md)"
        )

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the decoder layers in order."""
        layers = self.decoder(model).layers
        assert isinstance(layers, nn.ModuleList)
        return list(layers)

    def attention(self, layer: nn.Module) -> nn.Module:
        """Return the self-attention module of a decoder layer."""
        for name in ("self_attn", "attention", "self_attention", "attn"):
            module = getattr(layer, name, None)
            if isinstance(module, nn.Module):
                return module
        raise UnsupportedModelError(
            f"no attention module was found in {type(layer).__name__}; write an adapter (docs/adapters.md)"
        )

    def final_norm(self, model: nn.Module) -> nn.Module:
        """Return the norm after the last decoder layer."""
        decoder = self.decoder(model)
        for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
            module = getattr(decoder, name, None)
            if isinstance(module, nn.Module):
                return module
        raise UnsupportedModelError(
            f"no final norm was found in {type(decoder).__name__}; write an adapter (docs/adapters.md)"
        )

    def renumbers(self, config: Any) -> str:
        """Return why position ids cannot be counted anew: they are a grid, or differ between layers."""
        text = self.text_config(config)
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        if "mrope_section" in rope or "mrope_interleaved" in rope:
            return "its positions are grids of time, row and column (M-RoPE), not one sequence"
        if any(isinstance(value, dict) for value in rope.values()):
            return "its layers have rotary embeddings of different kinds"
        return ""

    def rotary(self, model: nn.Module) -> nn.Module | None:
        """Return the decoder's rotary embedding."""
        module = getattr(self.decoder(model), "rotary_emb", None)
        return module if isinstance(module, nn.Module) else None

    def visual_mask(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return [B, Q] bool from `input_ids`, or from `inputs_embeds` that still hold the placeholder embeddings."""
        wanted = sorted(self.visual_token_ids(model.config))
        ids = inputs.get("input_ids")
        if ids is not None:
            return torch.isin(ids, torch.tensor(wanted, device=ids.device))
        embeds = inputs.get("inputs_embeds")
        if embeds is None:
            return None
        table: Tensor = model.get_input_embeddings()(torch.tensor(wanted, device=embeds.device))  # type: ignore[operator]
        masks = [(embeds == row.to(embeds.dtype)).all(dim=-1) for row in table]
        return torch.stack(masks).any(dim=0)

    def spans(self, config: Any, inputs: Mapping[str, Any]) -> list[tuple[TokenSpan, ...]]:
        """Return runs of placeholders, each with a square grid if it has a square number of tokens, else one row."""
        ids = inputs["input_ids"]
        mask = torch.isin(ids, torch.tensor(sorted(self.visual_token_ids(config)), device=ids.device))
        return [tuple(span for run in _runs(row) for span in self._split(config, run)) for row in mask]

    def _split(self, config: Any, run: range) -> list[TokenSpan]:
        """Cut a run of adjacent placeholders into images of the fixed size, if there is one."""
        size = self.visual_tokens_per_image(config)
        step = size if size and len(run) % size == 0 else len(run)
        return [_square(run[start : start + step]) for start in range(0, len(run), step)]


def part_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module of that name, wherever the model keeps it."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == name:
            found: nn.Module = module
            return found
    raise UnsupportedModelError(f"{type(model).__name__} has no part named {name}")


def layers_in(tower: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of a vision tower: its first list of modules called `layers` or `blocks`."""
    for part in tower.modules():
        for name in ("layers", "blocks"):
            layers = getattr(part, name, None)
            if isinstance(layers, nn.ModuleList):
                return list(layers)
    raise UnsupportedModelError(f"no layers were found in the vision tower {type(tower).__name__}")


def _square(run: range) -> TokenSpan:
    side = round(len(run) ** 0.5)
    grid = (1, side, side) if side * side == len(run) else (1, 1, len(run))
    return TokenSpan(tuple(run), grid)


def _runs(mask: Tensor) -> list[range]:
    """Return the maximal runs of True in a [Q] bool mask."""
    positions = mask.nonzero().flatten().tolist()
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs
