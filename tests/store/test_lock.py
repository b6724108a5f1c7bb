"""The lock on a store's folder, where the interpreter ends."""

import pytest

from dualform.store import lock as lock_module
from dualform.store.files import files_at
from dualform.store.lock import FolderLock


@pytest.mark.parametrize("is_released", [True, False])
def test_a_lock_that_outlives_its_module_raises_nothing(tmp_path, monkeypatch, is_released):
    """Python sets the global variables of modules to None when it ends, and prints what __del__ raises."""
    lock = FolderLock(files_at(tmp_path / "run"))
    if is_released:
        lock.release()
    with monkeypatch.context() as patch:
        for name in [name for name in vars(lock_module) if not name.startswith("__")]:
            patch.setattr(lock_module, name, None)
        lock.__del__()
    lock.release()
