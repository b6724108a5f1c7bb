"""One compiled loop against the plain way: encode_all, and products in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dualform.native.kernels import kernels
from dualform.record.parameters import RecordedParameter
from dualform.record.slot_loop import LoopPlan, SlotLoop, Slots
from dualform.store.encoding import EncodeRequest, decode, encode_all
from dualform.store.memory import Pool

pytestmark = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")


def drawn(count: int, d_in: int, d_out: int, k: int, seed: int = 0, spread: float = 3.0) -> Any:
    """Keys and error signals of very different sizes, some of them zero."""
    make = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, d_in, generator=make).relu() * 10 ** (spread * torch.randn(count, 1, generator=make))
    errors = torch.randn(count, d_out, generator=make) * 10 ** (spread * torch.randn(count, 1, generator=make))
    for vectors in (keys, errors):
        vectors[torch.rand(count, generator=make) < 0.2] = 0
    random = torch.randint(0, 2, (k, d_in), generator=make).mul(2).sub(1).float().T
    return keys, errors, random


def slots(keys: Any, errors: Any, random: Any, kept: bool = True) -> Slots:
    weight = RecordedParameter(0, "weight", nn.Parameter(torch.zeros(errors.shape[1], keys.shape[1])), 0, vector=False)
    bias = RecordedParameter(1, "bias", nn.Parameter(torch.zeros(errors.shape[1])), 0, vector=True)
    weight.random, weight.columns = random, random.shape[1]
    return Slots(keys, errors, LoopPlan(weight, bias, "key", "error", kept))


def taken(keys: Any, errors: Any, random: Any, dtype: str = "float16", kept: bool = True) -> Slots:
    found = slots(keys, errors, random, kept)
    assert SlotLoop(dtype, Pool()).take([found])
    assert found.taken
    assert found.key_copy is not None
    return found


@settings(deadline=None)
@given(
    count=st.integers(0, 40),
    d_in=st.integers(1, 70),
    d_out=st.integers(1, 70),
    k=st.integers(1, 3),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_it_stores_and_adds_what_the_plain_way_does(
    count: int, d_in: int, d_out: int, k: int, seed: int, spread: float
) -> None:
    keys, errors, random = drawn(count, d_in, d_out, k, seed, spread)
    found = taken(keys, errors, random)
    plain = encode_all([EncodeRequest(keys, as_they_are=True), EncodeRequest(errors)], "float16")
    for mine, theirs, vectors in zip((found.key_copy, found.error_copy), plain, (keys, errors), strict=True):
        assert mine is not None
        assert mine.exponents is not None
        assert theirs.exponents is not None
        # A norm that is a power of two to rounding may go either way
        same = mine.exponents == theirs.exponents
        assert (same | ((mine.exponents - theirs.exponents).abs() == 1)).all()
        assert torch.equal(mine.data[same], theirs.data[same])
        back, norms = decode(mine.data, mine.exponents, torch.float32), vectors.norm(dim=1, keepdim=True)
        assert ((back - vectors).norm(dim=1, keepdim=True) <= 1e-3 * norms).all()
    keys, errors, random = keys.double(), errors.double(), random.double()
    projected = keys @ random
    wanted = torch.cat([projected, keys.new_ones(count, 1)], 1).T @ errors
    bound = torch.cat([keys.abs() @ random.abs(), keys.new_ones(count, 1)], 1).T @ errors.abs()
    size, seen, whole = (float(vectors.norm()) for vectors in (errors, projected, keys))
    scales = size * max(seen, whole), size * count**0.5
    parts = (wanted[:-1].T, bound[:-1].T, scales[0]), (wanted[-1:].T, bound[-1:].T, scales[1])
    for (_, added, scale), (its_wanted, its_bound, its_scale) in zip(found.added(), parts, strict=True):
        assert (torch.from_numpy(added).view(its_wanted.shape) - its_wanted).abs().le(1e-5 * its_bound).all()
        assert scale == pytest.approx(its_scale, rel=1e-4, abs=1e-5 * size * whole)


@pytest.mark.parametrize("kept", [True, False])
def test_it_tells_which_error_signals_are_zero(kept: bool) -> None:
    keys, errors, random = drawn(300, 40, 50, 1)
    errors[7] = torch.finfo(torch.float32).tiny  # its square vanishes
    found = taken(keys, errors, random, kept=kept)
    assert found.silent is not None
    assert found.silent.tolist() == [not row.any() for row in errors.numpy()]
    assert 0 < found.silent.sum() < 300


def test_flags_of_an_earlier_call_are_forgotten() -> None:
    keys, errors, random = drawn(20, 4, 3, 1)
    call, taker = slots(keys, errors, random), SlotLoop("float32", Pool())
    assert taker.take([call])
    assert call.silent is not None
    call.errors = torch.ones_like(errors)
    assert taker.take([call])
    assert call.silent is None


def test_every_float16_is_rounded_as_pytorch_does() -> None:
    exact = torch.arange(0, 2**15 - 1024, dtype=torch.int16).view(torch.float16).float()
    halfway = (exact[1:] + exact[:-1]) / 2
    around = torch.cat([torch.nextafter(halfway, torch.tensor(0.0)), halfway, torch.nextafter(halfway, halfway + 1)])
    numbers = torch.cat([exact, around])
    numbers = numbers[numbers < 2**15 - 16]
    numbers = torch.cat([numbers, -numbers])
    keys = torch.stack([numbers, torch.full_like(numbers, 1.0)], 1)  # norms from 1 to 2¹⁵: stored as they are
    found = taken(keys, torch.ones(len(keys), 1), torch.ones(1, 2).T)
    assert found.key_copy is not None
    assert found.key_copy.exponents is not None
    assert not found.key_copy.exponents.any()
    assert torch.equal(found.key_copy.data, keys.half())


def test_float32_is_copied_as_it_is() -> None:
    keys, errors, random = drawn(20, 30, 7, 2)
    found = taken(keys, errors, random, "float32")
    assert found.key_copy is not None
    assert found.error_copy is not None
    assert torch.equal(found.key_copy.data, keys)
    assert torch.equal(found.error_copy.data, errors)
    assert found.key_copy.exponents is None


def test_error_signals_may_be_left_out() -> None:
    keys, errors, random = drawn(20, 30, 7, 2)
    found = taken(keys, errors, random, kept=False)
    assert found.error_copy is None
    assert all(added.any() for _, added, _ in found.added())


@pytest.mark.parametrize(
    "odd",
    [
        lambda keys, errors: (keys.double(), errors.double()),
        lambda keys, errors: (keys.T.contiguous().T, errors),
        lambda keys, errors: (keys, errors[::2].repeat_interleave(2, 0).T.contiguous().T),
        lambda keys, errors: (keys.index_fill(0, torch.tensor(3), torch.inf), errors),
        lambda keys, errors: (keys, errors.index_fill(0, torch.tensor(3), torch.nan)),
        lambda keys, errors: (keys, errors.index_fill(0, torch.tensor(3), 1e30)),
    ],
    ids=["float64", "keys not in rows", "error signals not in rows", "infinite", "not a number", "huge"],
)
def test_what_it_cannot_take_is_left_to_the_plain_way(odd: Any) -> None:
    keys, errors, random = drawn(20, 30, 7, 1, spread=0)
    pool = Pool()
    calls = [slots(keys, errors, random), slots(*odd(keys, errors), random), slots(2 * keys, errors, random)]
    assert not SlotLoop("float16", pool).take(calls)
    before, odd_one, after = calls
    assert not odd_one.taken
    pool._take_back()
    for copy in (odd_one.key_copy, odd_one.error_copy):
        assert copy is None or (copy.slab is not None and copy.slab.out == 2)  # nothing was kept of it
    assert before.taken
    assert after.taken
    for (_, once, _), (_, twice, _) in list(zip(before.added(), after.added(), strict=True))[:1]:
        assert twice == pytest.approx(2 * once)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_calls_of_all_sizes_are_taken_together_as_each_alone(threads: int, dtype: str) -> None:
    sizes = [(1, 5, 3, 1), (128, 300, 90, 1), (0, 4, 4, 2), (61, 40, 7, 3), (9, 784, 10, 2)]
    given = [drawn(*size, seed=seed) for seed, size in enumerate(sizes)]
    together = [slots(*one) for one in given]
    SlotLoop(dtype, Pool()).take(together)
    alone = [taken(*one, dtype) for one in given]
    for one, other in zip(together, alone, strict=True):
        assert one.taken
        for mine, theirs in ((one.key_copy, other.key_copy), (one.error_copy, other.error_copy)):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine.data, theirs.data)
            assert mine.exponents is theirs.exponents is None or torch.equal(mine.exponents, theirs.exponents)
        for (_, mine, scale), (_, theirs, its_scale) in zip(one.added(), other.added(), strict=True):
            assert mine == pytest.approx(
                theirs, rel=1e-6, abs=1e-5 * float(one.errors.norm()) * (1 + float(one.keys.norm()))
            )
            assert scale == pytest.approx(its_scale, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_calls_that_come_together_again_share_memory_that_comes_back(threads: int, dtype: str) -> None:
    """… whatever comes between: another number of slots, other calls, calls of different lengths."""
    pool = Pool(slab_bytes=1 << 16)
    taker = SlotLoop(dtype, pool)
    layers = [drawn(12, width, outputs, 1, seed=width) for width, outputs in ((40, 7), (7, 5), (5, 3))]
    hows = [slots(*one).how for one in layers]
    generator = torch.Generator().manual_seed(0)
    copies = set()
    out: list[list[Slots]] = []
    for number in range(200):
        chosen = [0, 1, 2] if number % 17 else [2, 0]
        counts = [12, 12, 12] if number % 13 else [12, 5, 12]
        calls = []
        for place in chosen:
            keys, errors, _ = layers[place]
            count = 7 if number % 29 == 0 else counts[place]
            shift = torch.rand(1, generator=generator)
            calls.append(Slots(keys[:count] + shift, errors[:count] - shift, hows[place], may_repeat=place == 0))
        assert taker.take(calls)
        copies.add(calls[0].key_copy.data.data_ptr())
        out.append(calls)
        for done in out[:-5] if number % 3 else []:
            for call in done:
                taker.give_back(call)
        out = out[-5:] if number % 3 else out
        for call in [call for some in out for call in some]:  # nobody else writes to what was not given back
            alone = taken(call.keys, call.errors, call.how.weight.random, dtype)
            for mine, its in ((call.key_copy, alone.key_copy), (call.error_copy, alone.error_copy)):
                assert mine is not None
                assert its is not None
                assert torch.equal(mine.data, its.data)
                assert mine.exponents is its.exponents is None or torch.equal(mine.exponents, its.exponents)
    assert len(copies) < 150
