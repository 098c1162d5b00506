"""Pictures in the steps of a GPU: uploaded positions, no graphs with pictures, fused steps without."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.records.row_failures import MEDIA_LOST
from tests.pictures.picture_engine import greedy, picture_engine, tokens_of
from tests.pictures.picture_folders import make_picture_folder, picture
from tests.pictures.reference import PictureReference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_tiles")]
A, B, C = picture(3, 4, 1), picture(2, 5, 2), picture(6, 3, 3)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_tokens_are_those_of_transformers(model_type: str, model_folder: Path, tmp_path: Path) -> None:
    """Two turns of two jobs run side by side; a third request's lost pixels affect no other request."""
    folder = make_picture_folder(tmp_path / "model", model_type, model_folder)
    reference = PictureReference(folder)
    prompts = {"x": (7, A, 13, B, 20), "y": (3, C, 2, B, 4)}
    with picture_engine(folder, tmp_path, device="cpu", attention_backend="triton") as engine:
        for tail in (1, 5):
            asked = {name: engine.prompt(*parts, tail, seed=ord(name)) for name, parts in prompts.items()}
            lost = engine.prompt(9, picture(4, 4, tail), 3)
            Path(lost[1][0].path).unlink()
            engine.add("lost", lost)
            for name, prompt in asked.items():
                engine.add(name, prompt, greedy(4))
            outputs = engine.run()
            assert outputs["lost"].outputs[0].stop_reason == MEDIA_LOST
            for name, parts in prompts.items():
                shown = [part for part in parts if not isinstance(part, int)]
                assert tokens_of(outputs[name]) == reference.greedy(*asked[name], shown, 4)


def test_drafts_behind_pictures_are_verified(model_folder: Path, tmp_path: Path) -> None:
    """A token follows the picture: transformers' ``generate`` counts text right after it as picture."""
    folder = make_picture_folder(tmp_path / "model", "qwen3_vl", model_folder)
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    options = {"device": "cpu", "attention_backend": "triton", "speculative_config": speculative}
    with picture_engine(folder, tmp_path, **options) as engine:
        prompt = engine.prompt(9, A, 1, seed=2)
        answer = tokens_of(engine.ask(prompt, greedy(8)))
    assert answer == PictureReference(folder).greedy(*prompt, [A], 8)
