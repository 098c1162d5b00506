"""The flags of ``continuum serve`` for LoRA adapters."""

from __future__ import annotations

import argparse

from engine.lora import MAX_RANK, LoRAConfig, read_lora_config


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for which adapters to serve, and how many run at once."""
    flags = parser.add_argument_group("adapters")
    flags.add_argument(
        "--enable-lora",
        action="store_true",
        help="Serve LoRA adapters of the model beside it: a request chooses one as its model",
    )
    flags.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help="Adapters to load at startup: folders that peft has saved; others are loaded by POST "
        "/v1/load_lora_adapter (default: none)",
    )
    flags.add_argument(
        "--max-loras",
        type=int,
        metavar="ADAPTERS",
        help=f"Most adapters of running requests; others wait (default: {LoRAConfig().max_loras})",
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
        help="Most adapters in host memory; the least recently used are read again when they are named "
        "(default: all)",
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
