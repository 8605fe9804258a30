"""Every norm type in training: it learns, and resumes bit for bit.

    python -m pytest tests/test_layouts_train.py

One process trains all types, one after the other (all_types.py).
"""

from pathlib import Path

import pytest
import torch
from all_types import KEPT
from helpers import Job, losses, same, val_losses

from norm_types import NORM_TYPES


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory) -> Path:
    """Folder with the runs whole and rest of each type."""
    folder = tmp_path_factory.mktemp("all_types")
    for phase in ("whole", "rest"):
        job = Job((phase, str(tiny_data), str(folder)), 1, folder / phase, None, "all_types")
        assert set(job.wait()) == {0}, job.text()
    return folder


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_forty_steps_fall(runs, norm_type):
    """The loss of the last steps is below 0.8 of the first; the evaluation says the same."""
    found = losses(runs / "whole" / norm_type)
    assert sorted(found) == list(range(1, 41))
    last = sum(found[step] for step in range(36, 41)) / 5
    assert last < 0.8 * found[1]
    evaluated = val_losses(runs / "whole" / norm_type)
    assert len(evaluated) == 5 and evaluated[40] < 0.8 * evaluated[0]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_resume_is_bit_for_bit_and_evaluation_moves_nothing(runs, norm_type):
    """The later half again, from a checkpoint, and without the evaluations of the first run."""
    whole, rest = runs / "whole" / norm_type, runs / "rest" / norm_type
    expected = {step: loss for step, loss in losses(whole).items() if step > 20}
    assert losses(rest) == expected and len(expected) == 20
    assert val_losses(rest) == {40: val_losses(whole)[40]}
    states = [torch.load(run / "ckpt_last.pt", weights_only=True) for run in (whole, rest)]
    assert torch.load(whole / KEPT, weights_only=True)["step"] == 20
    assert all(same(states[0][name], states[1][name]) for name in ("model", "optimizer"))
