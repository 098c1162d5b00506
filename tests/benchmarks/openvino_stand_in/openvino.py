"""The names of OpenVINO that ``openvino_server.py`` uses."""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt


class Type(Enum):
    bf16 = auto()


@dataclass
class Tensor:
    data: npt.NDArray[np.int64]
