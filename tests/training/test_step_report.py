"""The report of a step: packed on each rank, summed, unpacked.

python -m pytest tests/training/test_step_report.py
"""

import math

import pytest
import torch

from common.distributed import Ranks
from training.optim import GradientNorms
from training.step_report import PendingReport, count_bad, pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_two_ranks_pack_is_what_both_unpack(dtype):
    first = pack(torch.tensor([2.0, 0.5], dtype=dtype), False, Ranks(0, 2, CPU))
    second = pack(torch.tensor([3.0, 0.0], dtype=dtype), True, Ranks(1, 2, CPU))
    summed = first + second
    assert summed.dtype == dtype and count_bad(summed) == 0
    norms = GradientNorms(torch.tensor(5.0, dtype=dtype), torch.tensor([3.0, 4.0], dtype=dtype))
    report = PendingReport(7, 1e-3, summed, norms).read()
    assert (report.step, report.lr) == (7, 1e-3)
    assert (report.loss, report.aux_loss) == (2.5, 0.25)  # means over ranks
    assert report.stops is True and report.bad_ranks == []
    assert report.grad_norm == 5 and report.gradient_norms == [3, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_loss_names_its_rank(bad):
    packed = [
        pack(torch.tensor([loss, 0.0]), False, Ranks(rank, 3, CPU))
        for rank, loss in enumerate([1.0, bad, 1.0])
    ]
    summed = sum(packed)
    assert count_bad(summed) == 1
    norms = GradientNorms(torch.tensor(bad), torch.tensor([1.0, bad]))
    report = PendingReport(1, 0.1, summed, norms).read()
    assert report.bad_ranks == [1] and report.stops is False
    assert not math.isfinite(report.loss) and not math.isfinite(report.grad_norm)
