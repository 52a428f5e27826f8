"""A model of transformers behind the interface of our own models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quire.config.quantization import QuantizationScheme
from quire.errors import UnsupportedModelError
from quire.worker.fallback import interface
from quire.worker.fallback.adoption import NAME, Adopter, Matrices, watching
from quire.worker.fallback.rotation import adopt_rotations
from quire.worker.kernels.base import Kernels


class _ReachedHeadError(Exception):
    """Ends a forward pass where the logits head would begin."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class FallbackForCausalLM(nn.Module):
    """Runs a CausalLM of transformers on flat batches.

    Its `forward` is called for both halves of a step, so that whatever it does beside its base and its head counts:
    the first half ends where its base returns, the second begins there with given hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.causal: Any = None
        self.packed_bytes = 0
        """Memory of the weights that kernels hold."""
        self.left: list[str] = []
        """Paths of the matrices that stay torch's."""
        self._output_class: Any = None
        self._given: Tensor | None = None

    def take(
        self, causal: Any, kernels: Kernels, context_len: int, scheme: QuantizationScheme | None = None
    ) -> FallbackForCausalLM:
        """Runs `causal`, a model with its weights, from now on. `context_len`: tokens of the longest sequence.

        Raises UnsupportedModelError naming the layer that does what Quire cannot.
        """
        self.causal = causal
        causal.config._experts_implementation = NAME
        matrices = self._discover(kernels, context_len)
        adopter = Adopter(kernels, matrices, causal.get_output_embeddings(), scheme)
        self.left, self.packed_bytes = adopter.adopt(causal), adopter.num_bytes
        return self

    def discard(self) -> None:
        """Frees the weights: no step can run until `take` is called again."""
        del self.causal
        self.causal = None

    def _tap(self, base: Any) -> None:
        """Lets the first half of a step end where `base` returns, and the second begin there."""
        run = base.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return self._output_class(last_hidden_state=self._given)
            raise _ReachedHeadError(run(*args, **kwargs)[0][0])

        base.forward = forward

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        if self.causal is None:
            raise RuntimeError("the weights of this model were given back: load them again first")
        try:
            self.causal(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        except _ReachedHeadError as reached:
            return reached.hidden
        except BaseException:
            interface.restart_calls(self.causal)
            raise
        raise AssertionError("its base was not called")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [n, hidden], any rows of `forward`'s result; returns float32 [n, vocab]."""
        self._given = hidden[None]
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        try:
            logits: Tensor = self.causal(input_ids=ids, position_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits[0].float()

    @torch.inference_mode()
    def _discover(self, kernels: Kernels, context_len: int) -> Matrices:
        """Runs two tokens, and gives every layer the paged attention that it asks for. Returns the matrices.

        Raises UnsupportedModelError naming the layer that does something else.
        """
        causal = self.causal
        with watching(causal) as matrices, _first_called(causal) as bases:
            before = self._run_two_tokens()
        if not bases:
            raise UnsupportedModelError(f"{type(causal).__name__} has no base model that could be run without its head")
        adopt_rotations(causal, before, self._run_two_tokens, kernels, context_len)
        base, output = bases[0]
        self._output_class = type(output)
        self._tap(base)
        self._attach(before.sites)
        return matrices

    def _run_two_tokens(self) -> interface.Recording:
        """Returns the record of a step of two tokens, in which each attends to itself."""
        causal = self.causal
        device = next(causal.parameters()).device
        names = {id(module): path for path, module in causal.named_modules()}
        ids, positions = torch.zeros((1, 2), dtype=torch.int64, device=device), torch.arange(2, device=device)[None]
        causal.config._attn_implementation = interface.RECORDING
        try:
            with interface.recording(names) as found:
                found.logits = causal(input_ids=ids, position_ids=positions, use_cache=False).logits
        finally:
            causal.config._attn_implementation = interface.NAME
        return found

    def _attach(self, sites: list[interface.Site]) -> None:
        count = int(getattr(self.causal.config.get_text_config(), "num_hidden_layers", 0))
        num_layers = len({site.module for site in sites})
        if num_layers < count or not sites:
            raise UnsupportedModelError(
                f"{num_layers} of its {count} layers call transformers' attention interface; others keep a state, or "
                "attend in another way"
            )
        interface.attach(self.causal, sites)


@contextmanager
def _first_called(causal: Any) -> Iterator[list[tuple[nn.Module, Any]]]:
    """Yields a list of the modules that may be the base of `causal`, with their outputs, the outermost of those that
    are called inside the block first."""
    called: list[tuple[nn.Module, Any]] = []
    candidates = (getattr(causal, causal.base_model_prefix, None), getattr(causal, "model", None), causal.get_decoder())
    bases = {id(m): m for m in candidates if isinstance(m, nn.Module) and m is not causal}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):  # a head may be called decoder, too
            called.insert(0, (module, output))  # inner ones return first

    hooks = [base.register_forward_hook(note) for base in bases.values()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()
