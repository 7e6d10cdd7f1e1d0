#!/bin/sh
# On every host, with the same arguments. NNODES may be a range (1:4): a group that is restarted comes back as a new one.
# Without the variable below, torchrun of torch 2.13 waits 60 s for MASTER_ADDR and then fails when a host comes back to a range.
# On more than one host, ACTORRPC_KEY_FILE must name a file with the same key on each (actorrpc key FILE).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-1}" \
    --rdzv-backend c10d --rdzv-id pi --rdzv-endpoint "${HEAD:-localhost:29400}" \
    "$(dirname "$0")/pi.py" "$@"
