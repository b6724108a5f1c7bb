"""Weights in files, as people save and publish them."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from dualform.checkpoints import read_checkpoint
from dualform.errors import DataError

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def assert_read(path, expected=WEIGHTS):
    found = read_checkpoint(path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_safetensors(tmp_path):
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    assert_read(tmp_path / "w.safetensors")
    assert_read(str(tmp_path / "w.safetensors"))


@pytest.mark.parametrize("within", [None, "state_dict", "model_state_dict", "model", "module"])
def test_a_file_of_pytorch(tmp_path, within):
    content = WEIGHTS if within is None else {within: WEIGHTS, "step": 7, "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "w.pt")
    assert_read(tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_hugging_face(tmp_path, name):
    save = save_file if name.endswith("safetensors") else torch.save
    save(WEIGHTS, tmp_path / name)
    assert_read(tmp_path)


def test_a_folder_with_several_files(tmp_path):
    files = {"a.weight": "one.safetensors", "a.bias": "two.safetensors"}
    for name, file in files.items():
        save_file({name: WEIGHTS[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert_read(tmp_path)


def test_a_folder_names_no_file_elsewhere(tmp_path):
    save_file(WEIGHTS, tmp_path / "secret.safetensors")
    (tmp_path / "folder").mkdir()
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(DataError, match=r"folder/secret.safetensors"):
        read_checkpoint(tmp_path / "folder")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("was-here",)


def test_no_code_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Malicious()}, tmp_path / "w.pt")
    with pytest.raises(DataError, match=r"w.pt cannot be read: UnpicklingError"):
        read_checkpoint(tmp_path / "w.pt")
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.pt", b"nothing", "cannot be read"),
        ("w.safetensors", b"nothing", "cannot be read as safetensors"),
        ("model.safetensors.index.json", b"[]", "names no files"),
        ("other.txt", b"", "holds no checkpoint"),
    ],
)
def test_what_is_no_checkpoint(tmp_path, name, content, message):
    path = tmp_path / "here"
    path.mkdir()
    (path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_checkpoint(path / name if name.startswith("w.") else path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match="there is no such checkpoint"):
        read_checkpoint(tmp_path / "w.pt")


def test_a_file_without_tensors(tmp_path):
    torch.save({"a": 1}, tmp_path / "w.pt")
    with pytest.raises(DataError, match="holds no state dict"):
        read_checkpoint(tmp_path / "w.pt")
