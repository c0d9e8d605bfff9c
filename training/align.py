"""Stage 1: the tower and the projector learn to say, patch by patch, what is there - in the language model's words.

The classifier is the language model's own embedding matrix, so a visual token arrives in the language model as about
the sum of the embeddings of its words (red + circle + topleft + shape), and background as that of "nothing".
"""

from __future__ import annotations

from pathlib import Path

import torch
from collage import GRID
from model import WORDS, vocabulary
from pool import Log, Pool, Threads, descend, group_slices, learning_rate
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration

# (steps, images per step, patches per image, peak learning rate): first the object patches and a few others, a tenth
# of the cost, then the whole grid, as the tower will see it.
PHASES = ((1600, 24, 64, 1.5e-3), (150, 8, GRID * GRID, 4e-4))
SETTLE = (600, 24, 56, 1e-3)
SCALE = 8.0


def tower_states(model: LlavaForConditionalGeneration, pixels: Tensor, keep: Tensor | None = None) -> list[Tensor]:
    """Hidden states after each tower layer, each ``[batch, 1 + kept, width]``; ``keep [batch, kept]`` are patches."""
    tower = model.model.vision_tower
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))
    if keep is not None:
        index = torch.cat([torch.zeros_like(keep[:, :1]), keep + 1], 1)
        hidden = hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[-1]))
    states = []
    for layer in tower.encoder.layers:
        hidden = layer(hidden, attention_mask=None)
        states.append(hidden)
    return states


def choose_patches(objects: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """``number`` patches per image, in order: all object patches and random others; ``objects [batch, 576]``."""
    score = torch.rand(objects.shape, generator=generator) + objects
    return score.topk(number, dim=1).indices.sort(dim=1).values


def word_scores(model: LlavaForConditionalGeneration, features: Tensor) -> Tensor:
    """Logits of WORDS for tower features ``[..., width]``; a token that is the exact sum of its words scores +-4."""
    ids = torch.tensor([vocabulary().index(w) for w in WORDS])
    embedding = model.get_input_embeddings().weight[ids]
    return SCALE * (model.model.multi_modal_projector(features) @ embedding.T) - SCALE / 2


def dense_loss(scores: Tensor, words: Tensor, objects: Tensor) -> Tensor:
    """Every word right at every patch, object patches and others weighing the same; and the right word per group."""
    each = F.binary_cross_entropy_with_logits(scores, words.float(), reduction="none").sum(-1)
    loss = each[objects].mean() + each[~objects].mean()
    on, target = scores[objects], words[objects]
    for part in group_slices():
        loss = loss + F.cross_entropy(on[:, part], target[:, part].float().argmax(-1))
    return loss


def presence_heads(model: LlavaForConditionalGeneration) -> nn.ModuleList:
    """Two linear heads that are thrown away after training: see ``presence_loss``."""
    return nn.ModuleList([nn.Linear(model.config.vision_config.hidden_size, len(WORDS)) for _ in range(2)])


def presence_loss(
    heads: nn.ModuleList, model: LlavaForConditionalGeneration, states: list[Tensor], words: Tensor
) -> Tensor:
    """CLS says which words the image holds, after the layer that the projector reads and after the last one.

    That is what makes the attention of CLS look at the objects, as that of a CLIP tower does.
    """
    present = words.any(1).float()
    read = (states[-2], model.model.vision_tower.post_layernorm(states[-1]))
    losses = [
        F.binary_cross_entropy_with_logits(head(state[:, 0]), present) for head, state in zip(heads, read, strict=True)
    ]
    return sum(losses[1:], losses[0])


@torch.no_grad()
def measure(model: LlavaForConditionalGeneration, pool: Pool, images: int) -> dict[str, float]:
    """Accuracy per group on object patches, and of telling objects from background, over the full grid."""
    hits: dict[str, list[Tensor]] = {name: [] for name in ("color", "label", "place", "type", "background")}
    for index in torch.arange(images).split(32):
        scores = word_scores(model, tower_states(model, pool.pixels(index))[-2][:, 1:])
        words, objects = pool.words[index], pool.object_mask(index)
        for name, part in zip(hits, group_slices(), strict=False):
            right = scores[objects][:, part].argmax(-1) == words[objects][:, part].float().argmax(-1)
            hits[name].append(right)
        hits["background"].append(((scores[..., -1] > 0) == ~objects).flatten())
    return {name: torch.cat(values).float().mean().item() for name, values in hits.items()}


def train_alignment(
    model: LlavaForConditionalGeneration, train: Pool, test: Pool, log: Log, checkpoint: Path, seed: int
) -> None:
    """Train tower, projector and word embeddings in place."""
    generator = torch.Generator().manual_seed(seed)
    heads = presence_heads(model)
    tower = model.model.vision_tower
    parameters = [*tower.parameters(), *model.model.multi_modal_projector.parameters(), *heads.parameters()]
    parameters.append(model.get_input_embeddings().weight)
    threads = Threads()
    for phase, (steps, batch, patches, peak) in enumerate(PHASES):
        optimizer = torch.optim.AdamW(parameters, weight_decay=0.02, betas=(0.9, 0.98))
        for step in range(steps):
            threads.tick()
            index = torch.randint(len(train), (batch,), generator=generator)
            keep = choose_patches(train.object_mask(index), patches, generator)
            states = tower_states(model, train.pixels(index), keep)
            words = train.words[index].gather(1, keep[:, :, None].expand(-1, -1, len(WORDS)))
            objects = train.object_mask(index).gather(1, keep)
            loss = dense_loss(word_scores(model, states[-2][:, 1:]), words, objects)
            loss = loss + presence_loss(heads, model, states, train.words[index])
            descend(optimizer, loss, learning_rate(step, steps, peak))
            if step % 50 == 0 or step == steps - 1:
                log.row(f"align{phase}", step, "loss", loss.item())
            if step % 250 == 249 or step == steps - 1:
                for name, value in measure(model, test, 128).items():
                    log.row(f"align{phase}", step, f"test {name}", value)
        torch.save(model.state_dict(), checkpoint)


def settle(
    model: LlavaForConditionalGeneration, train: Pool, test: Pool, log: Log, checkpoint: Path, seed: int
) -> None:
    """Go on with tower and projector until a visual token *is* the sum of its words' embeddings, in length too.

    The loss above leaves free every direction that scores no word: tokens were nine times as long as that sum, at a
    cosine of 0.25 to it, and the language model did not find the words in them.
    """
    generator = torch.Generator().manual_seed(seed)
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    with torch.no_grad():  # A ninth of the length is where to start from.
        projector.linear_2.weight.div_(9)
        projector.linear_2.bias.div_(9)
    heads = presence_heads(model)
    parameters = [*tower.parameters(), *projector.parameters(), *heads.parameters()]
    ids = torch.tensor([vocabulary().index(w) for w in WORDS])
    embedding = model.get_input_embeddings().weight[ids].detach()
    threads = Threads()
    steps, batch, patches, peak = SETTLE
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.02, betas=(0.9, 0.98))
    for step in range(steps):
        threads.tick()
        index = torch.randint(len(train), (batch,), generator=generator)
        keep = choose_patches(train.object_mask(index), patches, generator)
        words = train.words[index].gather(1, keep[:, :, None].expand(-1, -1, len(WORDS)))
        objects = train.object_mask(index).gather(1, keep)
        states = tower_states(model, train.pixels(index), keep)
        features = states[-2][:, 1:]
        each = (projector(features) - words.float() @ embedding).square().sum(-1)
        loss = 2 * each[objects].mean() + each[~objects].mean()
        value = loss.item()
        loss = loss + 0.5 * dense_loss(word_scores(model, features), words, objects)
        loss = loss + presence_loss(heads, model, states, train.words[index])
        descend(optimizer, loss, learning_rate(step, steps, peak))
        if step % 50 == 0 or step == steps - 1:
            log.row("settle", step, "loss", value)
    for name, share in measure(model, test, 128).items():
        log.row("settle", steps, f"test {name}", share)
    torch.save(model.state_dict(), checkpoint)
