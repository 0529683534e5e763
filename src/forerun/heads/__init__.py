"""The models of learned drafters (EAGLE, EAGLE-3, MTP, DFlash): their shape (config.py), their checkpoints (layouts.py) and
their forward pass (chain.py and block.py, on head.py). A head reads hidden states of its target and shares the target's
kernels; a head without an embedding or a vocabulary head of its own shares those too. The engine runs heads through drafters/;
the trainer runs the same classes with kernels that autograd understands. docs/heads.md describes the layouts."""
