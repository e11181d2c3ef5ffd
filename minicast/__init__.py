"""CAST: cost-aware speculative trees from one-pass block drafters. See `minicast.decode` for the round."""

from minicast.decode import Decoder, Output, Round, generate, stream

__all__ = ["Decoder", "Output", "Round", "generate", "stream"]
