"""Muon: momentum whose every matrix is replaced by the nearest orthogonal one (Jordan et al., 2024)."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised together, as one batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: the loop calls backward itself
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for (rows, columns), params in by_shape.items():
                updates = torch.stack([self._momentum(param, group["momentum"]) for param in params])
                scale = max(1.0, rows / columns) ** 0.5
                for param, update in zip(params, orthogonalise(updates), strict=True):
                    param.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, param: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's look-ahead gradient of one matrix [rows, columns]."""
        state = self.state[param]
        buffer = state.setdefault("momentum", torch.zeros_like(param))
        buffer.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(buffer, momentum)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Move the singular values of each matrix [n, rows, columns] to about 1, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
