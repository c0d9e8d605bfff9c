"""From what a user names to what runs: models with their processors, configurations, images, prompts.

Whatever is missing or of the wrong kind raises LoadError in one sentence. Nothing here knows policies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tokenprune.errors import InputError, LoadError, first_sentence

__all__ = [
    "Loaded",
    "LoadedConfig",
    "Sample",
    "load",
    "load_config",
    "open_image",
    "prepare",
    "read_samples",
    "sample",
    "samples",
    "seen_image",
]

EMBEDDED = Path(__file__).parent / "embedded"
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in evaluation mode with the processor that makes its inputs."""

    model: Any
    processor: Any
    name: str


@dataclass(frozen=True, eq=False)
class LoadedConfig:
    """A model configuration, and in words where it came from."""

    config: Any
    name: str


@dataclass(frozen=True)
class Sample:
    """The packaged picture with the question to ask about it."""

    image: Path
    question: str


def load(source: str | Path | None = None, *, dtype: str | torch.dtype = "auto", device: str | None = None) -> Loaded:
    """Load a vision-language model and its processor.

    source: a local folder, a model id of the Hub, or None for the small embedded model. dtype: as `from_pretrained`
    takes it; `auto` is the one the checkpoint was saved in. device: default is CUDA if there is one, else CPU.
    """
    where, name = _place(source)
    config = _config(where)
    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise LoadError(
            f"{name} is a {config.model_type!r} model, which is not a vision-language model of transformers"
        )
    processor = _read("processor", where, AutoProcessor.from_pretrained)
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise LoadError(
            f"{name} holds no image processor (preprocessor_config.json); save the processor beside the model"
        )

    def weights(place: str) -> Any:
        return AutoModelForImageTextToText.from_pretrained(place, dtype=dtype)

    model = _read("weights", where, weights).eval()
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return Loaded(model.to(target), processor, name)
    except (RuntimeError, AssertionError, ValueError) as error:  # torch without CUDA asserts
        raise LoadError(f"the model cannot be put on device {target!r}: {first_sentence(error)}") from error


def load_config(source: str | Path | None = None) -> LoadedConfig:
    """Return the configuration of a folder, a Hub id or a bare model type (`llava`, `qwen2_vl`); no weights are read.

    A model type gives the default configuration of that type. None gives that of `llava`: LLaVA-1.5-7B's shape.
    """
    if source is None:
        return LoadedConfig(CONFIG_MAPPING["llava"](), "LLaVA-1.5-7B's shape (default LlavaConfig)")
    if str(source) in CONFIG_MAPPING and not Path(source).exists():
        config = CONFIG_MAPPING[str(source)]()
        return LoadedConfig(config, f"{type(config).__name__} with its default sizes")
    where, name = _place(source)
    return LoadedConfig(_config(where), name)


def sample() -> Sample:
    """Return the first packaged sample of the embedded model's test split."""
    return samples()[0]


def samples() -> list[Sample]:
    """Return every packaged picture with its first question."""
    listing = EMBEDDED / "samples" / "samples.json"
    if not listing.is_file():
        raise LoadError("this installation holds no sample picture; give one with --image, or some with --data")
    found = json.loads(listing.read_text(encoding="utf-8"))["samples"]
    return [Sample(listing.parent / one["file"], one["questions"][0]["question"]) for one in found]


def read_samples(path: str | Path) -> list[Sample]:
    """Return the samples of a JSONL file: one `{"image": file, "prompt": text}` a line, files relative to it."""
    place = Path(path)
    try:
        lines = place.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    made = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            made.append(Sample(place.parent / one["image"], one["prompt"]))
        except (ValueError, TypeError, KeyError):
            raise LoadError(
                f'{path}:{number}: a line is {{"image": "file.png", "prompt": "text"}}, not {line.strip()[:60]!r}'
            ) from None
    if not made:
        raise LoadError(f"{str(path)!r} holds no sample")
    return made


def open_image(path: str | Path) -> Image.Image:
    """Return the picture in a file as RGB, upright."""
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise LoadError(f"there is no image file {str(path)!r}") from None
    except IsADirectoryError:
        raise LoadError(f"{str(path)!r} is a directory, not an image file") from None
    except UnidentifiedImageError:
        raise LoadError(f"{str(path)!r} is not an image that Pillow can read") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise LoadError(f"{str(path)!r} cannot be read as an image: {first_sentence(error)}") from None


def prepare(loaded: Loaded, image: Image.Image | None, prompt: str) -> dict[str, Any]:
    """Return the inputs of one question about one image (None: about nothing), on the model's device.

    The prompt is laid out by the processor's chat template; without one, the placeholder stands on a line before it.
    """
    if not prompt.strip():
        raise InputError("the prompt is empty; ask something about the image")
    placeholder = getattr(loaded.processor, "image_token", None) or "<image>"
    if placeholder in prompt:
        raise InputError(f"the prompt holds the placeholder {placeholder!r}; leave it out, it is put in for the image")
    text, special = _layout(loaded.processor, placeholder if image is not None else None, prompt)
    pictures = {} if image is None else {"images": [image]}
    inputs = loaded.processor(text=[text], **pictures, return_tensors="pt", add_special_tokens=special)
    given = inputs.to(loaded.model.device, loaded.model.dtype)  # casts floating point tensors only
    return {name: value for name, value in given.items() if value is not None}


def seen_image(loaded: Loaded, inputs: dict[str, Any], image: Image.Image) -> Image.Image:
    """Return the image as the model saw it: resized and cropped, normalisation undone.

    Processors that give patches instead of a picture only resize, so there the image itself is what the grid lies on.
    """
    pixels = inputs.get("pixel_values")
    maker = loaded.processor.image_processor
    if pixels is None or pixels.ndim != 4 or pixels.shape[1] != 3 or not getattr(maker, "do_center_crop", False):
        return image
    picture = pixels[0].float().cpu()
    if maker.do_normalize:
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (maker.image_mean, maker.image_std))
        picture = picture * std + mean
    factor = maker.rescale_factor if maker.do_rescale else 1.0
    array = (picture / factor).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(array)


def _layout(processor: Any, placeholder: str | None, prompt: str) -> tuple[str, bool]:
    """Return the text of the prompt, and whether the tokenizer still has to add its special tokens."""
    if getattr(processor, "chat_template", None):
        content: list[dict[str, str]] = [{"type": "text", "text": prompt}]
        if placeholder is not None:
            content.insert(0, {"type": "image"})
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        start = processor.tokenizer.bos_token
        return text, not (start and text.startswith(start))
    return (prompt if placeholder is None else f"{placeholder}\n{prompt}"), True


def _place(source: str | Path | None) -> tuple[str, str]:
    """Return what `from_pretrained` takes, and the name shown to users."""
    if source is None:
        if not (EMBEDDED / "config.json").is_file():
            raise LoadError("this installation holds no embedded model; name a model folder or id with --model")
        return str(EMBEDDED), "the embedded model"
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"{str(source)!r} is a folder without config.json; it holds no model of transformers")
        return str(path), str(source)
    if path.is_file():
        raise LoadError(f"{str(source)!r} is a file; name the folder that holds config.json and the weights")
    text = str(source)
    if text in CONFIG_MAPPING:
        raise LoadError(f"{text!r} is a model type and has no weights; name a model folder or a Hub id")
    looks_local = isinstance(source, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1 or "\\" in text
    if looks_local:
        raise LoadError(f"there is no model folder {text!r}")
    return text, text


def _config(where: str) -> Any:
    return _read("configuration", where, AutoConfig.from_pretrained)


def _read(what: str, where: str, reader: Callable[[str], T]) -> T:
    """Call a `from_pretrained`; turn what it raises into one sentence."""
    local = Path(where).is_dir()
    try:
        return reader(where)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        if local:
            raise LoadError(f"the {what} in {where!r} cannot be loaded: {first_sentence(error)}") from error
        raise LoadError(
            f"the {what} of {where!r} could not be downloaded or read ({first_sentence(error)}); give a local folder instead"
        ) from error
