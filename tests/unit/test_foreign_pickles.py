"""What DeepSpeed's pickles may name: one enum's members by ``getattr``, as Python before 3.11.4 writes them, and nothing else."""

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from deepspeed_cdp.checkpoint.deepspeed_formats import _load
from deepspeed_cdp.errors import CheckpointError


class Asks:
    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_members_are_read(tmp_path):
    torch.save({"zero_stage": Asks(ZeroStageEnum, "weights")}, tmp_path / "x.pt")
    assert _load(str(tmp_path / "x.pt"), ["zero_stage"])["zero_stage"] is ZeroStageEnum.weights


@pytest.mark.parametrize(("kind", "name"), [(ZeroStageEnum, "mro"), (ZeroStageEnum, "__class__"), (torch.Tensor, "backward")])
def test_other_attributes_are_not(tmp_path, kind, name):
    torch.save({"zero_stage": Asks(kind, name)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="x.pt"):
        _load(str(tmp_path / "x.pt"), ["zero_stage"])
