"""Measures embeddings per second here and with sentence-transformers, in turns on the same folders.

    python -m benchmarks.cpu.embeddings [--models out/models] [--texts 64] [--rounds 3]

The models are a decoder in bf16 that pools its last token, and an encoder of BERT's base size in fp32 that
pools the mean; the texts have 4 to 48 words. Prints both rates and their ratio in each round, and how far
apart the embeddings are. Needs sentence-transformers, from the development extra.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, PreTrainedTokenizerFast, set_seed

from benchmarks.cpu.models import MODELS
from engine.frontend.llm import LLM
from eval.say import say

Array = npt.NDArray[np.float32]
WORDS = tuple(f"w{number}" for number in range(2000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder of the models")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(4, 48))) for _ in range(arguments.texts)]
    for name, made in (("decoder", _decoder), ("encoder", _encoder)):
        folder = arguments.models / f"embedder-{name}"
        if not folder.exists():
            made(folder, arguments.models)
        _compare(name, folder, texts, arguments.rounds)


def _compare(name: str, folder: Path, texts: list[str], rounds: int) -> None:
    other = SentenceTransformer(str(folder), device="cpu")
    with LLM(folder, multiprocess=False, enable_prefix_caching=False, max_model_len=512) as llm:

        def here() -> Array:
            found = llm.embed(texts, use_tqdm=False)
            return np.array([one.outputs.embedding for one in found], np.float32)

        def there() -> Array:
            found: Array = other.encode(texts, batch_size=32, convert_to_numpy=True)
            return found

        mine = here()
        theirs = there()
        ratios = []
        for _ in range(rounds):
            own = _rate(here, len(texts))
            others = _rate(there, len(texts))
            ratios.append(own / others)
            say(f"{name}: {own:.1f} here, {others:.1f} sentence-transformers embeddings/s: {ratios[-1]:.2f}x")
    say(f"{name}: median {median(ratios):.2f}x; least cosine {float((mine * theirs).sum(axis=-1).min()):.5f}")


def _rate(embed: Callable[[], Array], number: int) -> float:
    start = time.perf_counter()
    embed()
    return number / (time.perf_counter() - start)


def _decoder(folder: Path, models_folder: Path) -> None:
    source = MODELS["small"].folder(models_folder)
    plain = folder.with_name(f"{folder.name}-plain")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    AutoModel.from_pretrained(source, config=AutoConfig.from_pretrained(source)).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    _save(folder, plain, "lasttoken")


def _encoder(folder: Path, _: Path) -> None:
    plain = folder.with_name(f"{folder.name}-plain")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    ids = {word: number for number, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    plain.mkdir(parents=True)
    tokenizer.save(str(plain / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    kind = {"tokenizer_class": PreTrainedTokenizerFast.__name__, "model_max_length": 512, **names}
    (plain / "tokenizer_config.json").write_text(json.dumps(kind))
    set_seed(0)
    kind_of_model: Any = AutoModel  # AutoModel has no types
    kind_of_model.from_config(BertConfig(vocab_size=len(ids))).save_pretrained(plain)
    _save(folder, plain, "mean")


def _save(folder: Path, plain: Path, mode: str) -> None:
    transformer = Transformer(str(plain))
    pooling = Pooling(transformer.get_embedding_dimension(), mode)
    SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu").save(str(folder))


if __name__ == "__main__":
    main()
