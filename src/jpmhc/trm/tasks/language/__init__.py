"""Bytes of Python's standard library as a language-modelling task, and the small decoder that learns it."""

from jpmhc.trm.tasks.language.decoder import Decoder, DecoderConfig
from jpmhc.trm.tasks.language.text import Text, read_library

__all__ = ["Decoder", "DecoderConfig", "Text", "read_library"]
