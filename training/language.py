"""Stage 2: the projector and the language model learn to answer, over the frozen tower's features.

One sequence holds an image and many questions about it. The mask lets every question see the image and itself only, and
its position ids are those it would have alone, so each is exactly the prompt that the shipped model gets:
``<s> user: <image> question assistant: answer </s>``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from align import choose_patches, tower_states
from collage import GRID, KINDS, OBJECT, QA, Collage, make_layout, make_question, make_questions
from model import GROUPS, NOTHING, WORDS, build_tokenizer, vocabulary
from pool import Log, Pool, Threads, descend, group_slices, learning_rate, patch_words
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

PATCHES = GRID * GRID
# (steps, images per step, visual tokens per image): all object patches and random others first, which costs little,
# then more, and at last the whole grid, as the shipped model reads it.
PHASES = ((1600, 4, 36), (300, 6, 64), (80, 5, 160), (140, 4, PATCHES))
QUESTIONS = 12
PEAK = 1e-3
# (steps, layouts per step, visual tokens per layout, learning rate) of the rehearsal without images.
REHEARSAL = (1500, 4, 34, 1e-3)
EVERY = 200  # steps between evaluations
FOCUS_LAYERS = (3, 4)
FOCUS_WEIGHT = 0.5
READ_LAYER = 6
READ_WEIGHT = 0.5

TOKENIZER = build_tokenizer()
HEAD = TOKENIZER("USER:").input_ids  # <s> user :


@torch.no_grad()
def tower_features(model: LlavaForConditionalGeneration, pool: Pool, images: int) -> Tensor:
    """What the projector reads, float16 ``[images, 576, width]``: the patch states after the last layer but one."""
    parts = []
    for index in torch.arange(images).split(16):
        parts.append(tower_states(model, pool.pixels(index))[-2][:, 1:].half())
    return torch.cat(parts)


@torch.no_grad()
def kept_features(model: LlavaForConditionalGeneration, pixels: Tensor, keep: Tensor) -> Tensor:
    """What the projector reads at the kept patches, ``[batch, kept, width]``.

    Where few are kept the tower sees no others either, as in most of its own training: that is a tenth of the cost.
    """
    if keep.shape[1] < 100:
        return tower_states(model, pixels, keep)[-2][:, 1:]
    states = tower_states(model, pixels)[-2][:, 1:]
    return states.gather(1, keep[:, :, None].expand(-1, -1, states.shape[-1]))


@dataclass
class Packed:
    """Questions of several images, padded to one length: all ``[batch, length]`` but the mask ``[batch, 1, L, L]``."""

    ids: Tensor  # text token ids; 0 at visual tokens and padding
    positions: Tensor
    mask: Tensor
    answers: Tensor  # [number, 2]: row, index of the token that predicts the answer
    focus: Tensor  # bool [number, kept]: which kept patches the question is about
    about: Tensor  # [number, 3]: index of the object's colour, label and place within their groups; -100 for none


def pack(questions: list[list[QA]], keep: Tensor, compact: bool) -> Packed:
    """Lay out questions after their image's kept patches ``[batch, kept]``.

    ``compact``: kept tokens are numbered without gaps; otherwise each keeps the position it has in the whole grid.
    """
    kept = keep.shape[1]
    prefix = len(HEAD) + kept
    text_start = prefix if compact else len(HEAD) + PATCHES
    rows, positions, blocks, answers, focus, about = [], [], [], [], [], []
    for row, qas in enumerate(questions):
        ids, block = [*HEAD, *[0] * kept], [0] * prefix
        where = torch.arange(kept) if compact else keep[row]
        position = [*range(len(HEAD)), *(where + len(HEAD)).tolist()]
        for number, qa in enumerate(qas):
            new = TOKENIZER(f"{qa.question} ASSISTANT: {qa.answer}", add_special_tokens=False).input_ids
            new.append(TOKENIZER.eos_token_id)
            answers.append((row, len(ids) + len(new) - 3))
            about.append([g.index(w) for g, w in zip(GROUPS, qa.about, strict=False)] if qa.about else [-100] * 3)
            focus.append(torch.isin(keep[row], torch.tensor(qa.focus, dtype=torch.long)))
            ids += new
            block += [number + 1] * len(new)
            position += range(text_start, text_start + len(new))
        rows.append(ids)
        blocks.append(block)
        positions.append(position)
    length = max(map(len, rows))
    block = torch.tensor([b + [-1] * (length - len(b)) for b in blocks])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = (block[:, None, :] == 0) | (block[:, None, :] == block[:, :, None])
    return Packed(
        ids=torch.tensor([r + [0] * (length - len(r)) for r in rows]),
        positions=torch.tensor([p + [0] * (length - len(p)) for p in positions]),
        mask=(visible & causal)[:, None],
        answers=torch.tensor(answers),
        focus=torch.stack(focus),
        about=torch.tensor(about),
    )


def answer_states(
    model: LlavaForConditionalGeneration, packed: Packed, visual: Tensor, ideal: bool = False
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Final states at the tokens that predict answer and ``</s>``, ``[number, 2, width]``.

    ``visual [batch, kept, width]`` are tower features for the projector, or ``ideal`` visual tokens. Also returns,
    for each of FOCUS_LAYERS, the attention logits ``[number, heads, 1 + kept]`` that the answering token pays to the
    visual tokens among them, and that token's state ``[number, width]`` after READ_LAYER.
    """
    language = model.model.language_model
    hidden = language.embed_tokens(packed.ids)
    if visual.shape[1]:
        tokens = visual if ideal else model.model.multi_modal_projector(visual)
        start, end = len(HEAD), len(HEAD) + visual.shape[1]
        hidden = torch.cat([hidden[:, :start], tokens, hidden[:, end:]], 1)
    rotation = language.rotary_emb(hidden, position_ids=packed.positions)
    row, at = packed.answers.T
    attention = []
    for number, layer in enumerate(language.layers):
        if number in FOCUS_LAYERS and model.training:
            attention.append(visual_attention(layer, hidden, rotation, packed, visual.shape[1]))
        hidden = layer(hidden, attention_mask=packed.mask, position_embeddings=rotation)
        if number == READ_LAYER:
            read = hidden[row, at]
    return language.norm(torch.stack([hidden[row, at], hidden[row, at + 1]], 1)), attention, read


def visual_attention(
    layer: nn.Module, hidden: Tensor, rotation: tuple[Tensor, Tensor], packed: Packed, kept: int
) -> Tensor:
    """Attention logits ``[number, heads, 1 + kept]`` of the answering tokens over ``<s>`` and the visual tokens."""
    module, (cos, sin) = layer.self_attn, rotation
    row, at = packed.answers.T
    span = [0, *range(len(HEAD), len(HEAD) + kept)]
    normed = layer.input_layernorm(hidden)
    query = module.q_proj(normed[row, at]).unflatten(-1, (-1, module.head_dim))
    key = module.k_proj(normed[:, span]).unflatten(-1, (-1, module.head_dim))
    query = apply_rotary_pos_emb(query, query, cos[row, at], sin[row, at], unsqueeze_dim=1)[0]
    key = apply_rotary_pos_emb(key, key, cos[:, span], sin[:, span], unsqueeze_dim=2)[0]
    key = key.repeat_interleave(query.shape[1] // key.shape[2], 2)[row]  # [number, 1 + kept, heads, head_dim]
    return torch.einsum("nhd,nkhd->nhk", query, key) * module.scaling


def answer_loss(
    model: LlavaForConditionalGeneration, packed: Packed, visual: Tensor, ideal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss to train on, cross-entropy of the answer word, that of what the question is about)."""
    states, attention, read = answer_states(model, packed, visual, ideal)
    logits = model.lm_head(states)
    row, at = packed.answers.T
    answer = F.cross_entropy(logits[:, 0], packed.ids[row, at + 1])
    end = F.cross_entropy(logits[:, 1], packed.ids[row, at + 2])
    about = about_loss(model, packed, read)
    return answer + 0.1 * end + FOCUS_WEIGHT * focus_loss(packed, attention) + READ_WEIGHT * about, answer, about


def focus_loss(packed: Packed, attention: list[Tensor]) -> Tensor:
    """Two layers look from the answering token at the objects that the question names.

    In the first, any of their patches will do. In the second, ``<s>`` and each of the n objects get an equal share, so
    that the share of ``<s>`` says how many there are: 1, 1/2, 1/3... Without these terms the language model stayed for
    hundreds of steps at what needs no place, and at the prior of yes and no and of counts.
    """
    named = packed.focus.any(1)
    first = attention[0][named][:, :, 1:].log_softmax(-1)
    found = -first.masked_fill(~packed.focus[named][:, None], -torch.inf).logsumexp(-1).mean()
    share = torch.cat([torch.ones(len(packed.focus), 1), packed.focus / OBJECT**2], 1)
    share = share / share.sum(1, keepdim=True)
    log_share = share.clamp_min(1e-9).log()
    counted = (share[:, None] * (log_share[:, None] - attention[1].log_softmax(-1))).sum(-1).mean()
    return found + counted


def about_loss(model: LlavaForConditionalGeneration, packed: Packed, read: Tensor) -> Tensor:
    """Cross-entropy of colour, label and place of the object asked about, read off ``read`` by the word embeddings."""
    embedding = model.get_input_embeddings().weight[torch.tensor([vocabulary().index(w) for w in WORDS])]
    scores = F.rms_norm(read, read.shape[-1:]) @ embedding.T
    parts = group_slices()[:3]
    losses = [F.cross_entropy(scores[:, part], packed.about[:, i]) for i, part in enumerate(parts)]
    return torch.stack(losses).mean()


@torch.no_grad()
def predict(
    model: LlavaForConditionalGeneration, features: list[Tensor], questions: list[list[QA]], keep: list[Tensor]
) -> list[list[str]]:
    """The model's one-word answers.

    Entry ``i`` asks ``questions[i]`` of the image with tower features ``features[i] [576, width]``, of which the
    language model gets the patches ``keep[i]``, at their own positions.
    """
    out: list[list[str]] = []
    for states, qas, kept in zip(features, questions, keep, strict=True):
        packed = pack([qas], kept[None], compact=False)
        logits = model.lm_head(answer_states(model, packed, states[kept].float()[None])[0][:, 0])
        out.append(TOKENIZER.convert_ids_to_tokens(logits.argmax(-1).tolist()))
    return out


def exam_of(rng: np.random.Generator, collage: Collage) -> list[QA]:
    """One question of each kind that the collage allows."""
    drawn = [make_question(rng, collage, kind) for kind in KINDS]
    return [qa for qa in drawn if qa is not None]


def exam(pool: Pool, images: int, seed: int) -> list[list[QA]]:
    """The exam of each of the first ``images`` collages."""
    rng = np.random.default_rng(seed)
    return [exam_of(rng, collage) for collage in pool.collages[:images]]


def accuracy(questions: list[list[QA]], answers: list[list[str]]) -> dict[str, float]:
    """Share of right answers per kind, and over all questions as "all"."""
    hits: dict[str, list[bool]] = {kind: [] for kind in ("all", *KINDS)}
    for qas, said in zip(questions, answers, strict=True):
        for qa, answer in zip(qas, said, strict=True):
            hits[qa.kind].append(qa.answer == answer)
            hits["all"].append(qa.answer == answer)
    return {kind: float(np.mean(values)) for kind, values in hits.items() if values}


def log_means(log: Log, stage: str, step: int, losses: list[tuple[float, float]]) -> None:
    """Every 25 steps, log the means of the last 25 (answer, about) losses."""
    if step % 25 == 0:
        for name, value in zip(("loss", "about loss"), np.mean(losses[-25:], 0), strict=True):
            log.row(stage, step, name, float(value))


def rehearse(model: LlavaForConditionalGeneration, log: Log, checkpoint: Path, seed: int) -> None:
    """Teach the language model on ideal visual tokens: the exact sum of their words' embeddings and a little noise.

    There is no image and no tower in it, so it is cheap; the embeddings stay as the projector has learnt them.
    """
    steps, batch, kept, peak = REHEARSAL
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    words_embedding = embedding.detach()[torch.tensor([vocabulary().index(w) for w in WORDS])]
    parameters = [p for p in model.model.language_model.parameters() if p is not embedding]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.02, betas=(0.9, 0.98))
    threads, weights, losses = Threads(), np.ones(len(KINDS)) / len(KINDS), []
    model.train()
    for step in range(steps):
        threads.tick()
        layouts = [make_layout(rng) for _ in range(batch)]
        words = patch_words(layouts)
        keep = choose_patches(~words[:, :, WORDS.index(NOTHING)], kept, generator)
        packed = pack([make_questions(rng, x, QUESTIONS, weights) for x in layouts], keep, compact=step % 2 == 1)
        visual = words.gather(1, keep[:, :, None].expand(-1, -1, len(WORDS))).float() @ words_embedding
        visual = visual + 0.03 * torch.randn(visual.shape, generator=generator)
        loss, answer, about = answer_loss(model, packed, visual, ideal=True)
        descend(optimizer, loss, peak * min(1, (step + 1) / 50))
        losses.append((answer.item(), about.item()))
        log_means(log, "rehearse", step + 1, losses)
    torch.save(model.state_dict(), checkpoint)


def train_language(
    model: LlavaForConditionalGeneration,
    train: Pool,
    test: tuple[Pool, Tensor],
    log: Log,
    checkpoint: Path,
    seed: int,
) -> None:
    """Train projector and language model in place; ``test`` is a pool with its tower features.

    Resumes from ``checkpoint`` where there is one. The kinds that the last evaluation found hard are asked more often.
    """
    parameters = [*model.model.multi_modal_projector.parameters(), *model.model.language_model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK, weight_decay=0.02, betas=(0.9, 0.98))
    weights, done = np.ones(len(KINDS)) / len(KINDS), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        weights, done = state["weights"], state["step"]
    questions = exam(test[0], 40, seed)
    threads, total = Threads(), sum(steps for steps, _, _ in PHASES)
    losses: list[tuple[float, float]] = []
    model.train()
    for step in range(done, total):
        threads.tick()
        # A generator per step: a resumed run sees the data that an unbroken one sees.
        rng, generator = np.random.default_rng((seed, step)), torch.Generator().manual_seed(seed * 100_000 + step)
        batch, kept = phase_of(step)
        index = torch.randint(len(train), (batch,), generator=generator)
        keep = choose_patches(train.object_mask(index), kept, generator)
        asked = [make_questions(rng, train.collages[i], QUESTIONS, weights) for i in index.tolist()]
        packed = pack(asked, keep, compact=kept < PATCHES and step % 2 == 1)
        loss, answer, about = answer_loss(model, packed, kept_features(model, train.pixels(index), keep))
        descend(optimizer, loss, rate(step, total))
        losses.append((answer.item(), about.item()))
        log_means(log, "language", step + 1, losses)
        if step % EVERY == EVERY - 1 or step == total - 1:
            scores = evaluate_quickly(model, test, questions)
            for measure, value in scores.items():
                log.row("language", step + 1, measure, value)
            share = np.array([0.15 + 1 - scores[f"full {kind}"] for kind in KINDS])
            weights = share / share.sum()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "weights": weights, "step": step + 1}, checkpoint)


def rate(step: int, total: int) -> float:
    """Warm-up, constant over the first phase, then a cosine over the others."""
    flat = PHASES[0][0]
    return PEAK * min(1, (step + 1) / 50) if step < flat else learning_rate(step - flat, total - flat, PEAK, warmup=0)


def phase_of(step: int) -> tuple[int, int]:
    """(images per step, visual tokens per image) of a step."""
    for steps, batch, kept in PHASES:
        if step < steps:
            return batch, kept
        step -= steps
    raise ValueError("past the last phase")


def evaluate_quickly(
    model: LlavaForConditionalGeneration, test: tuple[Pool, Tensor], questions: list[list[QA]]
) -> dict[str, float]:
    """Held-out accuracy per kind with all visual tokens, and overall with the objects' patches only."""
    model.eval()
    pool, features = test
    states = list(features[: len(questions)])
    everything = [torch.arange(PATCHES)] * len(questions)
    objects = [torch.tensor(sorted(c.object_patches)) for c in pool.collages[: len(questions)]]
    full = accuracy(questions, predict(model, states, questions, everything))
    oracle = accuracy(questions, predict(model, states, questions, objects))
    model.train()
    return {**{f"full {kind}": value for kind, value in full.items()}, "oracle all": oracle["all"]}
