"""The target models: what a checkpoint is (files.py, config.py, loading.py), where it comes from (hub.py, gguf.py), what it
computes (decoder.py, rope.py), what its tokens are (tokenizer.py) and how its makers sample from it (generation.py).
Nothing here knows of drafting.
"""
