#!/bin/sh
# The source's `validate.sh`: `python -m benchmarks.storage_workload validate` from any folder.
exec python3 "$(dirname "$0")/kv-cache.py" validate "$@"
