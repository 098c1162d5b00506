"""The engine's configuration: one frozen record per component, each of which rejects bad values.

Names and defaults are vLLM's where vLLM has the option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from engine.config.checks import at_least, one_of
from engine.config.kv_events import KVEventsConfig
from engine.config.kv_transfer import KVTransferConfig
from engine.config.lora import LoRAConfig
from engine.config.parallel import ParallelConfig
from engine.config.pooling import PoolingConfig
from engine.config.speculative import SpeculativeConfig
from engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "torch", "triton")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
EXECUTOR_BACKENDS = ("mp", "ray")
QUANTIZATIONS = ("int8", "int4")


def _check_gib(name: str, size: float | None) -> None:
    if size is not None and not 0 < size < math.inf:
        raise ConfigError(f"{name} must be a positive number of GiB, got {size}.")


def _blocks_of(name: str, size_gib: float | None, bytes_per_block: int) -> int:
    """Whole blocks in a size; 0 if there is no size. ConfigError if it is smaller than one block."""
    if size_gib is None:
        return 0
    num_blocks = int(size_gib * 2**30) // bytes_per_block
    if not num_blocks:
        raise ConfigError(f"{name} of {size_gib} GiB is less than one KV block of {bytes_per_block} bytes.")
    return num_blocks


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # half a bracket, a port that is no number
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to serve, and how it is loaded and run."""

    model: str
    """A Hugging Face model folder, or a hub name."""
    tokenizer: str | None = None
    """Tokenizer folder or name; the model's own by default."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and answers are token ids."""
    dtype: str = "auto"
    """Data type of weights and activations; ``auto`` takes the checkpoint's, float32 included."""
    device: str = "auto"
    """Device that runs the model; ``auto`` takes cuda where it is available."""
    max_model_len: int | None = None
    """Maximum context length, prompt plus output, in tokens; the model's own limit by default."""
    seed: int = 0
    trust_remote_code: bool = False
    generation_config: str = "auto"
    """Default sampling parameters: ``auto`` reads the folder's generation_config.json, ``vllm`` does not."""
    load_format: str = "auto"
    """Source of the weights: ``auto`` | ``safetensors`` | ``dummy`` (random weights, seeded)."""
    model_impl: str = "auto"
    """Model code to run: ``auto`` | ``native`` (our decoder) | ``transformers``."""
    attention_backend: str = "auto"
    """Attention implementation: ``auto`` (triton on cuda if installed; on a CPU a kernel compiled at the
    first start, if there is a compiler) | ``torch`` | ``triton`` (on a CPU only in Triton's interpreter)."""

    enforce_eager: bool = False
    """Disable CUDA graphs: less memory and a faster start, slower steps."""
    disable_cascade_attn: bool = True
    """Let decodes that share a prefix read it one by one, not in one pass (attention_backend triton only)."""
    quantization: str | None = None
    """Weight-only quantization at load time: ``int8`` | ``int4`` (the head keeps 8 bits); CPUs only."""
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks: each is a process with its part of every weight, and a GPU or a
    share of the CPU's cores."""
    pipeline_parallel_size: int = 1
    """Number of stages, each with some of the layers and ``tensor_parallel_size`` ranks."""
    distributed_executor_backend: str = "mp"
    """Who starts the ranks: ``mp`` (processes of this machine) | ``ray`` (actors of a Ray cluster)."""
    enable_expert_parallel: bool = False
    """Divide a mixture of experts by whole experts instead of dividing each expert: among all ranks of all
    engine cores."""
    enable_return_routed_experts: bool = False
    """Return the experts of each token with the last output of a request."""
    max_pictures: int = 64
    """The most pictures of a prompt, for a model that reads them; 0: the model reads none."""
    max_clips: int = 16
    """The most audio clips of a prompt, for a model that reads them; 0: the model reads none."""
    min_pixels: int | None = None
    """Smaller pictures are enlarged to this number of pixels; by default what the model's folder says."""
    max_pixels: int | None = None
    """Larger pictures are reduced to this number of pixels; by default what the model's folder says."""

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("device", self.device, DEVICES)
        one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.quantization is not None:
            one_of("quantization", self.quantization, QUANTIZATIONS)
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 1)
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        at_least("max_pictures", self.max_pictures, 0)
        at_least("max_clips", self.max_clips, 0)
        one_of("distributed_executor_backend", self.distributed_executor_backend, EXECUTOR_BACKENDS)
        if self.tensor_parallel_size > 1 and self.quantization is not None:
            raise ConfigError("quantization and tensor_parallel_size > 1 cannot be combined.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Size of a KV block in tokens."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache: ``auto`` (the model's) | ``fp8_e4m3`` (attention_backend triton only)."""
    kv_cache_scale: float = 1.0
    """Divisor of K and V when they are stored in 8 bits."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, the null block included; overrides the two memory options."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache in bytes."""
    num_state_slots: int | None = None
    """Number of slots for states of linear attention and Mamba layers, slot 0 included; None: a share of the
    memory."""
    gpu_memory_utilization: float = 0.92
    """Fraction of the device's memory for weights, activations and KV cache (on a CPU: see ``worker``)."""
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    """Layers with a sliding window keep the KV of all tokens, in the block table of the other layers."""
    kv_offloading_size: float | None = None
    """Host memory for offloaded KV blocks, in GiB; no offloading by default."""
    num_host_blocks_override: int | None = None
    """Number of KV blocks that host memory holds; overrides the size."""
    kv_offloading_disk_size: float | None = None
    """Disk space for KV blocks evicted from host memory, in GiB; no disk tier by default."""
    kv_offloading_disk_path: str | None = None
    """Folder of the disk tier."""
    kv_offloading_disk_min_tokens: int | None = None
    """Shorter prefixes are recomputed instead of read from disk; measured at startup by default."""
    num_disk_blocks_override: int | None = None
    """Number of KV blocks that the disk tier holds; overrides the size."""
    kv_handover_path: str | None = None
    """Folder in which a core that is drained or stops leaves what its pins hold, for the cores and servers
    that get the jobs' next turns. Short for a SharedStorageConnector that saves pins only."""
    kv_cache_metrics: bool = False
    """Report how long a sample of KV blocks lives, and when it is used."""
    kv_cache_metrics_sample: float = 0.01
    """Fraction of KV blocks in that sample."""

    @property
    def has_disk_tier(self) -> bool:
        return self.num_disk_blocks_override is not None or self.kv_offloading_disk_size is not None

    def num_disk_blocks(self, bytes_per_block: int) -> int:
        """KV blocks that the disk tier holds; 0 without one. ConfigError if it is smaller than one block."""
        if self.num_disk_blocks_override is not None:
            return self.num_disk_blocks_override
        return _blocks_of("kv_offloading_disk_size", self.kv_offloading_disk_size, bytes_per_block)

    @property
    def has_host_tier(self) -> bool:
        return self.num_host_blocks_override is not None or self.kv_offloading_size is not None

    def num_host_blocks(self, bytes_per_block: int) -> int:
        """KV blocks that the host tier holds; 0 without one. ConfigError if it is smaller than one block."""
        if self.num_host_blocks_override is not None:
            return self.num_host_blocks_override
        return _blocks_of("kv_offloading_size", self.kv_offloading_size, bytes_per_block)

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        self._check_storage()
        if self.num_gpu_blocks_override is not None:
            at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        if self.num_state_slots is not None:
            at_least("num_state_slots", self.num_state_slots, 5)
        if self.kv_cache_memory_bytes is not None:
            at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}.")
        if not 0 < self.kv_cache_metrics_sample <= 1:
            raise ConfigError(
                f"kv_cache_metrics_sample must be in (0, 1], got {self.kv_cache_metrics_sample}."
            )
        self._check_host_tier()
        self._check_disk_tier()

    def _check_storage(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}."
            )
        if not 0 < self.kv_cache_scale < math.inf:
            raise ConfigError(f"kv_cache_scale must be a positive number, got {self.kv_cache_scale}.")
        if self.kv_cache_scale != 1 and self.kv_cache_dtype == "auto":
            raise ConfigError(
                "kv_cache_scale needs kv_cache_dtype fp8_e4m3; the model's own type is stored unscaled."
            )

    def _check_host_tier(self) -> None:
        if self.num_host_blocks_override is not None:
            at_least("num_host_blocks_override", self.num_host_blocks_override, 1)
        _check_gib("kv_offloading_size", self.kv_offloading_size)
        if self.has_host_tier and not self.enable_prefix_caching:
            name = (
                "kv_offloading_size" if self.num_host_blocks_override is None else "num_host_blocks_override"
            )
            raise ConfigError(f"{name} needs prefix caching: offloaded blocks are found by hash.")

    def _check_disk_tier(self) -> None:
        if self.num_disk_blocks_override is not None:
            at_least("num_disk_blocks_override", self.num_disk_blocks_override, 1)
        _check_gib("kv_offloading_disk_size", self.kv_offloading_disk_size)
        if self.has_disk_tier != (self.kv_offloading_disk_path is not None):
            raise ConfigError("kv_offloading_disk_size and kv_offloading_disk_path need each other.")
        if self.has_disk_tier and not self.has_host_tier:
            raise ConfigError(
                "kv_offloading_disk_size needs kv_offloading_size: the disk takes what host memory evicts."
            )
        if self.kv_offloading_disk_min_tokens is not None:
            at_least("kv_offloading_disk_min_tokens", self.kv_offloading_disk_min_tokens, 1)
            if not self.has_disk_tier:
                raise ConfigError("kv_offloading_disk_min_tokens needs kv_offloading_disk_size.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. The policy is passed to the scheduler as an object."""

    max_num_seqs: int = 128
    """Maximum number of running requests."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step, prefill and decode together."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Maximum prefill tokens of one request per step; 0: unlimited."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if its whole current sequence fits into free KV blocks."""
    async_scheduling: bool | None = None
    """Schedule the next step while the current one runs; None: on an accelerator only."""
    max_num_encoder_input_tokens: int | None = None
    """Most tokens of media that are encoded in a step, those of one at least; None: the token budget."""
    encoder_cache_size: int | None = None
    """Tokens of media whose encoder outputs are kept, those of one at least; None: the token budget."""
    disable_chunked_mm_input: bool = False
    """Cut a step before a picture or clip that does not fit whole, unless the step begins with it."""
    max_loras: int | None = None
    """Most adapters of running requests; None: requests have none."""
    stream_interval: int = 1
    """Tokens per output of a request that is streamed; the first output is sent at once."""

    def plans_ahead(self, on_accelerator: bool) -> bool:
        """Whether to schedule the next step while the current one runs; on a CPU both would share cores."""
        return on_accelerator if self.async_scheduling is None else self.async_scheduling

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name in ("max_num_encoder_input_tokens", "encoder_cache_size"):
            if (size := getattr(self, name)) is not None:
                at_least(name, size, 1)
        at_least("stream_interval", self.stream_interval, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Spans of jobs, turns and tool gaps for an OpenTelemetry collector."""

    otlp_traces_endpoint: str | None = None
    """URL of a collector of OTLP over HTTP; None: no spans."""
    model_name: str = ""
    """Name of the model as its clients know it."""

    def __post_init__(self) -> None:
        if self.otlp_traces_endpoint is not None and not _is_http_url(self.otlp_traces_endpoint):
            raise ConfigError(
                "otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, got "
                f"{self.otlp_traces_endpoint!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Where the scheduler trace is written, and how its files rotate."""

    trace_path: str | None = None
    """File of a trace from startup; compressed if the name ends in ``.zst``."""
    trace_dir: str | None = None
    """Folder for traces that clients start while the engine runs."""
    trace_max_bytes: int | None = None
    """Size in bytes at which the trace file rotates; None: one file."""
    trace_max_files: int | None = None
    """Number of trace files kept, the last ones; None: all."""

    def __post_init__(self) -> None:
        if self.trace_path is not None and self.trace_path.endswith((".gz", ".bz2", ".xz", ".zip")):
            raise ConfigError(
                "trace_path: a trace is compressed with zstd only; use a name that ends in .jsonl.zst."
            )
        if self.trace_max_bytes is not None:
            at_least("trace_max_bytes", self.trace_max_bytes, 1024)
        if self.trace_max_files is not None:
            at_least("trace_max_files", self.trace_max_files, 2)
            if self.trace_max_bytes is None:
                raise ConfigError("trace_max_files needs trace_max_bytes: without it there is only one file.")
        if self.trace_max_bytes is not None and self.trace_path is None and self.trace_dir is None:
            raise ConfigError("trace_max_bytes needs trace_path or trace_dir.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All an engine core process needs to start."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    trace: TraceConfig = TraceConfig()
    log_stats: bool = True
    telemetry: TelemetryConfig = TelemetryConfig()
    speculative: SpeculativeConfig | None = None
    """None: no speculative decoding."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    kv_transfer: KVTransferConfig | None = None
    """None: KV neither comes from other servers nor goes to them."""
    lora: LoRAConfig | None = None
    """None: there are no adapters."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    @property
    def kv_transfer_port(self) -> int:
        """The port at which others fetch KV from the first rank of this core."""
        assert self.kv_transfer is not None
        return self.kv_transfer.kv_port + self.parallel.data_parallel_rank * self.model.tensor_parallel_size

    def __post_init__(self) -> None:
        if self.kv_transfer is not None and not self.cache.enable_prefix_caching:
            raise ConfigError("kv_transfer_config needs prefix caching: blocks are found by hash.")
        if self.kv_events.is_on and not self.cache.enable_prefix_caching:
            raise ConfigError("kv_events_config needs prefix caching: events report what is cached.")
        if self.speculative is not None and self.model.enable_return_routed_experts:
            raise ConfigError("speculative_config and enable_return_routed_experts cannot be combined.")
        drafts = self.speculative
        num_ranks = self.model.tensor_parallel_size
        if drafts is not None and drafts.has_weights and num_ranks > 1:
            raise ConfigError(
                f"speculative_config: method {drafts.method} supports only one rank so far, but "
                f"tensor_parallel_size is {num_ranks}."
            )
        self.parallel.check_beside(self)
        if self.model.tensor_parallel_size > 1 and self.cache.has_disk_tier:
            raise ConfigError("kv_offloading_disk_size and tensor_parallel_size > 1 cannot be combined.")
        if self.model.enable_return_routed_experts and self.cache.has_host_tier:
            raise ConfigError(
                "enable_return_routed_experts and kv_offloading_size cannot be combined: the experts of a "
                "token are kept on the device only."
            )
