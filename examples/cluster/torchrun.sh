#!/bin/sh
# On every host, with the same arguments. NNODES may be a range (1:4): a group that is restarted comes back as a new one.
# On more than one host, ACTORRPC_KEY_FILE must name a file with the same key on each (actorrpc key FILE).
exec torchrun \
    --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-1}" \
    --rdzv-backend c10d --rdzv-id pi --rdzv-endpoint "${HEAD:-localhost:29400}" \
    "$(dirname "$0")/pi.py" "$@"
