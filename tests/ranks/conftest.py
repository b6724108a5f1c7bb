import pytest

from two_ranks import TwoRanks


@pytest.fixture(scope="session")
def ranks():
    """Two processes that train together."""
    pool = TwoRanks()
    yield pool
    pool.close()
