"""The dtypes that parameters may have, by the names that the config uses."""

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
