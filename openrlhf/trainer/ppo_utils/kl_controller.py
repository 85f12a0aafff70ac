"""The KL coefficient: fixed, or steered towards a target (arXiv 1909.08593, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.algorithms.kl import adaptive_kl_coef


@dataclass
class KLController:
    """Holds beta; `target` None keeps it constant."""

    coef: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, num_samples: int) -> None:
        """Move beta after a step whose mean KL to the reference was `kl`."""
        if self.target is not None:
            self.coef = adaptive_kl_coef(
                self.coef, kl, target=self.target, horizon=self.horizon, num_samples=num_samples
            )

    def state_dict(self) -> dict[str, float]:
        """Return beta, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load an adapted beta; a constant one stays what this command says."""
        if self.target is not None:
            self.coef = state["coef"]
