"""Training of learned drafters.

    questions.py, answers.py   prompts, and the target's own answers to them: the samples (data.py)
    packing.py, features.py    samples in packs of fixed shape; the target's states of their tokens
    methods.py                 what is trained, and its forward pass: that of heads/, which the engine runs too
    operations.py              kernels with gradients: plain.py in plain torch, fused.py and fused_attention.py in Triton
    heads.py, parameters.py    the loop, the losses of a step, the optimiser
"""
