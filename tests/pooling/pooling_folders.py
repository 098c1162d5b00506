"""Small folders of pooling models, as sentence-transformers and transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from engine.worker.loading.tiny_models import make_model_folder

TEXTS = (
    "The scheduler hands one token budget to running requests.",
    "A tool call ends a turn.",
    "Evict the block that was used least recently, unless it is pinned!",
    "a",
    "Retrieval on the same server: embeddings, scores and classes. " * 9,
)
ENCODERS = ("bert", "roberta", "distilbert", "modernbert")


def save_embedder(
    folder: Path,
    source: Path,
    mode: Any = "mean",
    *,
    dense: int | None = None,
    normalizes: bool = True,
    in_chat: bool = False,
    **options: Any,
) -> Path:
    """Saves a folder of sentence-transformers around a folder of transformers."""
    torch.manual_seed(0)
    transformer = Transformer(str(source))
    if not in_chat:  # like all folders published before its release 6
        transformer.modality_config.pop("message", None)
    size = transformer.get_embedding_dimension()
    pooling = Pooling(size, mode)
    modules: list[torch.nn.Module] = [transformer, pooling]
    if dense is not None:
        modules.append(Dense(pooling.pooling_output_dimension, dense, activation_function=torch.nn.Tanh()))
    if normalizes:
        modules.append(Normalize())
    SentenceTransformer(modules=modules, device="cpu", **options).save(str(folder))
    return folder


def make_encoder(
    folder: Path, family: str = "bert", *, num_labels: int | None = None, seed: int = 0, **more: Any
) -> Path:
    """Makes a folder of a small encoder, with a classifier if there are labels."""
    folder.mkdir(parents=True)
    tokenizer = _word_pieces(family)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 130 if family == "roberta" else 128,
        "pad_token_id": 1 if family == "roberta" else 0,
    }
    if family == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            del sizes[name]
    if family in ("bert", "modernbert"):
        sizes |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    if num_labels is not None:
        more["num_labels"] = num_labels
    config = AutoConfig.for_model(family, **sizes, **more)
    torch.manual_seed(seed)
    kind: Any = AutoModel if num_labels is None else AutoModelForSequenceClassification
    model = kind.from_config(config)
    with torch.no_grad():  # with the initial weights, all prompts are much alike
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _word_pieces(family: str) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if family == "roberta":  # its padding token has id 1
        special[:2] = special[1::-1]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    ids = {name: made.token_to_id(name) for name in special}
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    kind: Any = PreTrainedTokenizerFast  # it has no type hints
    wrapped: PreTrainedTokenizerFast = kind(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]
        if family == "bert"
        else ["input_ids", "attention_mask"],
    )
    return wrapped


def make_decoder(folder: Path, family: str = "qwen3", *, num_labels: int | None = None, **more: Any) -> Path:
    """Makes a folder of a small decoder without a head, like Qwen3-Embedding's, or with a classifier."""
    source = make_model_folder(folder.with_name(f"{folder.name}-source"), family, **more)
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    config = AutoConfig.from_pretrained(source)
    config.pad_token_id = tokenizer.pad_token_id
    if num_labels is None:
        model: Any = AutoModel.from_pretrained(source, config=config)
    else:
        config.num_labels = num_labels
        model = AutoModelForSequenceClassification.from_pretrained(source, config=config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def set_field(folder: Path, file: str, **fields: Any) -> Path:
    """Changes fields of a JSON file of a folder."""
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))
    return folder
