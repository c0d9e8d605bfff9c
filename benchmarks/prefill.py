"""Time and memory of a pruned prefill on CPU, against the unpruned model and against the schedule floor.

The schedule floor of a policy is what its schedule costs when nobody has to prune: the same decoder layers called
plainly, each at its planned length, without engine and hooks, and the rest of the model as it is. `policy / floor` is
therefore the price of the engine, free of how fast this machine multiplies matrices. The model has random weights: time
does not depend on what a token means.

    python benchmarks/prefill.py --quick
    python benchmarks/prefill.py --memory --json out.json --markdown out.md

`benchmarks/README.md` explains every column.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import platform
import random
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPVisionConfig, DynamicCache, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.masking_utils import create_causal_mask

from tokenprune import session as engine
from tokenprune.forward import Forward
from tokenprune.plan import Plan, plan

# The sites of V2Drop, with nothing to drop: what is left is the bare cost of the hooks.
KEEP_ALL: dict[str, Any] = {
    "name": "keep-all",
    "stages": [
        {"at": f"llm.layers.{layer}", "scorer": "variation", "budget": {"keep_ratio": 1.0}} for layer in (3, 17, 22)
    ],
}
BUILT_IN = {"keep-all": KEEP_ALL}
POLICIES = ("v2drop-llava-1.5-7b-192", "fastv", "random-llava-1.5-7b-192", "keep-all")
IMAGE = 31999


@dataclass(frozen=True)
class Shape:
    """A LLaVA-shaped model: the token counts and depth of LLaVA-1.5-7B, the width as given."""

    width: int
    feed_forward: int
    heads: int
    vision_width: int
    vision_layers: int
    depth: int = 32
    image: int = 336
    patch: int = 14
    text: int = 64
    vocabulary: int = 32000

    @property
    def visual(self) -> int:
        """Visual tokens per image."""
        return (self.image // self.patch) ** 2


FULL = Shape(width=896, feed_forward=2432, heads=14, vision_width=256, vision_layers=4)
QUICK = Shape(width=128, feed_forward=352, heads=4, vision_width=64, vision_layers=2)


def build(shape: Shape, dtype: torch.dtype) -> LlavaForConditionalGeneration:
    """Return a model with random weights, made in `dtype` from the start so that no wider copy ever exists."""
    vision = CLIPVisionConfig(
        hidden_size=shape.vision_width, intermediate_size=4 * shape.vision_width, num_attention_heads=4,
        num_hidden_layers=shape.vision_layers, image_size=shape.image, patch_size=shape.patch, projection_dim=64,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.feed_forward, num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        return LlavaForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)


def prompts(shape: Shape, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `batch` prompts: half of the text, the image, the other half."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE, (batch, shape.text + shape.visual), generator=g)
    first = shape.text // 2
    ids[:, first : first + shape.visual] = IMAGE
    pixels = torch.randn(batch, 3, shape.image, shape.image, generator=g).to(dtype)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


# ---- the things that are run ----------------------------------------------------------------------------------------


def prefill(model: LlavaForConditionalGeneration, inputs: Mapping[str, Tensor]) -> Tensor:
    """One prefill as `generate` does it: a new cache, logits of the last position only."""
    logits: Tensor = model(**inputs, use_cache=True, logits_to_keep=1).logits
    return logits


def floor(model: LlavaForConditionalGeneration, inputs: Mapping[str, Tensor], lengths: Sequence[int]) -> Tensor:
    """The same work without engine: layer i runs on `lengths[i]` tokens.

    Which tokens does not matter for time, so a shorter length takes a view of what is there and gathers nothing.
    """
    inner, decoder = model.model, model.model.language_model
    states = inner.get_input_embeddings()(inputs["input_ids"])
    features = torch.cat(inner.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True).pooler_output)
    where = inner.get_placeholder_mask(inputs["input_ids"], inputs_embeds=states, image_features=features)
    states = states.masked_scatter(where, features.to(states.dtype))
    logical = states
    cache = DynamicCache(config=decoder.config)
    positions = torch.arange(states.shape[1]).unsqueeze(0)
    mask = create_causal_mask(
        config=decoder.config, inputs_embeds=states, attention_mask=inputs["attention_mask"], cache=cache,
        position_ids=positions,
    )  # fmt: skip
    assert mask is None, "the floor relies on unpadded prompts, where SDPA takes no mask"
    cos, sin = decoder.rotary_emb(states, position_ids=positions)
    for layer, length in zip(decoder.layers, lengths, strict=True):
        states = layer(
            _first(states, length), attention_mask=None, position_ids=positions[:, :length], cache=cache,
            use_cache=True, position_embeddings=(cos[:, :length], sin[:, :length]),
        )  # fmt: skip
    # The norm runs at logical length, as in the model; only a full-length schedule has states for all of it.
    states = decoder.norm(states if states.shape == logical.shape else logical)
    logits: Tensor = model.lm_head(states[:, -1:])
    return logits


def _first(states: Tensor, length: int) -> Tensor:
    """Return states of `length` tokens per row, contiguous, without copying any."""
    rows, now, width = states.shape
    return states if now == length else states.view(-1)[: rows * length * width].view(rows, length, width)


@contextmanager
def pruned(model: nn.Module, planned: Plan) -> Iterator[engine.Session]:
    """Enter a session; the plan is made beforehand, as it would be for many prompts."""
    with engine.Session(model, planned) as session:
        yield session


# ---- where the engine's time goes -----------------------------------------------------------------------------------

PARTS: tuple[tuple[type, str, str], ...] = (
    (engine.Session, "_see_inputs", "find"),
    (engine.Session, "_begin", "find"),
    (engine.Session, "_act", "stage: rest"),
    (engine.Session, "_context", "stage: read signals"),
    (engine.Session, "_probe", "stage: read signals"),
    (engine.Session, "_decided", "stage: score and select"),
    (Forward, "narrow", "stage: gather"),
    (engine.Session, "_record", "stage: record"),
    (engine.Session, "_cut", "cut arguments"),
    (engine.Session, "_watch", "watch"),
    (engine.Session, "_after_last_layer", "put back"),
)


class Spent:
    """Seconds inside the engine's methods, each second counted once, where it was spent."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def reset(self) -> None:
        self.seconds = {label: 0.0 for _, _, label in PARTS}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the methods in PARTS for the length of the block. Costs well under a microsecond per call."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
        for (owner, name, method), (_, _, label) in zip(originals, PARTS, strict=True):
            setattr(owner, name, self._timed(method, label))
        try:
            yield
        finally:
            for owner, name, method in originals:
                setattr(owner, name, method)

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        # `wraps`, because the session asks some methods for their names.
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                whole = perf_counter() - start
                self.seconds[label] = self.seconds.get(label, 0.0) + whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        return timed


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Everything measured for one policy, repetition by repetition."""

    policy: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    enter: list[float] = field(default_factory=list)
    spent: list[dict[str, float]] = field(default_factory=list)


class Bench:
    """A model, its prompts, and the plans to measure."""

    def __init__(self, shape: Shape, dtype: torch.dtype, batch: int, policies: Sequence[str]) -> None:
        self.shape, self.batch = shape, batch
        self.model = build(shape, dtype)
        self.inputs = prompts(shape, batch, dtype)
        self.plans = {name: plan(BUILT_IN.get(name, name), self.model) for name in policies}
        self.dense_lengths = [shape.visual + shape.text] * shape.depth
        self.spent = Spent()
        self.unpruned: list[float] = []
        self.samples = {name: Samples() for name in policies}

    def lengths(self, name: str) -> list[int]:
        """Return the planned length of every decoder layer."""
        return [visual + self.shape.text for visual in self.plans[name].entering(self.shape.visual)]

    def check(self) -> None:
        """Prove, before any number is taken, that the floor does the model's work and the engine the plan's."""
        gap = (floor(self.model, self.inputs, self.dense_lengths) - prefill(self.model, self.inputs)).abs().max().item()
        assert gap == 0, f"the full-length floor is not the model: logits differ by {gap:.1e}"
        for name, planned in self.plans.items():
            with pruned(self.model, planned) as session:
                cache = self.model(**self.inputs, use_cache=True, logits_to_keep=1).cache
            stored = [layer.keys.shape[-2] for layer in cache.layers]
            assert stored == self.lengths(name), f"{name}: layers ran on {stored}, planned {self.lengths(name)}"
            assert session.report.prefills == 1

    def time_unpruned(self) -> None:
        self.unpruned.append(seconds(lambda: prefill(self.model, self.inputs)))

    def time_floor(self, name: str) -> None:
        lengths = self.lengths(name)
        self.samples[name].floor.append(seconds(lambda: floor(self.model, self.inputs, lengths)))

    def time_policy(self, name: str) -> None:
        samples = self.samples[name]
        start = perf_counter()
        with pruned(self.model, self.plans[name]):
            entered = perf_counter() - start
            self.spent.reset()
            samples.policy.append(seconds(lambda: prefill(self.model, self.inputs)))
            samples.spent.append(dict(self.spent.seconds))
        samples.enter.append(entered)

    def run(self, repetitions: int, warm_up: int) -> None:
        """Measure. A policy and its floor run next to each other, so that drift hits both; the rest is shuffled."""
        order = random.Random(0)
        with self.spent.watching():
            for repetition in range(-warm_up, repetitions):
                groups: list[list[Callable[[], None]]] = [[self.time_unpruned]]
                for name in self.plans:
                    groups.append([functools.partial(self.time_policy, name), functools.partial(self.time_floor, name)])
                order.shuffle(groups)
                start = perf_counter()
                for group in groups:
                    order.shuffle(group)
                    for item in group:
                        item()
                print(f"repetition {repetition + 1}/{repetitions}: {perf_counter() - start:.1f} s", file=sys.stderr)
                if repetition < 0:
                    self.unpruned.clear()
                    self.samples = {name: Samples() for name in self.plans}


def seconds(work: Callable[[], Any]) -> float:
    """Return how long `work` takes; the garbage of earlier runs is not its business."""
    gc.collect()
    start = perf_counter()
    work()
    return perf_counter() - start


# ---- memory ---------------------------------------------------------------------------------------------------------


def peak_rss() -> tuple[int, int]:
    """Return (peak, now) resident bytes of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        values = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return tuple(int(values[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))  # type: ignore[return-value]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Start the peak anew where the kernel allows it, so that building the model does not hide the prefill."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("this system cannot reset a peak; it may stem from building the model", file=sys.stderr)


def memory_child(options: argparse.Namespace) -> None:
    """Run two prefills of one variant in this fresh process and print its peak (the first one warms up)."""
    torch.set_grad_enabled(False)
    shape, dtype = shape_of(options), getattr(torch, options.dtype)
    model, inputs = build(shape, dtype), prompts(shape, options.batch, dtype)
    # Made for the unpruned run too: what importing the plugins takes once must not pass for a cost of a prefill.
    planned = plan(KEEP_ALL if options.child == "unpruned" else BUILT_IN.get(options.child, options.child), model)
    gc.collect()
    forget_peak()
    before = peak_rss()[1]
    for _ in range(2):
        with nullcontext() if options.child == "unpruned" else pruned(model, planned):
            prefill(model, inputs)
    print(json.dumps({"peak": peak_rss()[0], "before": before}))


def memory(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, per variant, the median over fresh processes of peak RSS and of what the prefill added, in MiB."""
    passed = ["--preset", options.preset, "--dtype", options.dtype, "--batch", str(options.batch)]
    for name in ("width", "feed_forward", "heads", "text", "threads"):
        if getattr(options, name) is not None:
            passed += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    # glibc moves this threshold as it goes, and then keeps what was freed: the peak would tell about fragmentation.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    found: dict[str, list[dict[str, int]]] = {name: [] for name in ("unpruned", *options.policies)}
    for _ in range(options.memory_repeats):
        for name, results in found.items():
            print(f"memory: {name}", file=sys.stderr)
            command = [sys.executable, __file__, *passed, "--child", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        name: {
            "peak_mib": statistics.median(r["peak"] for r in results) / 2**20,
            "added_mib": statistics.median(r["peak"] - r["before"] for r in results) / 2**20,
            "spread_mib": (max(r["peak"] for r in results) - min(r["peak"] for r in results)) / 2**20,
        }
        for name, results in found.items()
    }


# ---- results --------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles, smallest and number of values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"q1": low, "median": middle, "q3": high, "min": min(values), "n": len(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each repetition."""
    return [a / b for a, b in zip(above, below, strict=True)]


def results(bench: Bench) -> dict[str, Any]:
    """Return one row per variant."""
    shape = bench.shape
    rows: dict[str, Any] = {"unpruned": {"seconds": quartiles(bench.unpruned)}}
    for name, samples in bench.samples.items():
        planned = bench.plans[name]
        cost, dense = (make(shape.visual, shape.text) for make in (planned.cost, planned.dense_cost))
        shares = [sum(spent.values()) / whole for spent, whole in zip(samples.spent, samples.policy, strict=True)]
        stage_shares = [
            sum(value for label, value in spent.items() if label.startswith("stage")) / whole
            for spent, whole in zip(samples.spent, samples.policy, strict=True)
        ]
        rows[name] = {
            "seconds": quartiles(samples.policy),
            "floor_seconds": quartiles(samples.floor),
            "to_floor": quartiles(ratios(samples.policy, samples.floor)),
            "to_floor_of_minima": min(samples.policy) / min(samples.floor),
            "speed_up": quartiles(ratios(bench.unpruned, samples.policy)),
            "floor_speed_up": quartiles(ratios(bench.unpruned, samples.floor)),
            "flops_ratio": cost.flops / dense.flops,
            "average_visual_tokens": cost.average_entering,
            "engine_share": quartiles(shares),
            "stage_share": quartiles(stage_shares),
            "engine_ms": {
                label: statistics.median(spent[label] for spent in samples.spent) * 1e3 for label in bench.spent.seconds
            },
            "enter_ms": statistics.median(samples.enter) * 1e3,
        }
    return rows


def spread(stats: Mapping[str, float], digits: int = 3) -> str:
    return f"{stats['median']:.{digits}f} [{stats['q1']:.{digits}f}, {stats['q3']:.{digits}f}]"


def markdown(record: Mapping[str, Any]) -> str:
    """Return the table and, above it, what it was measured with."""
    about, rows, rss = record["about"], record["rows"], record["memory"]
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['date']} · tokenprune {about['tokenprune']}, torch {about['torch']}, transformers "
        f"{about['transformers']}, Python {about['python']} · {about['cpu']}, {about['threads']} threads · "
        f"{about['dtype']}, batch {about['batch']}, {about['repetitions']} repetitions · decoder "
        f"{about['decoder_parameters'] / 1e9:.2f} B parameters, {about['shape']['depth']} layers of width "
        f"{about['shape']['width']}, {about['visual_tokens']} visual + {about['shape']['text']} text tokens · "
        f"{about['others']}",
        "",
        "| | prefill, s | its floor, s | policy / floor | speed-up | 1 / FLOPs | engine | stages | peak RSS, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [name, spread(row["seconds"])]
        if name == "unpruned":
            cells += ["", "", "1", "1", "", ""]
        else:
            cells += [
                spread(row["floor_seconds"]), spread(row["to_floor"]), spread(row["speed_up"], 2),
                f"{1 / row['flops_ratio']:.2f}", f"{row['engine_share']['median']:.2%}",
                f"{row['stage_share']['median']:.2%}",
            ]  # fmt: skip
        cells.append(_memory_cell(rss, name))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _memory_cell(rss: Mapping[str, Mapping[str, float]] | None, name: str) -> str:
    return "{peak_mib:.0f} (+{added_mib:.0f}) ± {spread_mib:.0f}".format(**rss[name]) if rss else ""


def cpu_name() -> str:
    """Return the processor's name and what it has for matrices."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    named = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"


class Others:
    """How much of the machine other processes used meanwhile: a noisy neighbour belongs beside the numbers."""

    def __init__(self) -> None:
        self._start = self._now()
        self._load = os.getloadavg()[0]

    def _now(self) -> tuple[float, float, float]:
        busy = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        return busy.user + busy.nice + busy.system, own.user + own.system, perf_counter()

    def __str__(self) -> str:
        busy, own, wall = (now - start for now, start in zip(self._now(), self._start, strict=True))
        share = max(0.0, busy - own) / (wall * (psutil.cpu_count() or 1))
        return f"other processes used {share:.0%} of the machine meanwhile (load before: {self._load:.1f})"


def about(options: argparse.Namespace, bench: Bench, others: Others) -> dict[str, Any]:
    """Return what the numbers were measured with."""
    return {
        "command": shlex.join(["python", "benchmarks/prefill.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "tokenprune": version("tokenprune-vlm"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "batch": options.batch,
        "repetitions": options.repetitions,
        "attention": bench.model.config.text_config._attn_implementation,
        "shape": asdict(bench.shape),
        "visual_tokens": bench.shape.visual,
        "decoder_parameters": sum(p.numel() for p in bench.model.model.language_model.layers.parameters()),
        "others": str(others),
    }


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the preset with what the command line changes."""
    changes = {name: getattr(options, name) for name in ("width", "feed_forward", "heads", "text")}
    preset = QUICK if options.preset == "quick" else FULL
    return replace(preset, **{name: value for name, value in changes.items() if value is not None})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=["full", "quick"], default="full")
    parser.add_argument("--quick", dest="preset", action="store_const", const="quick", help="a tiny model, to debug")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="names, paths, or keep-all")
    parser.add_argument("--width", type=int)
    parser.add_argument("--feed-forward", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--text", type=int, help="text tokens per prompt")
    parser.add_argument("--memory", action="store_true", help="also measure peak RSS, each variant in fresh processes")
    parser.add_argument("--memory-repeats", type=int, default=3)
    parser.add_argument("--memory-only", action="store_true", help="measure nothing else (to be merged by hand)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.child:
        memory_child(options)
        return
    # Before the model is built here: the two must not share the machine's memory.
    rss = memory(options) if options.memory or options.memory_only else None
    if options.memory_only:
        print(json.dumps(rss, indent=2))
        return
    torch.set_grad_enabled(False)
    bench = Bench(shape_of(options), getattr(torch, options.dtype), options.batch, options.policies)
    bench.check()
    others = Others()
    bench.run(options.repetitions, options.warm_up)
    record = {"about": about(options, bench, others), "rows": results(bench), "memory": rss}
    record["samples"] = {"unpruned": bench.unpruned, **{name: asdict(s) for name, s in bench.samples.items()}}
    table = markdown(record)
    print(table)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(table)


if __name__ == "__main__":
    main()
