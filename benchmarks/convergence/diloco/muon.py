"""Muon and AdamW as one optimizer, the inner one of MuLoCo's run: the class that docs/diloco.md shows, without checkpoints."""

from __future__ import annotations

from typing import Any

import torch


class MuonAdamW(torch.optim.Optimizer):
    """Steps Muon for the layers' matrices and AdamW for the rest."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._parts = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes a step of each."""
        for part in self._parts:
            part.step()
