"""xIELU (Huang and Schlag 2024): an activation whose numbers are learned, a few for each layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from quire.worker.kernels.base import ActivationKernel, Kernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import XieluSpec
from quire.worker.layers.weights import GIVEN_BACK, weight


class Xielu(nn.Module):
    """The activation of one layer, by its names in the checkpoint. See `specs.xielu`."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = weight(1), weight(1)
        self.beta, self.eps = weight(), weight()
        self._kernel: ActivationKernel | None = None

    def prepare(self, kernels: Kernels) -> ActivationKernel:
        slope = self.beta.data
        spec = XieluSpec(
            positive=functional.softplus(self.alpha_p.data).item(),
            negative=(slope + functional.softplus(self.alpha_n.data)).item(),
            slope=slope.item(),
            least=self.eps.data.item(),
        )
        self._kernel = kernel = kernels.xielu(spec)
        return kernel

    def discard(self) -> None:
        self._kernel = GIVEN_BACK

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, dim] to the same shape."""
        return (self._kernel or self.prepare(TORCH_KERNELS))(x)
