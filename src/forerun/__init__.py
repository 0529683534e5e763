"""Forerun: lossless speculative decoding, and the measurements that say whether it pays."""

__version__ = "0.1.0"
