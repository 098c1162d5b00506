from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audio.audio_folders import make_audio_folder

AudioFolders = Callable[[str], Path]
"""Returns the folder of a model type, made once."""


@pytest.fixture(scope="session")
def audio_folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AudioFolders:
    base, made = tmp_path_factory.mktemp("audio"), dict[str, Path]()

    def folder_of(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = make_audio_folder(base / model_type, model_type, model_folder)
        return made[model_type]

    return folder_of
