"""The example of docs/language.md for Transformers is run as it stands."""

import re
from pathlib import Path

import pytest
import torch

import documents
import dualform

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "language.md"


def test_the_example_finds_the_document(tmp_path, monkeypatch, capsys):
    section = PAGE.read_text().partition("## Transformers: which documents")[2]
    example = re.search(r"```python\n(.*?)```", section, flags=re.DOTALL).group(1)
    assert len(example.strip().splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    tokenizer = documents.make_tokenizer()
    model = documents.make_model("gpt2", len(tokenizer))
    names = {
        "dualform": dualform,
        "torch": torch,
        "texts": documents.DOCUMENTS,
        "tokenizer": tokenizer,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    exec(example, names)
    assert names["found"].texts[0] == documents.DOCUMENTS[0]
    assert documents.DOCUMENTS[0] in capsys.readouterr().out
