"""Trains by a Trainer or by Lightning on each of the ranks that torchrun starts: `on_two_ranks.py {trainer|lightning} FOLDER`.

Each rank writes into `seen-RANK.json` which samples its model was trained on, forward pass by forward pass.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def by_trainer(folder):
    from test_trainer import Seen, make_trainer

    from dualform.integrations.transformers import record

    trainer = make_trainer(folder, gradient_accumulation_steps=2, logging_steps=1)
    seen = Seen(trainer.model)
    record(
        trainer, folder / "run", columns=["text"] if "text" in trainer.train_dataset.column_names else [], verify=True
    ).train()
    texts = trainer.train_dataset["input_ids"][:]
    assert "dualform/gap" in trainer.state.log_history[-1]
    return trainer.args.process_index, [texts.index(row) for batch in seen.batches for row in batch]


def by_lightning(folder):
    from test_lightning import Classifier, DataLoader, RecordTraining, Rows, Trainer

    model = Classifier()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RecordTraining(folder / "run")],
    )
    trainer.fit(model, DataLoader(Rows(), batch_size=4, shuffle=True))
    return trainer.global_rank, model.seen


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    rank, samples = {"trainer": by_trainer, "lightning": by_lightning}[sys.argv[1]](folder)
    (folder / f"seen-{rank}.json").write_text(json.dumps(samples))
