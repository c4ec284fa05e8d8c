#!/bin/sh
# Writes control_pb2.py, .pyi and control_pb2_grpc.py from control.proto; `make stubs`, and CI fails when they are stale.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. rlhf_api/control.proto
