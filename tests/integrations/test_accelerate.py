"""Loops that use Accelerate."""

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from torch.utils.data import DataLoader, TensorDataset

import dualform
from dualform.errors import RecordingError
from dualform.integrations.accelerate import record
from halves import require, scale_gradients

DATA = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.lines = []

    @property
    def tracker(self):
        return self.lines

    def log(self, values, step=None, **kwargs):
        self.lines.append(values)


def prepared(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    loader = DataLoader(TensorDataset(DATA, torch.arange(24)), batch_size=4, shuffle=True)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)


def train(accelerator, model, optimizer, loader, recorder):
    for x, ids in loader:
        with accelerator.accumulate(model):
            recorder.batch(sample_id=ids)
            loss = nn.functional.cross_entropy(model(x), ids % 3)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}],
    ids=["plain", "accumulation", "bf16"],
)
def test_a_loop_is_recorded(tmp_path, settings):
    if "mixed_precision" in settings:
        require(torch.bfloat16)
    accelerator = Accelerator(cpu=True, **settings)
    model, optimizer, loader = prepared(accelerator)
    with record(accelerator, model, optimizer, tmp_path / "run") as recorder:
        train(accelerator, model, optimizer, loader, recorder)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed
    assert dual.end_step == 6 // settings.get("gradient_accumulation_steps", 1)
    assert sorted(dual.rows["sample_id"]) == list(range(24))


def test_float16_with_a_gradient_scaler(tmp_path):
    """The first scales overflow: these steps are none."""
    require(torch.float16)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    scale_gradients(accelerator, init_scale=2.0**40, backoff_factor=2.0**-12, growth_interval=3)
    model, optimizer, loader = prepared(accelerator)
    with record(accelerator, model, optimizer, tmp_path / "run") as recorder:
        train(accelerator, model, optimizer, loader, recorder)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed
    assert 0 < dual.end_step < 6
    assert dual.rows.height == 4 * dual.end_step


def test_resumed_from_a_checkpoint(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    with record(accelerator, model, optimizer, tmp_path / "run") as recorder:
        train(accelerator, model, optimizer, loader, recorder)
        accelerator.save_state(tmp_path / "checkpoint")
        train(accelerator, model, optimizer, loader, recorder)
    accelerator.load_state(tmp_path / "checkpoint")
    with record(accelerator, model, optimizer, tmp_path / "run", checkpoint=tmp_path / "checkpoint") as recorder:
        assert recorder.step == 6
        train(accelerator, model, optimizer, loader, recorder)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.end_step == 12
    assert dual.verify().passed


def test_an_exception_closes_the_recording(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    with pytest.raises(ValueError, match="broken"):
        with record(accelerator, model, optimizer, tmp_path / "run") as recorder:
            train(accelerator, model, optimizer, loader, recorder)
            raise ValueError("broken")
    assert dualform.open(tmp_path / "run").store.manifest.ended == "ValueError"


def test_gap_and_cost_are_logged(tmp_path):
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("test")
    model, optimizer, loader = prepared(accelerator)
    with record(accelerator, model, optimizer, tmp_path / "run", verify=True) as recorder:
        train(accelerator, model, optimizer, loader, recorder)
    costs, gap = tracker.lines
    assert costs["dualform/steps"] == 6
    assert costs["dualform/bytes"] > 0
    assert gap["dualform/gap"] == dualform.open(tmp_path / "run").verify().frame["gap"].max()


@pytest.mark.parametrize(
    ("kind", "name"), [(DistributedType.FSDP, "FSDP"), (DistributedType.DEEPSPEED, "DeepSpeed")], ids=str
)
def test_sharded_training_is_refused_by_name(tmp_path, kind, name):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepared(accelerator)
    accelerator.state.distributed_type = kind
    with pytest.raises(RecordingError, match=name):
        with record(accelerator, model, optimizer, tmp_path / "run"):
            pass
