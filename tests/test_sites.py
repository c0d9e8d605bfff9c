"""Sites before the decoder and while decoding, positions counted anew, merged tokens: each against the obvious slow way."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import transformers as T
import zoo
from torch import Tensor

from policies import policy, stage
from tokenprune.errors import InputError, PolicyError
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.plan import plan
from tokenprune.plugins import Entry, registry
from tokenprune.sequence import Slots, cut_mask
from tokenprune.session import compress
from tokenprune.testing import check_policy, hidden_columns
from tokenprune.tokens import Signal, Site

LLAVA = zoo.ZOO["llava"]
CLS = {"name": "attention", "from": "vision.layers.-2", "query": "cls"}
RECEIVED = {"name": "attention", "from": "vision.layers.-1", "query": "all"}


def outputs(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


# ---- before the decoder


@pytest.mark.parametrize("at", ["vision.output", "projector.output"])
@pytest.mark.parametrize("scorer", [CLS, RECEIVED, "random"], ids=["cls", "received", "random"])
def test_a_site_before_the_decoder_equals_the_masked_dense_run(at: str, scorer: Any) -> None:
    wanted = policy("early", stage(at, scorer, keep_ratio=0.5, per="image"), stage("llm.layers.3", keep_ratio=0.5))
    check_policy(LLAVA.model(), LLAVA.inputs(3), wanted, steps=4, forbidden_tokens=LLAVA.suppress)


def test_the_projector_runs_on_the_kept_tokens_only() -> None:
    model, inputs, seen = LLAVA.model(), LLAVA.inputs(2), []
    projector = model.model.multi_modal_projector.linear_1
    handle = projector.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-2]))
    with (
        torch.no_grad(),
        compress(model, policy("early", stage("vision.output", CLS, keep_tokens=5, per="image"))) as session,
    ):
        model(**inputs)
    handle.remove()
    assert seen == [2 * 5]
    assert session.report.stages[0].tokens_out == [5, 5]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("at", ["vision.output", "projector.output"])
def test_towers_with_windows_and_merged_patches(family: str, at: str) -> None:
    tiny = zoo.ZOO[family]
    scorer = {"name": "attention", "from": "vision.layers.0", "query": "all"}
    wanted = policy("early", stage(at, scorer, keep_tokens=5, per="image"))
    for inputs in (tiny.inputs(2), tiny.ragged()):  # type: ignore[misc]
        check_policy(tiny.model(), inputs, wanted, steps=3, forbidden_tokens=(zoo.IMAGE, zoo.VIDEO, 96, 97))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_what_leaves_the_projector_is_what_enters_the_decoder_in_prompt_order(family: str) -> None:
    """Were the order of windows wrong, the two readings of the same tokens would differ."""
    tiny = zoo.ZOO[family]
    model, inputs = tiny.model(), tiny.ragged()  # type: ignore[misc]
    gaps = {}
    for at in ("projector.output", "llm.input"):
        scorer = {"name": "hidden_norm", "from": at}
        with torch.no_grad(), compress(model, policy("x", stage("llm.layers.2", scorer, keep_ratio=0.5))) as session:
            model(**inputs)
        gaps[at] = session.report.stages[0].scores
    for one, other in zip(gaps["projector.output"], gaps["llm.input"], strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(one, other)
        assert len(one) == 0 or one.std() > 0


def test_ragged_prompts_with_several_images_take_tokens_of_their_own() -> None:
    model, inputs = LLAVA.model(), LLAVA.ragged()
    wanted = policy("early", stage("vision.output", CLS, keep_tokens=3, per="image"))
    report = check_policy(model, inputs, wanted, steps=3, forbidden_tokens=LLAVA.suppress)
    assert report.stages[0].tokens_out == [3, 6, 0]
    alone = {name: value[:1] for name, value in inputs.items()}
    with torch.no_grad(), compress(model, wanted) as session:
        model(**alone)
    assert torch.equal(session.report.stages[0].kept[0], report.stages[0].kept[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tower_attention_equals_the_matrices_of_an_eager_tower(attention: str) -> None:
    model, inputs = LLAVA.model(attention), LLAVA.ragged()
    with torch.no_grad():
        eager = LLAVA.model("eager")
        tower = eager.model.vision_tower(inputs["pixel_values"], output_attentions=True)
    for layer, query in ((-2, "cls"), (-1, "all"), (0, "all")):
        scorer = {"name": "attention", "from": f"vision.layers.{layer}", "query": query}
        with (
            torch.no_grad(),
            compress(model, policy("read", stage("projector.output", scorer, keep_ratio=0.5))) as session,
        ):
            model(**inputs)
        weights = tower.attentions[layer].mean(1)  # [images, 17, 17]
        expected = weights[:, 0, 1:] if query == "cls" else weights[:, :, 1:].mean(1)
        record = session.report.stages[0]
        assert record.scores is not None
        rows = [expected[:1], expected[1:3], expected[:0]]
        for got, want in zip(record.scores, rows, strict=True):
            torch.testing.assert_close(got, want.flatten(), atol=1e-6, rtol=1e-4)


def test_a_tower_without_a_cls_token() -> None:
    """SigLIP: what a patch receives equals the eager matrices; rows that do not exist are refused."""
    torch.manual_seed(0)
    config = T.LlavaConfig(
        vision_config=zoo.siglip(), text_config=zoo.text("llama"), image_token_index=zoo.IMAGE,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    model, inputs = T.LlavaForConditionalGeneration(config).eval(), LLAVA.inputs(2)
    wanted = policy("siglip", stage("vision.output", RECEIVED, keep_ratio=0.5, per="image"))
    report = check_policy(model, inputs, wanted, steps=2, forbidden_tokens=LLAVA.suppress)
    tower = model.model.vision_tower
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        expected = tower(inputs["pixel_values"], output_attentions=True).attentions[-1].mean(1).mean(1)
    assert report.stages[0].scores is not None
    for row, want in zip(report.stages[0].scores, expected, strict=True):
        torch.testing.assert_close(row, want, atol=1e-6, rtol=1e-4)
    with pytest.raises(PolicyError, match="this tower has no CLS token; use query: all"):
        plan(policy("x", stage("projector.output", CLS, keep_ratio=0.5)), model)


def test_tower_states_keys_and_projector_outputs_are_what_the_modules_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, read = LLAVA.model(), LLAVA.inputs(2), {}
    sites = ("vision.layers.0", "vision.output", "projector.output", "llm.input")
    wanted = (
        *(Signal("hidden", at=Site(site)) for site in sites),
        Signal("keys", at=Site("vision.layers.1")),
        Signal("hidden"),
    )

    @dataclass(frozen=True)
    class Reads(Scorer):
        """Keeps what it read."""

        name: ClassVar[str] = "reads"

        def signals(self) -> tuple[Signal, ...]:
            return wanted

        def score(self, ctx: PruneContext) -> Tensor:
            read.update({signal: ctx.read(signal) for signal in wanted})
            return ctx.noise()

    monkeypatch.setitem(registry().of("scorer"), "reads", Entry("reads", "scorer", Reads, "here", "test"))
    with torch.no_grad(), compress(model, policy("x", stage("llm.layers.2", "reads", keep_ratio=0.5))):
        model(**inputs)
    with torch.no_grad():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states
        projected = model.model.multi_modal_projector(states[-2][:, 1:])
    by_site = {(signal.name, str(signal.at)): value for signal, value in read.items()}
    torch.testing.assert_close(by_site["hidden", "vision.layers.0"], states[1][:, 1:])
    torch.testing.assert_close(by_site["hidden", "vision.output"], states[-2][:, 1:])
    torch.testing.assert_close(by_site["hidden", "projector.output"], projected)
    torch.testing.assert_close(by_site["hidden", "llm.input"], projected)
    assert by_site["keys", "vision.layers.1"].shape == (2, 16, 2, 16)


def test_features_made_before_are_refused_where_the_vision_side_is_read() -> None:
    """Also when the tower ran inside the block, but on its own: what it saw need not be what the prompt shows."""
    model, inputs = LLAVA.model(), LLAVA.inputs(1)
    for at in ("vision.output", "projector.output"):
        with (
            pytest.raises(InputError, match="give the images to"),
            torch.no_grad(),
            compress(model, policy("x", stage(at, CLS, keep_ratio=0.5, per="image"))),
        ):
            model.get_image_features(inputs["pixel_values"])
            model(input_ids=inputs["input_ids"])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            stage("projector.output", "attention", keep_ratio=0.5),
            "'attention' needs attention of the decoder, which has not run",
        ),
        (
            stage("projector.output", {**CLS, "from": "vision.layers.9"}, keep_ratio=0.5),
            "the model has 2 vision layers",
        ),
        (stage("vision.layers.1", CLS, keep_ratio=0.5), "tokens leave at vision.output or later"),
        (stage("decode.layers.0", "attention", keep_ratio=0.5), "cannot act while decoding before layer 1"),
        (stage("decode.layers.2", "variation", keep_ratio=0.5), "while decoding there is the attention of the token"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(wanted: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        plan(policy("x", wanted), LLAVA.model())


def test_beams_and_samples_share_the_images_of_their_prompt() -> None:
    """`generate` encodes images once and repeats prompts; each repeated row must get the decision of its own images."""
    model = LLAVA.model()
    # Older versions repeat pixels image by image, so that beams of a prompt with two images see each other's: one each then.
    encodes_first = "mm_encoder_outputs" in inspect.signature(type(model).forward).parameters
    inputs = LLAVA.ragged() if encodes_first and LLAVA.ragged else LLAVA.inputs(3)
    wanted = policy("early", stage("vision.output", CLS, keep_tokens=4, per="image"))
    options: dict[str, Any] = dict(max_new_tokens=5, num_beams=3, do_sample=False, suppress_tokens=list(LLAVA.suppress))
    with torch.no_grad(), compress(model, wanted) as session:
        got = model.generate(**inputs, **options)
        beams = session.report
        model(**inputs)
    for group in range(3):
        for row in beams.stages[0].kept[3 * group : 3 * group + 3]:
            assert torch.equal(row, session.report.stages[0].kept[group])
    with torch.no_grad(), hidden_columns(session.plan.adapter.layers(model), session.report):
        assert torch.equal(model.generate(**inputs, **options), got)


def test_a_policy_for_video_refuses_a_prompt_without_a_clip() -> None:
    wanted = policy("v", stage("llm.layers.2", keep_ratio=0.5), modality="video")
    with (
        pytest.raises(InputError, match="is for video: it compares frames"),
        compress(LLAVA.model(), wanted) as session,
    ):
        outputs(session.model, LLAVA.inputs(1))
    tiny = zoo.ZOO["qwen2_vl_video"]
    with compress(tiny.model(), wanted) as session:
        outputs(session.model, tiny.inputs(1))
    assert session.report.stages[0].tokens_out == [24]


def test_a_family_without_a_known_tower_says_so() -> None:
    with pytest.raises(PolicyError, match="adapter 'generic' does not know the vision side of this model"):
        plan(policy("x", stage("projector.output", RECEIVED, keep_ratio=0.5)), zoo.ZOO["gemma3"].model())


# ---- several stages at one site


def test_stages_at_one_site_act_one_after_another() -> None:
    wanted = policy(
        "twice",
        stage("llm.layers.2", "attention", keep_ratio=0.75),
        stage("llm.layers.2", "variation", keep_ratio=0.5),
        stage("llm.layers.2", {"name": "attention", "layer": "this", "query": "text"}, keep_tokens=2),
    )
    report = check_policy(LLAVA.model(), LLAVA.inputs(3), wanted, steps=4, forbidden_tokens=LLAVA.suppress)
    assert [record.tokens_out for record in report.stages] == [[12] * 3, [6] * 3, [2] * 3]


def test_several_stages_before_the_projector() -> None:
    wanted = policy(
        "twice",
        stage("vision.output", CLS, keep_ratio=0.5, per="image"),
        stage("vision.output", RECEIVED, keep_tokens=3, per="image"),
    )
    report = check_policy(LLAVA.model(), LLAVA.inputs(3), wanted, steps=3, forbidden_tokens=LLAVA.suppress)
    assert [record.tokens_out for record in report.stages] == [[8] * 3, [3] * 3]
    first, second = (set(record.kept[1].tolist()) for record in report.stages)
    assert second < first


# ---- attention before the rotary embedding


@pytest.mark.parametrize("layer", ["previous", "this"])
def test_rope_off_equals_projections_without_rotation(layer: str) -> None:
    model, inputs = LLAVA.model(), LLAVA.inputs(2)
    del inputs["attention_mask"]
    scorer = {"name": "attention", "rope": False, "layer": layer, "normalise": "visual"}
    with torch.no_grad(), compress(model, policy("x", stage("llm.layers.3", scorer, keep_ratio=0.5))) as session:
        model(**inputs)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[2 if layer == "previous" else 3]
        block = model.model.language_model.layers[2 if layer == "previous" else 3]
        normed = block.input_layernorm(states)
        q = block.self_attn.q_proj(normed)[:, -1].view(2, 4, 1, 16)
        k = block.self_attn.k_proj(normed).view(2, -1, 2, 16).transpose(1, 2).repeat_interleave(2, dim=1)
    visual = inputs["input_ids"] == zoo.IMAGE
    for row in range(2):
        logits = (q[row] @ k[row][:, visual[row]].transpose(-1, -2)) * 16**-0.5
        assert session.report.stages[0].scores is not None
        torch.testing.assert_close(
            session.report.stages[0].scores[row], logits.softmax(-1).mean(0)[0], atol=1e-6, rtol=1e-4
        )


# ---- positions


@pytest.mark.parametrize("family", ["llava", "idefics3", "mistral3"])
def test_renumbered_positions_equal_the_dense_run_with_the_same_ids(family: str) -> None:
    tiny = zoo.ZOO[family]
    wanted = policy(
        "renumbered", stage("llm.layers.2", keep_ratio=0.5), stage("llm.layers.4", "attention", keep_ratio=0.25),
        positions="renumber",
    )  # fmt: skip
    check_policy(tiny.model(), tiny.inputs(3), wanted, steps=6, forbidden_tokens=tiny.suppress)


def test_where_positions_are_a_grid_they_may_be_kept_but_nothing_may_move() -> None:
    tiny = zoo.ZOO["qwen2_vl"]
    wanted = policy("x", stage("llm.layers.2", keep_ratio=0.5), positions="renumber_unless_grid")
    assert not plan(wanted, tiny.model()).renumbers and plan(wanted, LLAVA.model()).renumbers
    check_policy(tiny.model(), tiny.inputs(2), wanted, steps=2, forbidden_tokens=(zoo.IMAGE, zoo.VIDEO, 96, 97))
    moving = {**stage("llm.layers.2", keep_ratio=0.5), "merger": {"name": "recycle", "place": "append"}}
    with pytest.raises(PolicyError, match="moves kept tokens to other places"):
        plan(policy("x", moving, positions="renumber_unless_grid"), tiny.model())
    assert plan(policy("x", moving, positions="renumber"), LLAVA.model()).stages


def test_renumbering_changes_what_comes_out_and_grids_refuse_it() -> None:
    model, inputs = LLAVA.model(), LLAVA.inputs(1)
    runs = []
    for positions in ("keep", "renumber"):
        with compress(model, policy("x", stage("llm.layers.2", keep_ratio=0.5), positions=positions)):
            runs.append(outputs(model, inputs)[:, -1])
    assert (runs[0] - runs[1]).abs().max() > 1e-4
    with pytest.raises(PolicyError, match="M-RoPE"):
        plan(policy("x", stage("llm.layers.2", keep_ratio=0.5), positions="renumber"), zoo.ZOO["qwen2_vl"].model())


# ---- decoding


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(("below", "otherwise"), [(1.1, "reuse"), (0.999, "reuse"), (0.999, "full"), (-2.0, "reuse")])
def test_a_view_while_decoding_equals_the_dense_run_with_those_keys_hidden(
    prefill: bool, below: float, otherwise: str
) -> None:
    decode = {
        **stage("decode.layers.3", "attention", keep_ratio=0.3), "refresh": {"similarity_below": below, "otherwise": otherwise}
    }  # fmt: skip
    stages = [stage("llm.layers.2", keep_ratio=0.5)] if prefill else []
    report = check_policy(
        LLAVA.model(), LLAVA.inputs(3), policy("d", *stages, decode), steps=8, forbidden_tokens=LLAVA.suppress
    )
    record = report.decoding
    assert record is not None and len(record.hidden) == 7  # the first token comes from the prefill
    fresh = torch.stack(record.refreshed)
    assert fresh[0].all()
    assert fresh.all() == (below > 1)
    hidden = torch.stack([row.sum(1) for row in record.hidden])
    assert (hidden[fresh] == (8 - 2 if prefill else 16 - 4)).all()
    if otherwise == "full":
        assert (hidden[~fresh] == 0).all() and not fresh.all()


def test_decoding_views_follow_beams() -> None:
    decode = stage("decode.layers.2", "attention", keep_ratio=0.25)
    model, inputs = LLAVA.model(), LLAVA.inputs(2)
    options: dict[str, Any] = dict(max_new_tokens=6, num_beams=3, do_sample=False, suppress_tokens=list(LLAVA.suppress))
    with torch.no_grad(), compress(model, policy("d", decode)) as session:
        got = model.generate(**inputs, **options)
    assert got.shape[0] == 2 and session.report.decoding is not None
    assert len(session.report.decoding.hidden) == 5
    assert all(row.shape[0] == 6 for row in session.report.decoding.hidden)


# ---- merging


MERGING = {"name": "bipartite", "from": "llm.input"}


def test_merged_states_continue_and_nothing_else_changes() -> None:
    """A merger that adds zero must be the mask oracle's run; one that averages must differ from it."""
    model, inputs = LLAVA.model(), LLAVA.inputs(2)
    plain = stage("llm.layers.2", "attention", keep_ratio=0.5)
    runs = {}
    for merger in ("drop", "nearest_mean"):
        with compress(model, policy("m", {**plain, "merger": merger})) as session:
            runs[merger] = outputs(model, inputs)[:, -1]
        runs[merger + " kept"] = session.report.stages[0].kept
    assert all(torch.equal(a, b) for a, b in zip(runs["drop kept"], runs["nearest_mean kept"], strict=True))
    assert (runs["drop"] - runs["nearest_mean"]).abs().max() > 1e-5


def test_proportional_attention_equals_tokens_repeated_as_often_as_they_stand_for() -> None:
    """Softmax over n copies of a key is softmax over one key with ln n added."""
    sizes = torch.tensor([[1.0, 3.0, 1.0, 2.0]])
    slots = Slots(torch.tensor([[0, 1, 4, 6]]), 7, log_sizes=sizes.log())
    mask = cut_mask(None, form="bool", dtype=torch.float64, keys=slots, offset=0, queries=1, rows=None, dead_rows=None)
    assert mask is not None
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=g, dtype=torch.float64) for n in (1, 4, 4))
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    often = sizes[0].long()
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(often, 2), v.repeat_interleave(often, 2)
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("proportional", [False, True])
def test_merging_with_sizes_runs_through_generate(proportional: bool) -> None:
    model, inputs = LLAVA.model(), LLAVA.inputs(3)
    wanted = policy(
        "tome", {"at": "llm.layers.2", "selector": "bipartite", "budget": {"keep_ratio": 0.5}, "merger": "nearest_mean"},
        proportional_attention=proportional,
    )  # fmt: skip
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, suppress_tokens=list(LLAVA.suppress))
    with torch.no_grad(), compress(model, wanted) as session:
        together = model.generate(**inputs, **options)
    assert session.report.stages[0].tokens_out == [8, 8, 8]
    with torch.no_grad(), compress(model, wanted):
        alone = model.generate(**{name: value[1:2] for name, value in inputs.items()}, **options)
    assert torch.equal(alone[0], together[1])
