"""From hidden states to the result of a pooling request: an embedding or class scores, of the text or of each token.

A decoder that pools loses its logits head, and gets a classifier where the task needs one. Rerankers that were trained
to answer "yes" or "no" keep the logits head: their classifier is a few of its rows.

A request that needs more than the hidden state of its last token keeps those of earlier chunks until its text is
computed. All else happens in its last step: a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor, nn

from quire.config.checkpoint import CheckpointIndex
from quire.config.hf_config import HFConfig
from quire.config.pooling import Activation, DenseConfig, PoolingConfig
from quire.errors import ModelLoadError
from quire.pooling_params import PoolingParams
from quire.wire.execution import ModelRunnerOutput, NewRequestData
from quire.worker.attention.backend import States
from quire.worker.input_batch import NO_ADAPTER, StepInputs
from quire.worker.kernels.base import Kernels, LinearKernel
from quire.worker.kernels.specs import LOGITS, LinearSpec
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.layers.weights import NamedWeights

SMALLEST_NORM = 1e-12
_DENSE_SPECS = {
    None: LinearSpec(float32_output=True),
    "tanh": LinearSpec(float32_output=True, soft_cap=1.0),
    "gelu": LinearSpec(float32_output=True, activation="gelu"),
    "relu": LinearSpec(float32_output=True, activation="relu"),
}


class Classifier(Protocol):
    """The interface of a model with a classifying head."""

    def classify(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, num_labels]."""
        ...


class AdapterHeads(Protocol):
    """The interface of the table of adapters: worker/lora/table.py."""

    def classify(self, slot: int, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Returns `function(hidden)` with the classifier of the adapter in `slot`, if it has one."""
        ...


class Pooler:
    """The pooling requests of the batch, and the hidden states that they still need."""

    def __init__(
        self, config: PoolingConfig, model: object, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._model = cast(Classifier, model)
        self._dtype = dtype
        self._device = device
        self._dense = [_load_dense(dense, kernels, dtype, device) for dense in config.dense]
        self.adapters: AdapterHeads | None = None
        """Classifiers of adapters."""
        self._params: dict[str, PoolingParams] = {}
        self._steps: dict[str, Tensor] = {}
        """[num_steps] positions at which the steps of an answer end, of requests that ask for those only."""
        self._earlier: dict[str, list[Tensor]] = {}
        """Hidden states of earlier chunks, of requests that need all of them."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request: NewRequestData) -> None:
        """Adds a request that begins, or begins again."""
        assert request.pooling_params is not None, "this model pools: it was sent a request to generate"
        self.remove_request(request.req_id)
        self._params[request.req_id] = params = request.pooling_params
        tag = self._config.step_tag_id if params.step_tag_id is None else params.step_tag_id
        if tag is not None and (params.task or "").startswith("token_"):
            steps = np.flatnonzero(np.array(request.prompt_token_ids, dtype=np.int64) == tag)
            self._steps[request.req_id] = torch.from_numpy(steps).to(self._device)

    def remove_request(self, req_id: str) -> None:
        """Removes a request that has ended or will begin again."""
        for kept in (self._params, self._steps, self._earlier):
            kept.pop(req_id, None)

    def clear(self) -> None:
        """Removes all requests."""
        for kept in (self._params, self._steps, self._earlier):
            kept.clear()

    def segments(self, req_ids: Sequence[str], inputs: StepInputs) -> Tensor | None:
        """Returns [num_tokens]: the number of each token's text in its pair; None if there are no pairs."""
        firsts = [self._params[req_id].segment_start for req_id in req_ids]
        if all(first is None for first in firsts):
            return None
        beyond = np.iinfo(np.int64).max
        starts = np.array([beyond if first is None else first for first in firsts], dtype=np.int64)
        per_token = torch.from_numpy(np.repeat(starts, inputs.query_lens)).to(self._device)
        return (inputs.positions >= per_token).to(torch.int64)

    # -- pooling ------------------------------------------------------------------------------------------------------

    def pool(self, req_ids: Sequence[str], inputs: StepInputs, hidden: Tensor) -> ModelRunnerOutput:
        """Returns the results of the requests whose texts the step completes. hidden: [num_tokens, hidden_size]."""
        complete = set(inputs.sampling.tolist())
        output = ModelRunnerOutput(list(req_ids), [[] for _ in req_ids])
        pooled: dict[str, Tensor] = {}
        slots = inputs.adapter_slots
        for i, req_id in enumerate(req_ids):
            task = self._params[req_id].task or ""
            start = int(inputs.starts[i])
            rows = hidden[start : start + int(inputs.query_lens[i])]
            if self._config.needs_all_tokens(task):
                rows = self._collect(req_id, rows, is_last=i in complete)
            if i not in complete:
                continue
            if task.startswith("token_"):
                wanted = rows if (steps := self._steps.get(req_id)) is None else rows[steps]
                slot = NO_ADAPTER if slots is None else int(slots[i])
                output.pooler_output[req_id] = self._finish(self._params[req_id], wanted, slot)
            else:
                pooled[req_id] = _select(self._config.pooling_type, rows)
        if pooled:
            by_id = {} if slots is None else dict(zip(req_ids, slots.tolist(), strict=True))
            self._finish_pooled(pooled, by_id, output)
        return output

    def _collect(self, req_id: str, rows: Tensor, *, is_last: bool) -> Tensor:
        """Returns all rows so far; they are stored unless these are the last."""
        earlier = self._earlier.pop(req_id, [])
        if is_last:
            return torch.cat([*earlier, rows]) if earlier else rows
        self._earlier[req_id] = [*earlier, rows.clone()]
        return rows

    def _finish_pooled(self, pooled: dict[str, Tensor], slots: dict[str, int], output: ModelRunnerOutput) -> None:
        """Computes the head for all complete requests of an adapter at once, one row each."""
        groups: dict[int, list[str]] = {}
        for req_id in pooled:
            groups.setdefault(slots.get(req_id, NO_ADAPTER), []).append(req_id)
        for slot, req_ids in groups.items():
            x = torch.stack([pooled[req_id] for req_id in req_ids])  # [num_reqs, hidden_size] float32
            if self._config.head == "classify":
                x = self._classify(slot, x.to(self._dtype))
            for dense in self._dense:
                x = dense(x.to(self._dtype))
            for req_id, row in zip(req_ids, x, strict=True):
                output.pooler_output[req_id] = self._activate(self._params[req_id], row)

    def _finish(self, params: PoolingParams, rows: Tensor, slot: int) -> npt.NDArray[Any]:
        """Returns the result for every token of one request."""
        return self._activate(params, rows.float() if self._config.head == "embed" else self._classify(slot, rows))

    def _classify(self, slot: int, rows: Tensor) -> Tensor:
        if self.adapters is None:
            return self._model.classify(rows)
        return self.adapters.classify(slot, self._model.classify, rows)

    def _activate(self, params: PoolingParams, x: Tensor) -> npt.NDArray[Any]:
        """Returns x with the activation applied. x: [dim] or [num_tokens, dim] float32."""
        activates = self._config.activates if params.use_activation is None else params.use_activation
        if self._config.head == "embed":
            dim = params.dimensions or self._config.default_dim
            x = x[..., :dim]
            if activates:
                x = x / x.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
        elif activates:
            x = _probabilities(self._config.activation, x)
        return np.array(x.cpu().numpy(), dtype=np.float32)


def _select(pooling_type: str, rows: Tensor) -> Tensor:
    """Returns [hidden_size] float32: the pooled rows of one text."""
    if pooling_type == "mean":
        return rows.float().mean(dim=0)
    return rows[0 if pooling_type == "cls" else -1].float()


def _probabilities(activation: Activation, scores: Tensor) -> Tensor:
    if activation == "softmax":
        return scores.softmax(dim=-1)
    return scores.sigmoid() if activation == "sigmoid" else scores


def _load_dense(config: DenseConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """Returns the kernel of a Dense module of sentence-transformers. Raises ModelLoadError."""
    index = CheckpointIndex.from_dir(config.directory)
    wanted = {"linear.weight": (config.out_features, config.in_features)}
    if config.bias:
        wanted["linear.bias"] = (config.out_features,)  # type: ignore[assignment]
    for name, shape in wanted.items():
        if name not in index.tensors or index.tensors[name].shape != shape:
            raise ModelLoadError(f"{index.source} has no tensor {name} of shape {list(shape)}")
    with safe_open(index.source, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name).to(device, dtype) for name in wanted}
    return kernels.linear(tensors["linear.weight"], tensors.get("linear.bias"), _DENSE_SPECS[config.activation])


class RewardHead(nn.ModuleDict):
    """The classifier of a reward model, by its names in the checkpoint: linear, ReLU, linear."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        layers = {
            "0": Linear(hidden_size, hidden_size, True, LinearSpec(activation="relu")),
            "2": Linear(hidden_size, num_labels, True, LOGITS),
        }
        super().__init__(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, num_labels]."""
        scores: Tensor = self["2"](self["0"](hidden))
        return scores


CLASSIFIER = "score"


class PooledDecoder(nn.Module):
    """The `model` of a decoder (an nn.Module) built to generate, and `score`, a classifier of its hidden states."""

    def __init__(self, decoder: Any, hf: HFConfig, pooling: PoolingConfig) -> None:
        super().__init__()
        self.label_token_ids = list(pooling.label_token_ids)
        self.is_difference = bool(self.label_token_ids) and len(pooling.labels) == 1
        self.model = decoder.model
        self._hidden_states, self._logits = decoder.forward, decoder.compute_logits
        self._rename = decoder.checkpoint_name if isinstance(decoder, NamedWeights) else str
        if self.label_token_ids:
            self.lm_head = decoder.lm_head
        for module in decoder.modules():
            if isinstance(module, Embedding) and not self.label_token_ids:
                module.head = None
        has_bias = pooling.head == "token_classify" and bool(hf.get("token_classification_bias", True))
        has_classifier = pooling.head != "embed" and not self.label_token_ids
        size = len(pooling.labels)
        self.score: Linear | RewardHead | None = None
        if has_classifier and pooling.classifier_layers == 2:
            self.score = RewardHead(hf.hidden_size, size)
        elif has_classifier:
            self.score = Linear(hf.hidden_size, size, has_bias, LOGITS)

    def checkpoint_name(self, name: str) -> str | None:
        is_other = (name.startswith("lm_head.") and not self.label_token_ids) or (
            self.score is None and name.startswith(f"{CLASSIFIER}.")
        )
        return None if is_other else self._rename(name)

    def forward(self, input_ids: Tensor, positions: Tensor, *received: Tensor) -> States:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden]; `received`: see
        `Decoder`."""
        states: States = self._hidden_states(input_ids, positions, *received)
        return states

    def classify(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden]; returns float32 [n, num_labels]."""
        if self.label_token_ids:
            logits: Tensor = self._logits(hidden)[:, self.label_token_ids]  # [n, len(label_token_ids)]
            return logits[:, 1:] - logits[:, :1] if self.is_difference else logits
        assert self.score is not None
        scores: Tensor = self.score(hidden)
        return scores
