#!/bin/sh
# Writes the stubs (_pb2.py, .pyi, _pb2_grpc.py) of control.proto and of the coordinator's journal.proto; `make stubs`,
# and CI fails when they are stale.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. rlhf_common/control.proto
cd ../coordinator
"${PYTHON:-python}" -m grpc_tools.protoc -I . -I ../common --python_out=. --mypy_out=. rlhf_coordinator/storage/journal.proto
