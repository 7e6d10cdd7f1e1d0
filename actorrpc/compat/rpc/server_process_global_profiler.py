"""``torch.distributed.rpc.server_process_global_profiler``: profiling what other workers call here."""

from __future__ import annotations

from torch.autograd.profiler_legacy import profile

__all__: list[str] = []


class _server_process_global_profile(profile):
    """Profiles what runs in the thread that enters it."""
