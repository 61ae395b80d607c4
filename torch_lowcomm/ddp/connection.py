"""A state on its group: the backend, and the entries of the model's parameters, once all ranks have given the same options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.ddp.options import StateOptions
from torch_lowcomm.ddp.parameters import Named, Parameters


class Connection(NamedTuple):
    """What a state has of its group: its backend, and the entries of the model's parameters."""

    backend: _C.LowcommBackend
    parameters: Parameters

    @staticmethod
    def make(
        backend: _C.LowcommBackend,
        options: StateOptions,
        named: Sequence[Named],
        *,
        fixed: bool,
        copied: Mapping[str, Any] | None,
        has_scaler: bool,
        steps: int,
    ) -> Connection:
        """Compares this rank's options with the others'. Collective: ranks that differ, or of which one raised, all raise.

        Args:
            backend: The group's backend.
            options: The state's.
            named: Key, parameter, and whether it is kept exact.
            fixed: Whether these are all parameters.
            copied: Tensors of a copied state, or None.
            has_scaler: Whether residuals follow a gradient scaler.
            steps: Number of steps that have begun.
        """
        try:
            parameters = Parameters(
                backend,
                rank=options.rank or None,
                feedback=options.error_feedback,
                eight_bits=options.residual_dtype == "int8",
                named=named,
                fixed=fixed,
            )
            if copied is not None:
                parameters.load_own(dict(copied))
        except Exception as error:
            refuse(backend, error)
            raise
        own = {"grad_scaler": has_scaler, "coded parameters": parameters.coded(), "steps": steps}
        texts = {**dataclasses.asdict(options), **own}
        backend.agree_on_texts("ddp.State", [(name, str(value)) for name, value in texts.items()])
        if any(part.strip().startswith("all_reduce=") for part in backend.policy.split(";")):
            logger.info(
                "ddp: group %s has the policy %r, and the hook wins: gradients are coded once, by %s",
                backend.group_name,
                backend.policy,
                options.codec,
            )
        return Connection(backend, parameters)


def refuse(backend: _C.LowcommBackend, error: Exception) -> None:
    """Tells the other ranks, which wait to compare options, of an error of this one."""
    backend.agree_on_texts("ddp.State", [], error=f"{type(error).__name__}: {error}")
