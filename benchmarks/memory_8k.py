"""Peak memory of attention-scored policies at 8,100 visual tokens, each beside the unpruned run in a fresh process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import torch
from prefill import forget_peak, peak_rss
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from tokenprune.policy import Policy, list_policies
from tokenprune.session import compress

SIDE, PATCH, IMAGE = 90, 4, 99


def attention_scored() -> list[str]:
    """Return the first policy of every method that reads attention and needs nothing beside the model."""
    found: dict[str, str] = {}
    for info in list_policies():
        policy = Policy.load(info.name)
        names = {signal.name for stage in policy.stages for signal in stage.needs()}
        plain = policy.modality == "any" and "paired" not in names and "learned" not in policy.to_yaml()
        scaled = policy.written_for.llm is not None or not any(".layers." in str(stage.at) for stage in policy.stages)
        if "attention" in names and plain and scaled and not any(stage.at.part == "decode" for stage in policy.stages):
            found.setdefault(info.path.parent.name, info.name)
    return list(found.values())


def build() -> tuple[LlavaForConditionalGeneration, dict[str, Tensor]]:
    """Return a LLaVA whose memory is in its states and not in its weights, and a prompt of 8,100 + 64 tokens."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=2, image_size=SIDE * PATCH,
        patch_size=PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=128, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=16384,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE))
    ids = torch.randint(3, 90, (1, SIDE * SIDE + 64), generator=torch.Generator().manual_seed(1))
    ids[0, 5 : 5 + SIDE * SIDE] = IMAGE
    return model.eval(), {"input_ids": ids, "pixel_values": torch.randn(1, 3, SIDE * PATCH, SIDE * PATCH)}


def child(name: str) -> None:
    """Run one prefill in this process and print its peak."""
    model, inputs = build()
    forget_peak()
    before = peak_rss()[1]
    with torch.no_grad():
        if name == "unpruned":
            model(**inputs, logits_to_keep=1)
        else:
            with compress(model, name):
                model(**inputs, logits_to_keep=1)
    print(json.dumps({"peak": peak_rss()[0], "before": before}))


def measure(name: str) -> float:
    """Return the peak of one prefill in a fresh process, in MiB."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # or glibc keeps what was freed
    done = subprocess.run(
        [sys.executable, __file__, "--child", name], capture_output=True, text=True, check=True, env=environment
    )
    return float(json.loads(done.stdout.splitlines()[-1])["peak"]) / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row per policy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", nargs="*", help="default: one of every method that reads attention")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child)
    dense = measure("unpruned")
    print(f"| policy | peak RSS, MiB | of unpruned |\n|---|---|---|\n| unpruned | {dense:.0f} | |", flush=True)
    for name in options.policies or attention_scored():
        peak = measure(name)
        print(f"| {name} | {peak:.0f} | {peak / dense:.1%} |", flush=True)


if __name__ == "__main__":
    main()
