"""Number types that workers transfer, by their names in safetensors files."""

from typing import Final

import torch

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors name -> torch dtype, for the types that can be transferred."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
