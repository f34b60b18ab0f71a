#!/bin/sh
# The source's `kv-cache-wrapper.sh`: `python -m benchmarks.storage_workload suite` from any folder.
exec python3 "$(dirname "$0")/kv-cache.py" suite "$@"
