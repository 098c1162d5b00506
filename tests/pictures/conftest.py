from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

from tests.pictures.picture_folders import make_picture_folder


class PictureFolders(Protocol):
    """Returns the folder of a model type, made once."""

    def __call__(self, model_type: str, dtype: str = "float32") -> Path: ...


@pytest.fixture(scope="session")
def picture_folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PictureFolders:
    base, made = tmp_path_factory.mktemp("pictures"), dict[str, Path]()

    def folder_of(model_type: str, dtype: str = "float32") -> Path:
        name = f"{model_type}-{dtype}"
        if name not in made:
            made[name] = make_picture_folder(base / name, model_type, model_folder, dtype=dtype)
        return made[name]

    return folder_of
