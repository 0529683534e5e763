"""Models: how a checkpoint is read (files.py, config.py, loading.py), where it comes from (hub.py, gguf.py), its weights
(weights.py), what it computes (decoder.py, rope.py), its tokens (tokenizer.py) and its recommended sampling (generation.py).
Nothing here depends on drafting.
"""
