"""The fast form of measured.py and calibration.py for CUDA: learning, the look-up and the choice are a Triton launch each."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from forerun.drafters import Drafter, Rows, RowState, calibration
from forerun.drafters.calibration import Calibration, Candidates, Weighed
from forerun.drafters.measured import DeviceMeasured, Found, LookUp
from forerun.kernels import Kernels, cuda_mixed, cuda_step
from forerun.kernels.cuda import CudaKernels


class FusedCalibration(Calibration):
    def __init__(self, state: RowState, pdl: int) -> None:
        super().__init__(state)
        self._pdl = pdl
        sums = torch.zeros(2, calibration.BINS, device=self.rate.device)
        self._tables = cuda_mixed.Tables(self.rate, self.weight, self.luck, self.tokens, self.bins, self.told, sums)
        c = calibration
        self._kinds = cuda_mixed.Kinds(*(getattr(c, name) for name in cuda_mixed.Kinds._fields))
        self._limits = cuda_mixed.Limits(c.PRECISION, c.MOST_SHIFT, c.LEAST, c.MOST, c.LEAST_SURVIVAL)

    def learn(self, slot: Tensor, count: Tensor) -> None:
        state, numbers = self._state, (calibration.MEMORY, calibration.WINDOW)
        cuda_mixed.learn(self._tables, state.tokens, state.length, slot, count, state.dummy, *numbers, self._pdl)

    def weigh(self, slot: Tensor, c: Candidates) -> Weighed:
        given = (self._tables, slot, self._state.blind, tuple(part.contiguous() for part in c), self._edges, self._matches)
        return Weighed(*cuda_mixed.weigh(*given, self._limits, self._kinds, self._pdl))


class FusedMeasured(DeviceMeasured):
    def __init__(self, model: Drafter, state: RowState, look_up: LookUp | None, drawn: bool, kernels: Kernels) -> None:
        self._pdl = cast(CudaKernels, kernels).pdl
        super().__init__(model, state, look_up, drawn, FusedCalibration(state, self._pdl))
        self._nothing: dict[int, Found] = {}  # by rows

    def _find(self, rows: Rows) -> Found:
        state, width = self._state, self._state.draft.shape[1]
        if self._look_up is None or not width:
            count = len(rows.slot)
            if count not in self._nothing:
                self._nothing[count] = super()._find(rows)
            return self._nothing[count]
        given = (state.tokens, state.length, state.active, rows.slot, cuda_step.LookUp(*self._look_up), width, self._pdl)
        return Found(*cuda_step.look_up(*given))
