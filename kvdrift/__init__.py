"""Where KV-cache quantization error lands, and whether a policy may ship."""

__version__ = "0.1.0"
