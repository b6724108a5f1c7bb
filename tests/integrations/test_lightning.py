"""The Trainer of Lightning."""

import polars as pl
import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, Dataset

import dualform
from dualform.errors import BatchError, RecordingError
from dualform.integrations.lightning import RecordTraining
from halves import require

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]
DATA = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))


class Rows(Dataset):
    """Dictionaries with a number in each, or pairs."""

    def __init__(self, *, pairs=False):
        self.pairs = pairs

    def __len__(self):
        return len(DATA)

    def __getitem__(self, number):
        if self.pairs:
            return DATA[number], number
        return {"x": DATA[number], "label": number % 3, "sample_id": number}


class Classifier(LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer = optimizer
        self.seen = []

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        x, label = (batch["x"], batch["label"]) if isinstance(batch, dict) else (batch[0], batch[1] % 3)
        assert "sample_id" not in batch or isinstance(batch, list)
        self.seen += [int((row == DATA).all(1).nonzero()) for row in x]
        return nn.functional.cross_entropy(self(x), label)

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self(batch["x"]), batch["label"]))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


def fit(tmp_path, callback, model=None, dataset=None, ckpt_path=None, callbacks=(), **settings):
    defaults = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, *callbacks],
        **{**defaults, **settings},
    )
    torch.manual_seed(1)
    loader = DataLoader(Rows() if dataset is None else dataset, batch_size=4, shuffle=True)
    trainer.fit(model, loader, DataLoader(Rows(), batch_size=4), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def assert_proved(run, model):
    dual = dualform.open(run, model)
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.rows["assumed"].is_null().all(), str(certificate)
    return dual


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"precision": "64-true"},
        {"val_check_interval": 2},
    ],
    ids=["plain", "accumulation", "clipping", "double precision", "validation"],
)
def test_recorded_ids_are_those_the_model_saw(tmp_path, settings):
    model = Classifier()
    fit(tmp_path, RecordTraining(tmp_path / "run"), model, **settings)
    dual = assert_proved(tmp_path / "run", model)
    if settings.get("precision") != "64-true":
        assert dual.rows["sample_id"].to_list() == model.seen
    assert dual.rows.height == 48
    assert dual.end_step == 12 // settings.get("accumulate_grad_batches", 1)


def half_precision():
    require(torch.bfloat16)
    return {"precision": "bf16-mixed"}


def scaled_half_precision():
    """Lightning has 16-mixed for accelerators only; the plugin behind it runs anywhere."""
    require(torch.float16)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}


@pytest.mark.parametrize("settings", [half_precision, scaled_half_precision])
def test_mixed_precision(tmp_path, settings):
    model = Classifier()
    fit(tmp_path, RecordTraining(tmp_path / "run"), model, **settings())
    assert assert_proved(tmp_path / "run", model).rows["sample_id"].to_list() == model.seen


def test_columns_from_any_batch_and_a_part_of_the_module(tmp_path):
    model = Classifier(torch.optim.SGD)
    columns = lambda batch: {"sample_id": batch[1], "label": batch[1] % 3}  # noqa: E731
    callback = RecordTraining(tmp_path / "run", columns=columns, module="network", dtype="float16")
    fit(tmp_path, callback, model, Rows(pairs=True), limit_val_batches=0)
    dual = assert_proved(tmp_path / "run", model.network)
    assert dual.rows["sample_id"].to_list() == model.seen
    assert (dual.rows["label"] == dual.rows["sample_id"] % 3).all()
    assert dual.layers == ["0", "2"]


def test_a_batch_without_ids_is_explained(tmp_path):
    with pytest.raises(BatchError, match="columns=lambda batch"):
        fit(tmp_path, RecordTraining(tmp_path / "run"), Classifier(), Rows(pairs=True), limit_val_batches=0)


def test_resumed_from_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"

    def keep():
        checkpoints = ModelCheckpoint(dirpath=folder, every_n_train_steps=6, filename="{step}", save_top_k=-1)
        return {"callbacks": [checkpoints], "enable_checkpointing": True}

    first = Classifier()
    fit(tmp_path, RecordTraining(tmp_path / "run"), first, max_steps=8, **keep())
    assert dualform.open(tmp_path / "run").end_step == 8
    second = Classifier()
    fit(tmp_path, RecordTraining(tmp_path / "run"), second, ckpt_path=folder / "step=6.ckpt", **keep())
    dual = assert_proved(tmp_path / "run", second)
    assert dual.log["global_step"].to_list() == list(range(1, 13))
    assert dual.rows["sample_id"].to_list() == [*first.seen[:24], *second.seen]


class Fail(Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            raise self.error


def test_an_exception_closes_the_recording(tmp_path):
    model = Classifier()
    with pytest.raises(ValueError, match="broken"):
        fit(tmp_path, RecordTraining(tmp_path / "run"), model, callbacks=[Fail(ValueError("broken"))])
    dual = assert_proved(tmp_path / "run", model)
    assert dual.end_step == 3
    assert dual.store.manifest.ended == "ValueError"


def test_gap_and_cost_are_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    callback = RecordTraining(tmp_path / "run", verify=True)
    fit(tmp_path, callback, Classifier(), logger=logger, log_every_n_steps=4)
    logged = pl.read_csv(logger.experiment.metrics_file_path)
    assert logged["dualform/steps"].drop_nulls().to_list() == [4, 8, 12, 12]
    assert logged["dualform/bytes"].drop_nulls().min() > 0
    [gap] = logged["dualform/gap"].drop_nulls()
    assert gap == dualform.open(tmp_path / "run").verify().frame["gap"].max()


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("FSDPStrategy", "FSDP"), ("DeepSpeedStrategy", "DeepSpeed")],
)
def test_parallel_strategies_are_refused_by_name(tmp_path, strategy, name):
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    trainer.strategy.__class__ = type(strategy, (type(trainer.strategy),), {})
    with pytest.raises(RecordingError, match=name):
        RecordTraining(tmp_path / "run").setup(trainer, Classifier(), "fit")
