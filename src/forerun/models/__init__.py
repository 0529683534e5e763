"""The target models: what a checkpoint is (config.py, loading.py), where it comes from (hub.py, gguf.py), what it
computes (decoder.py, rope.py) and what its tokens are (tokenizer.py). Nothing here knows of requests or of drafting.
"""
