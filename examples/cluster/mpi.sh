#!/bin/sh
# mpirun is only the launcher here: ranks are read from its variables, and MPI itself is not used.
# MASTER_ADDR is the host of rank 0; on more than one host all need the same key. -x sends variables, and not their values.
: "${ACTORRPC_KEY:=$(openssl rand -hex 32)}"
MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=${MASTER_PORT:-29500}
export ACTORRPC_KEY MASTER_ADDR MASTER_PORT
exec mpirun -np "${NP:-4}" -x ACTORRPC_KEY -x MASTER_ADDR -x MASTER_PORT python "$(dirname "$0")/pi.py" "$@"
