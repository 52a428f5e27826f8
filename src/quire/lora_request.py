"""A LoRA adapter named by a request."""

from __future__ import annotations

import msgspec

from quire.errors import ValidationError

MAX_NAME_LEN, MAX_PATH_LEN = 256, 4096


class LoRARequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Which adapter to apply. Two are equal if their names are.

    Raises ValidationError for an id below 1, an empty name, or a name or path that is too long or has a NUL.
    """

    lora_name: str
    lora_int_id: int
    """Unique per adapter, 1 or more."""
    lora_path: str = ""
    """Directory of the adapter."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Read the files again, as a new revision, although an adapter of this name is loaded."""
    is_3d_lora_weight: bool = False
    """Not used: the layout of experts' factors follows from their shapes."""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValidationError(f"lora_int_id is {self.lora_int_id}; ids of adapters begin at 1", param="lora_int_id")
        for name, text, most in (
            ("lora_name", self.lora_name, MAX_NAME_LEN),
            ("lora_path", self.lora_path, MAX_PATH_LEN),
        ):
            if len(text) > most or "\0" in text:
                raise ValidationError(
                    f"{name} has {len(text)} characters or a NUL; at most {most}, and none", param=name
                )
        if not self.lora_name:
            raise ValidationError("lora_name is empty; name the adapter", param="lora_name")

    @property
    def adapter_id(self) -> int:
        """The id, under vLLM's other name."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name, under vLLM's other name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The path, under vLLM's other name."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
