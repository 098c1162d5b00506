"""A rank loads only its part of every tensor; and which models cannot be divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.stored_tensor import TensorEntry, TensorFiles
from engine.worker.loading.loader import load_model
from engine.worker.loading.model_folder import choose_device, read_config
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.parallel.linears import RowParallelLinear, VocabParallelEmbedding
from tests.worker.conftest import ModelFolders
from tests.worker.parallel.ranks import LoneRank
from tests.worker.test_other_attention import saved


def rank_of(folder: Path, rank: int, size: int) -> Decoder:
    """Loads a rank's part of a model."""
    model = load_model(ModelConfig(model=str(folder), device="cpu"), LoneRank(rank, size)).model
    assert isinstance(model, Decoder)
    return model


def test_the_parts_of_all_ranks_are_the_checkpoint(model_folders: ModelFolders) -> None:
    """The joined parts of the ranks equal the file; norms are whole on each rank."""
    folder = model_folders("llama-llama3-rope")
    whole = load_file(folder / "model.safetensors")
    ranks = [rank_of(folder, rank, 2).checkpoint_parts() for rank in range(2)]
    for name, tensor in whole.items():
        first, second = (parts[name] for parts in ranks)
        if first.count == 1:
            assert torch.equal(first.view, tensor)
            assert torch.equal(second.view, tensor)
        else:
            assert torch.equal(torch.cat((first.view, second.view), first.dim), tensor)
    cut = {name.split(".")[-2] for name, part in ranks[0].items() if part.count == 2}
    assert cut == {
        *("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"),
        *("o_proj", "gate_proj", "up_proj", "down_proj"),
    }


def test_ranks_share_a_key_value_head_where_there_are_fewer(model_folders: ModelFolders) -> None:
    """With four ranks and two key-value heads, each is on two neighbors with query heads of its group."""
    folder = model_folders("qwen2")
    name = "model.layers.1.self_attn.k_proj.weight"
    heads = load_file(folder / "model.safetensors")[name].chunk(2)
    for rank in range(4):
        assert torch.equal(rank_of(folder, rank, 4).checkpoint_parts()[name].view, heads[rank // 2])


def test_a_rank_reads_its_share_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four ranks reads a quarter of the file's bytes, except for norms."""
    folder = make_model_folder(
        tmp_path, "qwen3", hidden_size=128, num_heads=8, num_kv_heads=4, vocab_size=1024, tie=True
    )
    config = read_config(folder, trust_remote_code=False)
    model = Decoder(config, torch.float32, LoneRank(3, 4))
    model.materialize(torch.device("cpu"))
    read: list[int] = []

    def counting(files: TensorFiles, entry: TensorEntry, *region: slice) -> torch.Tensor:
        tensor = plainly(files, entry, *region)
        read.append(tensor.nbytes)
        return tensor

    plainly = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", counting)
    Checkpoint(folder).fill(model.checkpoint_parts())
    num_bytes = sum(read)
    assert num_bytes == pytest.approx((folder / "model.safetensors").stat().st_size / 4, rel=0.03)


def test_row_parallel_weights_are_packed_in_parts(tmp_path: Path) -> None:
    """Packed linears and tables, which are fastest on a CPU, are also used for parts of them."""
    folder = make_model_folder(tmp_path, "qwen3", hidden_size=64, dtype="bfloat16", tie=True)
    model = rank_of(folder, 1, 2)
    whole = load_model(ModelConfig(model=str(folder), device="cpu")).model
    assert isinstance(whole, Decoder)
    down, whole_down = (each.get_submodule("layers.0.mlp.down") for each in (model, whole))
    assert isinstance(down, RowParallelLinear)
    assert type(down.partial) is type(whole_down)
    assert isinstance(model.embedding, VocabParallelEmbedding)
    assert type(model.embedding.table) is type(whole.embedding)


@pytest.mark.parametrize(
    ("fields", "num_ranks", "sentence"),
    [
        ({}, 3, "does not divide the model's number of heads, 4."),
        ({"intermediate_size": 254}, 4, "does not divide the model's intermediate size, 254."),
        ({"vocab_size": 514}, 4, "does not divide the model's vocabulary size, 514."),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 252},
            2,
            "heads, 3, nor is",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, fields: dict[str, int], num_ranks: int, sentence: str
) -> None:
    """Indivisible models are refused in one sentence with the option, its value and the model's number."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    AutoConfig.for_model("llama", **(sizes | fields)).save_pretrained(tmp_path)
    options = ModelConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {num_ranks}, .*{sentence}"):
        load_model(options, LoneRank(0, num_ranks))


def test_a_model_of_transformers_needs_a_plan(tmp_path: Path) -> None:
    """One without a plan is not divided."""
    folder = tmp_path / "model"
    saved(make_model_folder(folder), "opt", word_embed_proj_dim=64)
    with pytest.raises(ConfigError, match="transformers has no plan to split this model"):
        load_model(ModelConfig(model=str(folder), device="cpu"), LoneRank(0, 2))


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer devices than ranks, the error names both numbers; otherwise each rank has its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"4 ranks .* need as many CUDA devices, but there are 2"):
        choose_device("auto", rank=3, num_ranks=4)
    assert choose_device("auto", rank=1, num_ranks=2) == torch.device("cuda", 1)


def test_what_ranks_do_not_go_with_is_refused() -> None:
    """Quantized weights, a disk tier, and no ranks are refused."""
    with pytest.raises(ConfigError, match="quantization and tensor_parallel_size > 1 cannot"):
        ModelConfig(model="m", tensor_parallel_size=2, quantization="int8")
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1, got 0"):
        ModelConfig(model="m", tensor_parallel_size=0)
    disk = CacheConfig(kv_offloading_size=1, kv_offloading_disk_size=1, kv_offloading_disk_path="/tmp")
    with pytest.raises(ConfigError, match="kv_offloading_disk_size and tensor_parallel_size > 1"):
        EngineConfig(model=ModelConfig(model="m", tensor_parallel_size=2), cache=disk)
