"""Bytes of Python's standard library as a language-modelling task, and the small decoder that learns it."""

from jpmhc.experiments.tasks.language.decoder import Decoder, DecoderConfig
from jpmhc.experiments.tasks.language.text import Text, read_library

__all__ = ["Decoder", "DecoderConfig", "Text", "read_library"]
