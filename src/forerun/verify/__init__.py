"""Verification: the target's distribution from its logits (sampling.py, filters.py), the randomness (noise.py) and the rules
that accept or reject drafts (accept.py). Nothing here knows how drafts are made or what happens after a verdict.
"""

from forerun.verify.accept import accept_block, accept_matching, accept_ratio
from forerun.verify.noise import block_noise, child_seed, draw, request_seed, uniform
from forerun.verify.sampling import Features, SamplingState, check_request, logprobs

__all__ = [
    "Features", "SamplingState", "accept_block", "accept_matching", "accept_ratio", "block_noise", "check_request",
    "child_seed", "draw", "logprobs", "request_seed", "uniform",
]
