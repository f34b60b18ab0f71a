"""Write which names of `kv_connector.vllm.names` this Python's vLLM has to
`tests/kv_connector/vllm/vllm_0.33.json`, or whatever its release line is:
`python .ci/names_of_vllm.py`.
"""

import json
from pathlib import Path

from kv_connector.vllm.names import NAMES
from kv_connector.vllm.support import installed, missing_names

ROOT = Path(__file__).resolve().parents[1]

found = installed()
assert found is not None, "no vLLM here"
version, package = found
lacking = {name for name, _ in missing_names(package, NAMES)}
names = {f"{module}.{name}" for module, members in NAMES.items() for name in members}
listed = {"vllm": version, "has": sorted(names - lacking)}
line = ".".join(version.split(".")[:2])
file = ROOT / "tests" / "kv_connector" / "vllm" / f"vllm_{line}.json"
file.write_text(json.dumps(listed, indent=1) + "\n")
