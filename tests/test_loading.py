from __future__ import annotations

import json
from pathlib import Path

import folder as tiny
import pytest
import torch
from PIL import Image
from transformers import BertConfig

from tokenprune.errors import InputError, LoadError
from tokenprune.loading import Loaded, load, load_config, open_image, prepare, seen_image


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Loaded:
    return load(saved, device="cpu")


def test_load_gives_model_and_processor(loaded: Loaded, saved: Path) -> None:
    assert (loaded.model.config.model_type, loaded.name) == ("llava", str(saved))
    assert not loaded.model.training


def test_dtype_is_the_callers(saved: Path) -> None:
    half = load(saved, dtype="bfloat16", device="cpu")
    assert half.model.dtype == torch.bfloat16
    inputs = prepare(half, Image.new("RGB", (60, 60)), "what ?")
    assert (inputs["pixel_values"].dtype, inputs["input_ids"].dtype) == (torch.bfloat16, torch.int64)


def test_prepare_follows_the_chat_template(loaded: Loaded) -> None:
    inputs = prepare(loaded, Image.new("RGB", (60, 90)), "what is this ?")
    words = loaded.processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    assert words == ["USER", ":", *["<image>"] * 16, "what", "is", "this", "?", "ASSISTANT", ":"]
    assert inputs["pixel_values"].shape == (1, 3, 56, 56)


def test_prepare_without_an_image(loaded: Loaded) -> None:
    inputs = prepare(loaded, None, "what ?")
    assert "pixel_values" not in inputs
    assert 4 not in inputs["input_ids"]


def test_prepare_without_a_chat_template(loaded: Loaded) -> None:
    plain = Loaded(loaded.model, tiny.processor(template=None), "plain")
    inputs = prepare(plain, Image.new("RGB", (60, 60)), "what ?")
    assert inputs["input_ids"][0].tolist() == [4] * 16 + [5, 8]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (" \n", "the prompt is empty; ask something about the image"),
        ("see <image>", "the prompt holds the placeholder '<image>'; leave it out, it is put in for the image"),
    ],
)
def test_prompts_that_cannot_work(loaded: Loaded, prompt: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(loaded, Image.new("RGB", (60, 60)), prompt)
    assert str(caught.value) == message


def test_seen_image_is_the_crop(loaded: Loaded) -> None:
    wide = Image.new("RGB", (112, 56), (10, 20, 30))
    wide.paste((200, 100, 50), (28, 0, 84, 56))
    seen = seen_image(loaded, prepare(loaded, wide, "what ?"), wide)
    assert seen.size == (56, 56)
    assert max(abs(a - b) for a, b in zip(seen.getpixel((28, 28)), (200, 100, 50), strict=True)) <= 1


def test_default_configuration_has_the_shape_of_llava_7b() -> None:
    found = load_config(None)
    text, vision = found.config.text_config, found.config.vision_config
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size) == (32, 4096, 11008)
    assert (vision.image_size // vision.patch_size) ** 2 == 576
    assert found.name == "LLaVA-1.5-7B's shape (default LlavaConfig)"


def test_configurations_by_type_and_folder(saved: Path) -> None:
    assert load_config("qwen2_vl").config.model_type == "qwen2_vl"
    assert load_config(saved).config.text_config.num_hidden_layers == 6


def message_of(source: str | Path) -> str:
    with pytest.raises(LoadError) as caught:
        load(source)
    return str(caught.value)


def test_what_cannot_be_loaded_is_told_in_one_sentence(tmp_path: Path) -> None:
    assert message_of("./nowhere") == "there is no model folder './nowhere'"
    assert message_of("a/b/c") == "there is no model folder 'a/b/c'"
    assert message_of("llava") == "'llava' is a model type and has no weights; name a model folder or a Hub id"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert message_of(empty) == f"{str(empty)!r} is a folder without config.json; it holds no model of transformers"
    file = tmp_path / "file"
    file.touch()
    assert message_of(file) == f"{str(file)!r} is a file; name the folder that holds config.json and the weights"
    BertConfig().save_pretrained(empty)
    assert message_of(empty) == f"{empty} is a 'bert' model, which is not a vision-language model of transformers"


def test_a_device_that_is_not_there(saved: Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(saved, device="nowhere")
    assert str(caught.value).startswith("the model cannot be put on device 'nowhere': ")


def test_a_model_without_its_processor(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    said = message_of(tmp_path)
    assert said.startswith(f"the processor in {str(tmp_path)!r} cannot be loaded: ") and "\n" not in said


def test_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert message_of(tmp_path).startswith(f"the configuration in {str(tmp_path)!r} cannot be loaded: ")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    assert "\n" not in message_of(tmp_path)


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    said = message_of("nobody/nothing")
    assert said.startswith("the configuration of 'nobody/nothing' could not be downloaded or read (")
    assert said.endswith("); give a local folder instead")


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("not an image")
    cut = tmp_path / "cut.png"
    Image.new("RGB", (64, 64), "red").save(cut)
    cut.write_bytes(cut.read_bytes()[:90])
    for path, message in (
        (tmp_path / "no.png", f"there is no image file {str(tmp_path / 'no.png')!r}"),
        (tmp_path, f"{str(tmp_path)!r} is a directory, not an image file"),
        (text, f"{str(text)!r} is not an image that Pillow can read"),
        (cut, None),
    ):
        with pytest.raises(LoadError) as caught:
            open_image(path)
        if message is None:
            assert str(caught.value).startswith(f"{str(cut)!r} cannot be read as an image: ")
        else:
            assert str(caught.value) == message


def test_images_are_upright_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("L", (8, 4)).save(tmp_path / "a.jpg", exif=exif)
    image = open_image(tmp_path / "a.jpg")
    assert (image.mode, image.size) == ("RGB", (4, 8))
