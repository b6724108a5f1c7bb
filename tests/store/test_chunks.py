import torch

from dualform.store import chunks
from dualform.store.chunks import EqualKeys
from dualform.store.encoding import encode


def test_equal_keys_get_one_number_and_new_ones_the_next():
    keys = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    for dtype in ("float16", "float32"):
        equal = EqualKeys(10)
        numbers, new = equal.number(encode(keys, dtype))
        assert numbers.tolist() == [10, 11, 10]
        assert new.tolist() == [0, 1]
        numbers, new = equal.number(encode(keys[1:], dtype))
        assert numbers.tolist() == [11, 10]
        assert new.tolist() == []
        assert equal.stored == 12


def test_keys_that_differ_by_their_exponent_only_are_two():
    keys = encode(torch.tensor([[1.0, 2.0], [2.0, 4.0]]), "float16")
    assert torch.equal(keys.data[0], keys.data[1])
    assert EqualKeys().number(keys)[0].tolist() == [0, 1]


def test_no_keys():
    assert EqualKeys().number(encode(torch.zeros(0, 3), "float16"))[0].tolist() == []


def test_stored_keys_keep_their_numbers_when_they_are_learned_again():
    keys = encode(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [5.0, 6.0]]), "float16")
    equal = EqualKeys(14)
    equal.learn(keys, 10)
    numbers, new = equal.number(encode(torch.tensor([[5.0, 6.0], [7.0, 8.0], [1.0, 2.0]]), "float16"))
    assert numbers.tolist() == [13, 14, 10]
    assert new.tolist() == [1]


def test_keys_that_never_come_again_are_no_longer_compared(monkeypatch):
    monkeypatch.setattr(chunks, "PATIENCE", 100)
    equal = EqualKeys()
    keys = encode(torch.randn(200, 3), "float16")
    assert equal.number(keys)[0].tolist() == list(range(200))
    numbers, new = equal.number(keys)
    assert numbers.tolist() == list(range(200, 400))
    assert new.tolist() == list(range(200))
