import torch

from dualform.store.encoding import encode
from dualform.store.equal import EqualKeys


def test_equal_keys_get_one_number_and_new_ones_the_next():
    keys = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    for dtype in ("float16", "float32"):
        equal = EqualKeys(10)
        numbers, new = equal.number(encode(keys, dtype), may_repeat=True)
        assert numbers.tolist() == [10, 11, 10]
        assert new.tolist() == [0, 1]
        numbers, new = equal.number(encode(keys[1:], dtype), may_repeat=True)
        assert numbers.tolist() == [11, 10]
        assert new.tolist() == []
        assert equal.stored == 12


def test_keys_that_differ_by_their_exponent_only_are_two():
    keys = encode(torch.tensor([[1.0, 2.0], [2.0, 4.0]]), "float16")
    assert torch.equal(keys.data[0], keys.data[1])
    assert EqualKeys().number(keys, may_repeat=True)[0].tolist() == [0, 1]


def test_no_keys():
    assert EqualKeys().number(encode(torch.zeros(0, 3), "float16"), may_repeat=True)[0].tolist() == []
