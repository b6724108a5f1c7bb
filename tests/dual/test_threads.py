import pytest
import torch

from dualform.dual.threads import shared_out


@pytest.fixture
def four():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def threads():
    """As PyTorch, OpenMP and the library that multiplies matrices say, in the thread that asks."""
    said = torch.__config__.parallel_info().splitlines()
    return {int(line.split(":")[-1]) for line in said if "get_num_threads" in line or "get_max_threads" in line}


@pytest.mark.parametrize(("workers", "share"), [(2, 2), (3, 1), (4, 1), (8, 1)])
def test_the_workers_share_the_threads_of_pytorch(four, workers, share):
    with shared_out(workers) as pool:
        assert {*pool.submit(threads).result(), *threads()} == {share}
    assert threads() == {4}


def test_they_are_given_back_after_an_error(four):
    with pytest.raises(ZeroDivisionError), shared_out(2) as pool:
        pool.submit(lambda: 1 // 0).result()
    assert threads() == {4}
