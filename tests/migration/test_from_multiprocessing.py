"""The rows of docs/migration/from-multiprocessing.md that no test elsewhere is marked with."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

import actorrpc
from actorrpc import get
from tests.announced import LAST_WORDS
from tests.cluster.drive import script
from tests.migration.rows import row


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
@pytest.mark.prints(LAST_WORDS)  # may be printed during a later test
class TestProcesses:
    """Rows that need processes."""

    @row('set_start_method("fork")', "from-multiprocessing")
    @row("init() starts a head node", "from-ray")
    def test_workers_are_forked_from_a_child_with_torch_and_a_single_thread(self) -> None:
        [parent] = {psutil.Process(get(actorrpc.remote(os.getppid).remote())) for _ in range(2)}
        assert parent.ppid() == os.getpid()
        assert parent.num_threads() == 1
        assert any("libtorch" in each.path for each in parent.memory_maps())
        assert not any("/dev/nvidia" in each.path for each in parent.open_files())


@pytest.mark.slow
@row('if __name__ == "__main__":', "from-multiprocessing")
@row("Queue(maxsize=2)", "from-multiprocessing")
def test_a_script_needs_no_main_guard_and_ends_with_unread_queue_items(tmp_path: Path) -> None:
    source = """
        import actorrpc
        print("here", flush=True)
        actorrpc.init()
        queue = actorrpc.Queue()
        actorrpc.get(actorrpc.remote(lambda queue: queue.put(bytes(1 << 22))).remote(queue))
        """
    with script(tmp_path, source) as process:
        out, _ = process.communicate(timeout=50)
    assert (process.returncode, out) == (0, "here\n")
