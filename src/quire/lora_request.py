"""A LoRA adapter named by a request."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Which adapter to apply. `lora_int_id` is >= 1 and unique per adapter; its name and path enter the block hash."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
