"""Clips in the steps of a GPU, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audio.audio_engine import audio_engine, clips_in
from tests.audio.audio_folders import make_audio_folder, sound
from tests.audio.reference import AudioReference
from tests.pictures.picture_engine import tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_tiles")]
A, B = sound(1.3, 1), sound(0.513, 2)


@pytest.mark.parametrize("model_type", ["qwen2_5_omni_thinker", "gemma4"])
def test_tokens_are_those_of_transformers(model_type: str, model_folder: Path, tmp_path: Path) -> None:
    """Two turns of two jobs run side by side; the second turn hits the clips' blocks."""
    folder = make_audio_folder(tmp_path / "model", model_type, model_folder)
    reference = AudioReference(folder)
    prompts = {"x": (7, A, 13, B, 20), "y": (3, B, 4)}
    with audio_engine(folder, tmp_path, device="cpu", attention_backend="triton") as engine:
        for tail in (1, 5):
            asked = {name: engine.prompt(*parts, tail, seed=ord(name)) for name, parts in prompts.items()}
            for name, prompt in asked.items():
                engine.add(name, prompt, 4)
            outputs = engine.run()
            for name, parts in prompts.items():
                wanted = reference.greedy(asked[name][0], clips_in(parts), 4)
                assert tokens_of(outputs[name]) == wanted
        assert outputs["x"].num_cached_tokens
