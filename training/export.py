"""Write the model folder: weights, tokenizer, processor, samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from collage import GRID, PATCH, Collage, make_collage
from language import exam_of, predict, tower_features
from model import build_processor
from PIL import Image
from pool import Pool, patch_words
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlavaForConditionalGeneration

SAMPLES = 6


def write_model(model: LlavaForConditionalGeneration, out: Path) -> None:
    """Save ``model`` as bfloat16 weights with the processor, and round the model in memory the same way."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.text_config.bos_token_id,
        eos_token_id=model.config.text_config.eos_token_id,
        pad_token_id=model.config.text_config.pad_token_id,
        max_new_tokens=4,
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    model.float()
    _hub_names(out / "model.safetensors")
    # Stored in half the bytes, computed in float32: CPUs without bfloat16 units are slow in it. A caller's dtype= wins.
    path = out / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
    build_processor().save_pretrained(out)


def _hub_names(path: Path) -> None:
    """Rename the tower's weights as LLaVA files on the Hub have them: transformers 5.0 and later versions read that."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {k.replace(old, new) if new not in k else k: v for k, v in load_file(path).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_samples(model: LlavaForConditionalGeneration, out: Path, seed: int) -> None:
    """Six test collages as PNG and ``samples.json``: their objects and questions, with the model's own answers.

    Collages are drawn until the model gets the first question of each right; the first questions differ in kind.
    """
    folder = out / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    first_kinds = ("shape_of", "color_at", "where", "digit_at", "exists", "count")
    entries, number = [], 0
    while len(entries) < SAMPLES:
        collage = make_collage(np.random.default_rng((seed, number)), "test")
        entry = _sample(model, collage, first_kinds[len(entries)], seed + number)
        number += 1
        if entry is None:
            continue
        entry["file"] = f"sample{len(entries)}.png"
        Image.fromarray(collage.image).save(folder / entry["file"])
        entries.append(entry)
    content = {"grid": GRID, "patch_size": PATCH, "samples": entries}
    (folder / "samples.json").write_text(json.dumps(content, indent=1) + "\n")


def _sample(model: LlavaForConditionalGeneration, collage: Collage, first: str, seed: int) -> dict | None:
    """The ``samples.json`` entry of a collage, or None where its first question cannot be asked or is got wrong."""
    qas = exam_of(np.random.default_rng(seed), collage)
    qas.sort(key=lambda qa: qa.kind != first)
    if len(qas) < 6 or qas[0].kind != first:
        return None
    features = tower_features(model, Pool([collage], patch_words([collage])), 1)
    answers = predict(model, [features[0]], [qas], [torch.arange(GRID * GRID)])[0]
    if answers[0] != qas[0].answer:
        return None
    questions = [
        {
            "kind": qa.kind,
            "question": qa.question.capitalize(),
            "answer": qa.answer,
            "model_answer": said,
            "key_patches": list(qa.key_patches),
        }
        for qa, said in zip(qas, answers, strict=True)
    ]
    objects = [{"label": i.label, "color": i.color, "place": i.place, "patches": i.patches} for i in collage.items]
    return {"file": "", "objects": objects, "questions": questions}
