"""The flags of ``continuum serve`` for LoRA adapters."""

from __future__ import annotations

import argparse

from engine.config.lora import LoRAConfig, read_lora_config
from engine.records.adapters import MAX_RANK


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for which adapters to serve, and how many run at once."""
    flags = parser.add_argument_group("adapters")
    flags.add_argument(
        "--enable-lora",
        action="store_true",
        help="Serve LoRA adapters of the model, too: a request names one as its model",
    )
    flags.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help="Adapters to load at startup, from folders that peft saved; POST /v1/load_lora_adapter loads "
        "others (default: none)",
    )
    flags.add_argument(
        "--max-loras",
        type=int,
        metavar="ADAPTERS",
        help="Maximum number of adapters of running requests; requests for others wait "
        f"(default: {LoRAConfig().max_loras})",
    )
    flags.add_argument(
        "--max-lora-rank",
        type=int,
        metavar="RANK",
        help=f"Highest rank of an adapter, at most {MAX_RANK} (default: {LoRAConfig().max_lora_rank})",
    )
    flags.add_argument(
        "--max-cpu-loras",
        type=int,
        metavar="ADAPTERS",
        help="Maximum number of adapters in host memory; the least recently used are dropped, and read again "
        "when a request names them (default: all)",
    )


def lora_config(args: argparse.Namespace) -> LoRAConfig | None:
    """Builds the configuration from these flags."""
    return read_lora_config(
        enable_lora=args.enable_lora,
        lora_modules=args.lora_modules,
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
    )
