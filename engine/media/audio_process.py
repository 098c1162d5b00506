"""The process that decodes audio of clients: see ``decoder_process``."""

from __future__ import annotations

from engine.media.decoder_process import CLIP_TIME_LIMIT_S, decode_orders


def main() -> None:
    """Decodes the clips that arrive on standard input until it ends."""
    from engine.media.audio_decoding import decode

    decode_orders(decode, CLIP_TIME_LIMIT_S)
