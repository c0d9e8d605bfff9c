"""Checks for a GPU: the flash kernel is kept, pruned logits are right under it, and what is won. No test needs it.

    python benchmarks/gpu_check.py --device cuda                      # random weights in the size of LLaVA-1.5-7B
    python benchmarks/gpu_check.py --device cuda --model ~/models/llava-1.5-7b-hf
    python benchmarks/gpu_check.py --device cpu                       # tiny, to see that the script itself works

Kernel: FlashAttention-2 where `flash_attn` can be imported, else the flash kernel of PyTorch's SDPA and no other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from tokenprune.policy import Policy
from tokenprune.report import Report
from tokenprune.session import compress
from tokenprune.testing import check_policy, hidden_columns

POLICIES = ("v2drop-llava-1.5-7b-192", "fastv")
IMAGE = 31999
SIZES = {  # width, feed-forward, heads, layers, vision width, vision layers
    "tiny": (64, 128, 4, 32, 32, 3),
    "7b": (4096, 11008, 32, 32, 1024, 24),
}
# Pruned against masked dense, same weights, float32. In half precision nothing can agree better than the two kernels do
# on the unpruned prompt: see `tolerance`.
FLOAT32_ATOL = 1e-3


def random_model(size: str, dtype: torch.dtype, device: str) -> Any:
    """Return a LLaVA-shaped model with random weights, made on the device."""
    width, feed, heads, depth, vision_width, vision_depth = SIZES[size]
    vision = transformers.CLIPVisionConfig(
        hidden_size=vision_width, intermediate_size=4 * vision_width, num_attention_heads=vision_width // 16,
        num_hidden_layers=vision_depth, image_size=336, patch_size=14, projection_dim=64,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=feed, num_attention_heads=heads, num_key_value_heads=heads,
        num_hidden_layers=depth, vocab_size=32000, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return transformers.LlavaForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_inputs(rows: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return prompts of 64 text and 576 visual tokens; rows after the first are 9 tokens shorter, left-padded."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE, (rows, 640), generator=g)
    ids[:, 32 : 32 + 576] = IMAGE
    mask = torch.ones_like(ids)
    ids[1:, :9], mask[1:, :9] = 0, 0
    pixels = torch.randn(rows, 3, 336, 336, generator=g).to(dtype)
    made = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    return {name: x.to(device) for name, x in made.items()}


def real_inputs(processor: Any, rows: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return chat prompts about one noisy picture; the first question is the longest, so the others are padded."""
    from PIL import Image

    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (336, 336, 3), generator=g, dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    questions = ["Describe everything that can be seen in this picture, please.", "What is this?"]
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": questions[row > 0]}]}]
        for row in range(rows)
    ]
    processor.tokenizer.padding_side = "left"
    made = processor.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", padding=True
    )
    return {name: x.to(device, dtype) if x.is_floating_point() else x.to(device) for name, x in made.items()}


class Check:
    """A model on a device, the kernel it is to keep, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.dtype = options.device, getattr(torch, options.dtype)
        self.flash2 = self.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
        if options.model:
            loaded = transformers.AutoModelForImageTextToText.from_pretrained(options.model, dtype=self.dtype)
            self.model = loaded.to(self.device).eval()
            processor = transformers.AutoProcessor.from_pretrained(options.model)
            self.inputs = lambda rows: real_inputs(processor, rows, self.dtype, self.device)
        else:
            self.model = random_model(options.size, self.dtype, self.device)
            self.inputs = lambda rows: random_inputs(rows, self.dtype, self.device)
        self.failed = 0
        self.results: dict[str, Any] = {}

    @property
    def kernel(self) -> str:
        """The attention implementation under test."""
        return "flash_attention_2" if self.flash2 else "sdpa"

    @contextmanager
    def flash_only(self, padded: bool = False) -> Iterator[None]:
        """Allow nothing but a flash kernel, save for padded batches in SDPA on CUDA: it takes no mask."""
        self.model.set_attn_implementation(self.kernel)
        free = self.flash2 or (padded and self.device == "cuda")
        with nullcontext() if free else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield

    def say(self, name: str, holds: bool, detail: str) -> None:
        """Print and keep one result."""
        self.failed += not holds
        self.results[name] = {"holds": holds, "detail": detail}
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {detail}")

    # ---- the checks

    def kernel_is_kept(self, policy: str) -> None:
        """Every decoder layer of the pruned prefill must go through a flash kernel, the stages' layers included."""
        inputs = self.inputs(1)
        with self.flash_only(), compress(self.model, policy) as session:
            forward(self.model, inputs)  # the first call may set things up
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                forward(self.model, inputs)
        plain = sum(event.count for event in seen.key_averages() if _is_dense_attention(event.key))
        flash = {event.key: event.count for event in seen.key_averages() if _is_flash(event.key)}
        calls = max(flash.values(), default=0)
        self.say(
            f"{policy}: flash kernel kept",
            calls >= session.plan.depth and not plain,
            f"{self.kernel}, {calls} flash calls for {session.plan.depth} decoder layers and the vision tower, "
            f"{plain} others",
        )

    def logits_are_right(self, policy: str, rows: int) -> None:
        """The pruned prefill under flash against a dense one, in SDPA, in which the dropped columns are hidden."""
        inputs = self.inputs(rows)
        with self.flash_only(padded=rows > 1):
            unpruned = forward(self.model, inputs)
            with compress(self.model, policy) as session:
                pruned = forward(self.model, inputs)
                report = session.report
        self.model.set_attn_implementation("sdpa")
        reference = forward(self.model, inputs)
        with hidden_columns(session.plan.adapter.layers(self.model), report):
            dense = forward(self.model, inputs)
        real = inputs["attention_mask"].bool()
        allowed = tolerance(unpruned[real], reference[real], self.dtype)
        gap = largest(pruned, dense, alive(report, real))
        form = "2-D mask" if self.flash2 and rows > 1 else "4-D mask" if rows > 1 else "no mask"
        self.say(
            f"{policy}: logits, batch of {rows} ({form})", gap <= allowed,
            f"differ from the masked dense run by {gap:.1e} (allowed {allowed:.1e}); kept "
            f"{[stage.tokens_out for stage in report.stages]} of {report.visual_tokens}",
        )  # fmt: skip

    def float32_oracle(self, policy: str, rows: int) -> None:
        """`check_policy`, decoding included, on a float32 copy in SDPA."""
        self.model.set_attn_implementation("sdpa")
        inputs = {name: x.float() if x.is_floating_point() else x for name, x in self.inputs(rows).items()}
        model = self.model.float()
        name = f"{policy}: float32 oracle, batch of {rows}"
        forbidden = tuple(compress(model, policy).plan.adapter.visual_token_ids(model.config))
        try:
            check_policy(model, inputs, policy, steps=8, atol=FLOAT32_ATOL, forbidden_tokens=forbidden)
            self.say(name, True, f"prefill and 8 decoding steps within {FLOAT32_ATOL:.0e}, same greedy tokens")
        except AssertionError as error:
            self.say(name, False, str(error))

    def costs(self, policies: tuple[str, ...], repetitions: int) -> None:
        """Prefill time and peak memory, interleaved."""
        inputs = self.inputs(1)
        variants: list[str | None] = [None, *policies]
        times: dict[str | None, list[float]] = {name: [] for name in variants}
        peaks: dict[str | None, int] = {}
        for repetition in range(repetitions + 2):  # two to warm up
            for name in variants:
                with self.flash_only(), compress(self.model, name) if name else nullcontext():
                    taken, peak = measured(lambda: forward(self.model, inputs, logits_to_keep=1), self.device)
                if repetition >= 2:
                    times[name].append(taken)
                    peaks[name] = max(peaks.get(name, 0), peak)
        dense = statistics.median(times[None])
        for name in variants:
            middle = statistics.median(times[name])
            quarter = statistics.quantiles(times[name], n=4)
            memory = f", peak {peaks[name] / 2**20:.0f} MiB above the weights" if self.device == "cuda" else ""
            detail = f"prefill {middle:.2f} ms [{quarter[0]:.2f}, {quarter[2]:.2f}], {dense / middle:.2f} x{memory}"
            self.results[f"{name or 'unpruned'}: cost"] = {"ms": times[name], "peak_bytes": peaks[name]}
            print(f"     {name or 'unpruned'}: {detail}")
            if name and self.device == "cuda":
                self.say(f"{name}: memory", peaks[name] <= peaks[None] * 1.01, "peak not above the unpruned one")


@torch.no_grad()
def forward(model: nn.Module, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Return the logits of a prefill."""
    logits: Tensor = model(**inputs, use_cache=True, **options).logits
    return logits


def _is_flash(name: str) -> bool:
    # aten::_scaled_dot_product_flash_attention[_for_cpu], flash_attn::_flash_attn_[varlen_]forward, FlashAttnFunc
    return "flash" in name.lower() and "backward" not in name.lower()


def _is_dense_attention(name: str) -> bool:
    return name in ("aten::_scaled_dot_product_attention_math", "aten::_scaled_dot_product_efficient_attention")


def tolerance(one: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    """Return the allowed gap: 3 times what the two kernels differ by without any pruning, or `FLOAT32_ATOL`."""
    if dtype == torch.float32:
        return FLOAT32_ATOL
    step = torch.finfo(dtype).eps * other.float().abs().max().item()  # one rounding of the largest logit
    return 3 * max((one.float() - other.float()).abs().max().item(), step)


def alive(report: Report, real: Tensor) -> Tensor:
    """Return [B, Q] bool: positions that are neither padding nor dropped."""
    mask = real.clone()
    for row in range(mask.shape[0]):
        mask[row, report.stages[0].positions[row]] = False
        mask[row, report.stages[-1].kept[row]] = True
    return mask


def largest(one: Tensor, other: Tensor, where: Tensor) -> float:
    """Return the largest difference at these positions."""
    return (one.float() - other.float())[where].abs().max().item()


def measured(work: Callable[[], Any], device: str) -> tuple[float, int]:
    """Return (milliseconds, peak bytes above what was allocated before; 0 on CPU)."""
    if device != "cuda":
        start = perf_counter()
        work()
        return (perf_counter() - start) * 1e3, 0
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), torch.cuda.max_memory_allocated() - before


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder or id of a LLaVA or Qwen-VL model; without it, random weights")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), help="of the random model (default: 7b on cuda, tiny on cpu)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on cuda")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--no-oracle", action="store_true", help="skip the float32 copy (twice the memory)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.size = options.size or ("7b" if options.device == "cuda" else "tiny")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def main() -> int:
    options = parse()
    for name in options.policies:
        Policy.load(name)  # a wrong name should not cost the loading of a model
    check = Check(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(
        f"{device}, torch {torch.__version__}, transformers {transformers.__version__}, {check.kernel}, {options.dtype}"
    )
    for policy in options.policies:
        check.kernel_is_kept(policy)
        for rows in (1, 2):
            check.logits_are_right(policy, rows)
    check.costs(tuple(options.policies), options.repetitions)
    if not options.no_oracle:
        for policy in options.policies:  # last: it turns the model into float32
            for rows in (1, 2):
                check.float32_oracle(policy, rows)
    if options.device == "cuda" and not check.flash2:
        print("     flash_attn is not installed: the 2-D mask branch did not run")
    if options.json:
        options.json.write_text(json.dumps(check.results, indent=2) + "\n")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
