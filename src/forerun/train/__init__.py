"""Training of learned drafters: the samples (data.py), how they are packed (packing.py), the target's states (features.py), the
operations with gradients (operations.py, their fast twins in fused.py and attention.py), the losses (losses.py), the passes of
each method (passes.py) and the loop (heads.py). The forward pass of a head is that of heads/; the engine runs the same."""
