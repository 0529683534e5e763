"""One thread for the tests: tiny models are slower on several, and far slower beside other work."""

import torch

torch.set_num_threads(1)
