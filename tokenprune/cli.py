"""The command line. It parses, calls the library, and is the only file that prints.

Results go to stdout (with `--json`, one JSON document and nothing else), everything else to stderr. A user's mistake ends
in one sentence and exit code 1; wrong usage in exit code 2.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from typer.core import TyperGroup

from tokenprune.errors import PluginError, PolicyError, Problem, TokenpruneError, did_you_mean
from tokenprune.plan import Cost, Plan, plan
from tokenprune.plugins import DISTRIBUTION, Failure, registry
from tokenprune.plugins import KINDS as COMPONENT_KINDS
from tokenprune.policy import Policy, json_schema, list_policies

if TYPE_CHECKING:
    from tokenprune.comparison import Comparison, Spread

__all__ = ["app", "build", "main"]

PARTS = tuple(f"{kind}s" for kind in COMPONENT_KINDS)
KINDS = ("policies", *PARTS)
DEFAULT_VISUAL = 1024  # for models whose number of visual tokens depends on the image
DEFAULT_TEXT = 64
_JSON = "tokenprune.json"


class _Group(TyperGroup):
    """Turns every TokenpruneError, those of plugins' commands included, into one message and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenpruneError as error:
            _fail(error, as_json=ctx.meta.get(_JSON, False))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compress the visual tokens of large vision-language models. A policy is a name (`tokenprune list`), "
    "a YAML file, or either with `?key=value` overrides.",
)


def build() -> typer.Typer:
    """Return the command line with the commands of plugins; a plugin whose hook fails is recorded, not fatal."""
    try:
        plugins = registry()
    except PluginError:
        return app  # the command that needs the registry tells; `doctor` must still run
    known = {(failure.plugin, failure.error) for failure in plugins.failures}
    for implementation in plugins.manager.hook.register_commands.get_hookimpls():
        try:
            implementation.function(*[app for _ in implementation.argnames])
        except Exception as error:  # a stranger's code, see plugins.load_registry
            name, text = implementation.plugin_name, f"register_commands: {type(error).__name__}: {error}"
            if (name, text) not in known:
                plugins.failures.append(Failure(name, dict(plugins.plugins).get(name, "unknown"), text))
    return app


def main() -> None:
    """Run the command line (the `tokenprune` script)."""
    build()(prog_name="tokenprune")


# ---- options shared by commands --------------------------------------------------------------------------------------


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON] = value
    return value


def _print_version(value: bool) -> None:
    if value:
        print(f"tokenprune {_installed_version()}")
        raise typer.Exit


def _installed_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown (not installed)"


# Eager: an error in another option's value must already know where it is to be written.
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.", callback=_remember_json, is_eager=True)
]
Model = Annotated[
    str | None,
    typer.Option("--model", envvar="TOKENPRUNE_MODEL", help="Model folder, Hub id or (not for run) model type."),
]
PolicyName = Annotated[str, typer.Argument(metavar="POLICY", help="Name or YAML file, `?key=value` overrides parts.")]


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


# ---- commands --------------------------------------------------------------------------------------------------------


@app.command("list")
def list_(kind: Annotated[str, typer.Argument(help=", ".join(KINDS))] = "policies", as_json: Json = False) -> None:
    """List what is installed: policies, scorers, selectors, mergers or adapters."""
    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if kind == "policies":
        columns = ("name", "summary", "paper")
        rows = [
            {"name": i.name, "summary": i.error or i.summary, "paper": i.paper, "path": str(i.path)}
            | {"distribution": i.distribution, "error": i.error or None}
            for i in list_policies()
        ]
    else:
        columns = ("name", "summary", "distribution")
        rows = [
            {"name": e.name, "summary": e.cls.summary(), "module": e.module, "distribution": e.distribution}
            for e in sorted(registry().of(kind.removesuffix("s")).values(), key=lambda entry: entry.name)
        ]
    if as_json:
        return _json(rows)
    _console().print(_table(columns, [[row[column] or "-" for column in columns] for row in rows]))


@app.command()
def show(
    policy: PolicyName,
    model: Model = None,
    visual_tokens: Annotated[int | None, typer.Option(min=0, help="Visual tokens of the prompt.")] = None,
    text_tokens: Annotated[int, typer.Option(min=0, help="Other tokens of the prompt.")] = DEFAULT_TEXT,
    batch: Annotated[int, typer.Option(min=1, help="Prompts in the batch.")] = 1,
    as_json: Json = False,
) -> None:
    """Show a policy's plan on a model: stages, tokens entering each layer, FLOPs and KV cache. Loads no weights."""
    loaded = Policy.load(policy)
    with _quiet():
        from tokenprune.loading import load_config

        target = load_config(model)
        made = _planned(loaded, target.config)
    visual = visual_tokens if visual_tokens is not None else made.visual_tokens
    assumed = visual is None
    visual = DEFAULT_VISUAL if visual is None else visual
    data = {"model": target.name, "batch": batch, **_plan_data(made, visual, text_tokens, batch)}
    if as_json:
        return _json({**data, "visual_tokens_assumed": assumed, "yaml": _yaml_of(policy, loaded)})
    _print_plan(data, assumed)
    _print_yaml(_yaml_of(policy, loaded))


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(help="YAML files, or directories of them.")],
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Validate policy files; with --model also lay them on that model. Exit code 1 if anything is wrong."""
    config = None
    if model is not None:
        with _quiet():
            from tokenprune.loading import load_config

            config = load_config(model).config
    results = [(str(path), _problems(path, config)) for path in _policy_files(files)]
    if as_json:
        _json({"files": [_check_data(name, problems) for name, problems in results]})
    else:
        for name, problems in results:
            for problem in problems:
                print(problem if problem.source else f"{name}: {problem}", file=sys.stderr)
            if not problems:
                print(f"{name}: ok")
    if any(problems for _, problems in results):
        raise typer.Exit(1)


@app.command()
def run(
    policy: PolicyName,
    image: Annotated[
        str | None, typer.Option(help="Image file; `none` asks without one. Default: the packaged sample.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The question. Default: the packaged sample's.")] = None,
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Heat map (PNG). Default: <policy>.heatmap.png here.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed prefills of each run.")] = 3,
    dtype: Annotated[str, typer.Option(help="Number type of the weights: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: cuda if there is one.")] = None,
    text_tower: Annotated[
        str | None, typer.Option(help="CLIP model, id or folder, for policies that compare images with text.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a model about an image with and without a policy: answers, report, tokens and time per layer, heat map."""
    if image is not None and prompt is None:
        raise typer.BadParameter("--image needs a question: give --prompt too")
    loaded_policy = Policy.load(policy)
    out = out or Path(f"{loaded_policy.name.replace('/', '-')}.heatmap.png")
    if out.is_dir():
        raise typer.BadParameter(f"--out: {str(out)!r} is a directory; name a file")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"--out: there is no directory {str(out.parent)!r}")
    with _quiet(), _spinner() as progress:
        from tokenprune import loading
        from tokenprune.comparison import compare
        from tokenprune.text_tower import ClipText

        if image is None or prompt is None:  # no image, for an image needs a prompt
            packaged = loading.sample()
            image, prompt = str(packaged.image), packaged.question if prompt is None else prompt
        picture = None if image == "none" else loading.open_image(image)
        progress("loading the model")
        loaded = loading.load(model, dtype=dtype, device=device)
        made = _planned(loaded_policy, loaded.model.config)
        inputs = loading.prepare(loaded, picture, prompt)
        tower = None if text_tower is None else ClipText.from_pretrained(text_tower, loaded.processor)
        result = compare(
            loaded, made, inputs, max_new_tokens=max_new_tokens, repeat=repeat, progress=progress, text_tower=tower
        )
        heatmap = None
        if picture is not None and result.report.stages:
            from tokenprune.picture import draw

            progress("drawing")
            heatmap = draw(
                out,
                image=loading.seen_image(loaded, inputs, picture),
                spans=made.adapter.spans(loaded.model.config, inputs)[0],
                report=result.report,
                question=prompt,
                answers=(result.unpruned.answer, result.pruned.answer),
                layers_ms=(result.unpruned.layers, result.pruned.layers),
            )
    data: dict[str, Any] = {
        "model": loaded.name,
        "image": image,
        "prompt": prompt,
    }
    data |= _run_data(result) | {"heatmap": None if heatmap is None else str(heatmap)}
    if as_json:
        return _json(data)
    _print_run(result, prompt, heatmap)


@app.command()
def schema() -> None:
    """Print the JSON Schema of policy files, with the plugins installed here, for editors."""
    _json(json_schema())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look at this installation: versions, attention kernels, plugins, names that clash."""
    with _quiet(), _spinner() as progress:
        progress("looking around")
        from tokenprune.doctor import examine

        checks = examine()
    healthy = all(check.status != "fail" for check in checks)
    if as_json:
        fields = ("group", "name", "status", "detail")
        _json({"ok": healthy, "checks": [{name: getattr(check, name) for name in fields} for check in checks]})
    else:
        marks = {"ok": "ok", "note": "-", "warn": "warn", "fail": "FAIL"}
        rows = [[marks[check.status], check.group, check.name, check.detail] for check in checks]
        _console().print(_table(("", "group", "name", "found"), rows))
    if not healthy:
        raise typer.Exit(1)


@app.command()
def plugins(as_json: Json = False) -> None:
    """List the plugins that were loaded, what each offers, and those that failed."""
    found = registry()
    entries = [entry for kind in COMPONENT_KINDS for entry in found.of(kind).values()]
    rows = [
        {"plugin": name, "distribution": source, "offers": [f"{e.kind} {e.name}" for e in entries if e.module == name]}
        for name, source in found.plugins
    ]
    failures = [{"plugin": f.plugin, "distribution": f.distribution, "error": f.error} for f in found.failures]
    if as_json:
        return _json({"plugins": rows, "failures": failures})
    cells = [[str(row["plugin"]), str(row["distribution"]), ", ".join(row["offers"]) or "-"] for row in rows]
    _console().print(_table(("plugin", "distribution", "offers"), cells))
    for failure in found.failures:
        print(f"failed: {failure}")


# ---- what the commands need ------------------------------------------------------------------------------------------


class _DoesNotFitError(PolicyError):
    """A policy that is fine but does not fit the model, with policies that do."""

    def __init__(self, problems: Sequence[Problem], hint: str) -> None:
        super().__init__(problems)
        self.hint = hint


def _planned(policy: Policy, config: Any) -> Plan:
    """Return the plan, or raise and name installed policies that fit this model, the most alike first."""
    try:
        return plan(policy, config)
    except PolicyError as error:
        names = [info.name for info in list_policies() if not info.error and not _problems(info.path, config)]
        names.sort(key=lambda name: -SequenceMatcher(None, name, policy.name).ratio())
        raise _DoesNotFitError(error.problems, f"these policies fit this model: {', '.join(names[:5])}") from error


def _problems(path: Path, config: Any = None) -> tuple[Problem, ...]:
    """Return what is wrong with a policy file, on the model if a configuration is given."""
    try:
        policy = Policy.load(path)
        if config is not None:
            plan(policy, config)
    except PolicyError as error:
        return error.problems
    return ()


def _policy_files(names: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, names):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.rglob("*.yaml"))
        if not inside:
            raise PolicyError([Problem("there is no *.yaml file in this directory", str(path))])
        yield from inside


def _yaml_of(source: str, policy: Policy) -> str:
    """Return the file as written, comments included; what overrides made of it if there are any."""
    if "?" in source:
        return policy.to_yaml()
    paths = {info.name: info.path for info in list_policies()}
    return paths.get(source, Path(source)).read_text(encoding="utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own warnings, logs and progress bars out of the output; ours are errors and notes."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)
        transformers.utils.logging.enable_progress_bar()
        hub.setLevel(hub_level)


@contextmanager
def _spinner() -> Iterator[Callable[[str], None]]:
    """Yield a function that tells what is going on, where somebody is watching."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: None
        return
    with console.status("starting") as status:
        yield lambda step: status.update(step)


# ---- data ------------------------------------------------------------------------------------------------------------


def _plan_data(made: Plan, visual: int, text: int, batch: int) -> dict[str, Any]:
    left = made.counts(visual, text)
    arriving = (visual, *left)
    written = made.policy.to_dict()["stages"]
    stages = [
        {"number": s.number, "site": s.site, "layer": s.layer}
        | {
            "tokens_in": arriving[s.number] if not s.decodes else arriving[-1],
            "tokens_out": left[s.number] if not s.decodes else None,
            "decided_by": s.decided_by,
        }
        | {key: written[s.number].get(key) for key in ("scorer", "selector", "budget", "merger", "refresh")}
        for s in made.stages
    ]
    pruned, dense = made.cost(visual, text), made.dense_cost(visual, text)
    return {
        "policy": made.policy.name,
        "digest": made.policy.digest,
        "paper": made.policy.paper,
        "adapter": made.adapter.name,
        "layers": made.depth,
        "visual_tokens": visual,
        "text_tokens": text,
        "stages": stages,
        "entering": list(pruned.entering),
        "pruned": _cost_data(pruned, batch),
        "unpruned": _cost_data(dense, batch),
    }


def _cost_data(cost: Cost, batch: int) -> dict[str, Any]:
    return {
        "average_tokens_entering": cost.average_entering,
        "average_tokens_leaving": cost.average_leaving,
        "prefill_flops": cost.flops * batch,
        "visual_macs": cost.macs_as_papers_print * batch,
        "kv_bytes": cost.kv_bytes * batch,
    }


def _check_data(name: str, problems: Sequence[Problem]) -> dict[str, Any]:
    return {"file": name, "ok": not problems, "problems": [_problem_data(problem) for problem in problems]}


def _problem_data(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in ("message", "source", "line", "column")}


def _spread_data(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.low, "max": spread.high}


def _run_data(result: Comparison) -> dict[str, Any]:
    data: dict[str, Any] = {
        "answers": {"unpruned": result.unpruned.answer, "pruned": result.pruned.answer},
        "report": result.report.to_dict(),
        "latency_ratio": None,
        "timing": None,
    }
    if result.report.visual_tokens:
        data["latency_ratio"] = result.latency_ratio
        data["timing"] = {
            name: {
                "repeats": len(timed.first_token_ms),
                "first_token_ms": _spread_data(timed.first_token),
                "decoder_ms": _spread_data(timed.decoder),
                "layer_ms": timed.layers,
            }
            for name, timed in (("unpruned", result.unpruned), ("pruned", result.pruned))
        }
    return data


# ---- printing --------------------------------------------------------------------------------------------------------


def _json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _fail(error: TokenpruneError, *, as_json: bool) -> NoReturn:
    hint = getattr(error, "hint", None)
    if as_json:
        data: dict[str, Any] = {"error": str(error)}
        if isinstance(error, PolicyError):
            data["problems"] = [_problem_data(problem) for problem in error.problems]
        _json(data | ({"hint": hint} if hint else {}))
    else:
        lines = map(str, error.problems) if isinstance(error, PolicyError) else [str(error)]
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
    raise typer.Exit(1)


def _console() -> Console:
    """Return a console that never cuts lines in a pipe and takes no text for markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=10_000)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print_plan(data: dict[str, Any], assumed: bool) -> None:
    console = _console()
    console.print(f"{data['policy']} ({data['digest']}) on {data['model']}", style="bold")
    note = f" (depends on the image; {DEFAULT_VISUAL} assumed, --visual-tokens sets it)" if assumed else ""
    console.print(
        f"adapter {data['adapter']}, {data['layers']} decoder layers, "
        f"{data['visual_tokens']} visual tokens{note}, {data['text_tokens']} text tokens, batch {data['batch']}\n"
    )
    columns = ("stage", "at", "layer", "scorer", "selector", "merger", "budget", "tokens in", "tokens out")
    rows = [
        [
            *(
                str(s["number"]),
                s["site"],
                str(s["layer"]),
                _written(s["scorer"], "-"),
                _written(s["selector"], "topk"),
            ),
            *(
                _written(s["merger"], "drop"),
                _written(s["budget"], "solved"),
                str(s["tokens_in"]),
                _left(s),
            ),
        ]
        for s in data["stages"]
    ]
    console.print(_table(columns, rows, right=("stage", "layer", "tokens in", "tokens out")))
    console.print(f"\nvisual tokens entering each layer: {_ranges(data['entering'])}\n")
    console.print(_table(("", "pruned", "unpruned", "ratio"), _cost_rows(data), right=("pruned", "unpruned", "ratio")))


def _left(stage: dict[str, Any]) -> str:
    """Print how many tokens a stage leaves, as far as a plan can tell."""
    if stage["tokens_out"] is None:
        return "a view"
    return {"the plan": "{}", "each image": "{} an image"}.get(stage["decided_by"], "<= {}").format(stage["tokens_out"])


def _written(value: Any, default: str) -> str:
    """Print a part of a stage as one would write it in YAML; what is inside its parts stands in the file below."""
    if not isinstance(value, dict):
        return default if value is None else str(value)
    options = ", ".join(f"{key}: {_short(item)}" for key, item in value.items() if key != "name")
    return f"{value['name']} ({options})" if "name" in value else options


def _short(value: Any) -> str:
    """Print an option in a few words: of a part its name, of a quantity its statistic."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    if isinstance(value, dict):
        inner = value.get("name") or value.get("statistic") or value.get("selector") or value.get("scorer") or "topk"
        return _short(inner)
    return str(value)


def _cost_rows(data: dict[str, Any]) -> list[list[str]]:
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("average visual tokens entering a layer", "average_tokens_entering", lambda n: f"{n:.1f}"),
        ("average visual tokens leaving a layer", "average_tokens_leaving", lambda n: f"{n:.1f}"),
        ("prefill FLOPs of the decoder, text included", "prefill_flops", lambda n: f"{n / 1e12:.3g} T"),
        ("multiply-adds papers print as FLOPs, visual only", "visual_macs", lambda n: f"{n / 1e12:.3g} T"),
        ("KV cache after prefill, 16 bit", "kv_bytes", lambda n: f"{n / 2**20:.4g} MiB"),
    )
    rows = []
    for label, key, form in shown:
        pruned, dense = data["pruned"][key], data["unpruned"][key]
        rows.append([label, form(pruned), form(dense), f"{pruned / dense:.1%}" if dense else "-"])
    return rows


def _ranges(values: Sequence[int]) -> str:
    """Print `0-2: 576, 3-16: 288` for runs of equal values."""
    parts, start = [], 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            place = str(start) if index - 1 == start else f"{start}-{index - 1}"
            parts.append(f"{place}: {values[start]}")
            start = index
    return ", ".join(parts)


def _print_yaml(text: str) -> None:
    console = _console()
    console.print()
    if console.is_terminal:
        console.print(Syntax(text.rstrip(), "yaml", background_color="default", word_wrap=True))
    else:
        print(text.rstrip())


def _print_run(result: Comparison, question: str, heatmap: Path | None) -> None:
    console = _console()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("question", question)
    table.add_row("unpruned", result.unpruned.answer or "(nothing)")
    table.add_row("pruned", result.pruned.answer or "(nothing)")
    console.print(table)
    if not result.report.visual_tokens:
        print("notice: no visual tokens; ran unpruned", file=sys.stderr)
        return
    console.print(f"\n{result.report}\n")
    dense, pruned = result.unpruned, result.pruned
    rows = [
        [str(layer), str(result.report.visual_tokens[0]), str(tokens), f"{before:.2f}", f"{after:.2f}"]
        for layer, (tokens, before, after) in enumerate(
            zip(result.report.entering[0], dense.layers, pruned.layers, strict=True)
        )
    ]
    columns = ("layer", "tokens unpruned", "tokens pruned", "ms unpruned", "ms pruned")
    console.print(_table(columns, rows, right=columns))
    for label, before, after in (
        ("decoder layers", dense.decoder, pruned.decoder),
        ("time to first token", dense.first_token, pruned.first_token),
    ):
        console.print(
            f"{label}: {_ms(after)} pruned, {_ms(before)} unpruned, ratio {after.median / before.median:.2f} "
            f"(median of {len(dense.first_token_ms)}, smallest to largest)"
        )
    if heatmap is not None:
        console.print(f"heat map: {heatmap}")


def _ms(spread: Spread) -> str:
    return f"{spread.median:.1f} ms ({spread.low:.1f} to {spread.high:.1f})"
