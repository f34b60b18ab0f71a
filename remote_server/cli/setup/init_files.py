"""The files that `kvferry init` writes: settings, a unit or an overlay, and the engine's command.

Units and manifests are those of the repository's examples, with the sizes and paths of the answers
in them, so that what is tested there is what is written here.
"""

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from remote_server.cli.setup.init_answers import CPU, KUBERNETES, Answers
from remote_server.keys import SERVER_FILE, TENANTS_FILE
from remote_server.server.config import ServerConfig
from remote_server.server.settings import described
from remote_server.values import GiB, written_size

SETTINGS = "kvferry.toml"
COMMAND = "vllm.sh"
STEPS = "README.md"
KEYS = "keys"
TOKEN = "admin.token"

_TEMPLATES = files("remote_server.cli.setup") / "templates"

_BESIDE_MEMORY = 2 * GiB
"""For connections, Python, and reads from the disk."""

_WIDTH = 100


def rendered(answers: Answers, folder: Path) -> dict[str, str]:
    """The files to write, by their names below `folder`, an absolute path. Keys are not among
    them."""
    texts = {SETTINGS: _settings(answers, folder)}
    if answers.target == KUBERNETES:
        texts |= _overlay(answers)
    else:
        name = "kvferry@.service" if len(answers.hosts) > 1 else "kvferry.service"
        texts[name] = _unit(answers, folder, name)
    texts[COMMAND] = _command(answers, folder)
    texts[STEPS] = _steps(answers, folder, [*texts])
    return texts


# ── settings ─────────────────────────────────────────────────────────────────────────────


def _settings(answers: Answers, folder: Path) -> str:
    is_pod = answers.target == KUBERNETES
    place = "/run/kvferry" if is_pod else str(folder / KEYS)
    tenants = f"/etc/kvferry/keys/{TENANTS_FILE}" if is_pod else f"{place}/{TENANTS_FILE}"
    values: dict[str, str | float] = {
        "bind": answers.bind,
        "memory": written_size(answers.memory),
    }
    if answers.disk:
        values |= {"disk": answers.disk, "disk_bytes": written_size(answers.disk_bytes)}
    if answers.bucket:
        values["bucket"] = answers.bucket
    if answers.tenants:
        values |= {"keys": f"{place}/{SERVER_FILE}", "tenants": tenants}
    if is_pod:
        values |= {
            "admin": "http://0.0.0.0:5758",
            "admin_token_file": f"/etc/kvferry/keys/{TOKEN}",
            "drain_timeout_s": 20.0,
        }
    texts = described(ServerConfig)
    lines = [
        "# Settings of a cache server, from `kvferry init`. `kvferry serve --help` lists all;",
        f"# `kvferry serve --settings {SETTINGS} --print-config` prints those in force.",
    ]
    for name, value in values.items():
        about = textwrap.wrap(texts[name], _WIDTH - 2, break_on_hyphens=False)
        lines += ["", *(f"# {line}" for line in about), f"{name} = {json.dumps(value)}"]
    if len(answers.hosts) > 1 and not is_pod:
        lines += ["", "# A table for each server: `kvferry serve --name NAME` chooses one."]
        lines += [f"[servers.{one.name}]" for one in answers.servers().members]
    return "\n".join(lines) + "\n"


# ── systemd ──────────────────────────────────────────────────────────────────────────────


def _unit(answers: Answers, folder: Path, name: str) -> str:
    text = (_TEMPLATES / "systemd" / name).read_text()
    chosen = " --name %i" if "@" in name else ""
    program = shlex.join([str(Path(sys.executable).parent / "kvferry"), "serve"])
    settings = shlex.quote(str(folder / SETTINGS))
    text = _line(text, "ExecStart", f"{program} --settings {settings}{chosen}")
    limit = -(-(answers.memory + _BESIDE_MEMORY) // GiB)
    text = _line(text, "MemoryMax", f"{limit}G")
    if answers.disk:
        writable = f"ReadWritePaths={answers.disk}"
        text = text.replace("ProtectSystem=strict\n", f"ProtectSystem=strict\n{writable}\n")
    drain = f"{ServerConfig().drain_timeout_s:g} s, drain_timeout_s"
    return re.sub(r"drain_timeout_s, 10 s in [a-z.]+", drain, text)


def _line(text: str, name: str, value: str) -> str:
    """`text` with another value of `name`, which it has once."""
    found, number = re.subn(rf"^{name}=.*$", lambda _: f"{name}={value}", text, flags=re.MULTILINE)
    assert number == 1, name
    return found


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────


def _overlay(answers: Answers) -> dict[str, str]:
    folder = _TEMPLATES / "kubernetes"
    kustomization = (folder / "kustomization.yaml").read_text()
    kustomization = kustomization.replace("# kubectl apply -k examples/kubernetes\n",
                                          "# kubectl apply -k .\n")  # fmt: skip
    patches = "\npatches:\n  - path: sizes.yaml\n"
    texts = {"kvferry.yaml": (folder / "kvferry.yaml").read_text(), "sizes.yaml": _sizes(answers)}
    if answers.bucket:
        patches += "  - path: bucket.yaml\n"
        bucket = (folder / "bucket.yaml").read_text()
        texts["bucket.yaml"] = bucket.replace("s3://kv-cache/prod", answers.bucket)
    begin = kustomization.index("# A bucket below memory and disk:")
    end = kustomization.index("# Its name ends with a hash of the settings")
    kustomization = kustomization[:begin] + patches.lstrip() + "\n" + kustomization[end:]
    kustomization = re.sub(r"\n  # With the Prometheus operator:\n.*", "", kustomization)
    kustomization = kustomization.replace("README.md makes these", "`kvferry init` made these")
    return {"kustomization.yaml": kustomization, **texts}


def _sizes(answers: Answers) -> str:
    """The patch with the numbers of the answers."""
    limit = -(-(answers.memory + _BESIDE_MEMORY) // GiB)
    # The file system of a volume takes a part for itself.
    storage = -(-answers.disk_bytes * 100 // 95 // GiB) if answers.disk else 1
    return f"""\
# A patch: the number of servers, and the sizes of each. {SETTINGS} has their settings.
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: kvferry
spec:
  replicas: {len(answers.hosts)}
  template:
    spec:
      containers:
        - name: kvferry
          resources:
            requests:
              memory: {limit}Gi
            limits:
              memory: {limit}Gi
  volumeClaimTemplates:
    - metadata:
        name: disk
      spec:
        accessModes: ["ReadWriteOnce"]
        resources:
          requests:
            storage: {storage}Gi
"""


# ── the engine ───────────────────────────────────────────────────────────────────────────


def transfer_config(answers: Answers, folder: Path) -> dict[str, object]:
    """The value of vLLM's `--kv-transfer-config`."""
    key = ""
    if answers.tenants:
        place = "/etc/kvferry" if answers.target == KUBERNETES else folder / KEYS
        key = f"{place}/client-{answers.tenants[0]}.key"
    addresses = answers.addresses(key)
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": addresses[0] if len(addresses) == 1 else addresses,
            "cpu_pool": written_size(answers.pool),
        },
    }


def _command(answers: Answers, folder: Path) -> str:
    config = shlex.quote(json.dumps(transfer_config(answers, folder), indent=2))
    flags = "".join(
        f" \\\n  {flag}"
        for flag in (
            *(("--dtype bfloat16", "--kv-cache-memory-bytes 4294967296") * (answers.device == CPU)),
            f"--kv-transfer-config {config}",
            '"$@"',
        )
    )
    first = (
        "# vLLM pins the CPU pool: without this its copies to the GPU are slower.\n"
        "ulimit -l unlimited || echo 'vllm.sh: the limit of locked memory stays' >&2\n"
        if answers.device != CPU
        else "# 4 GiB of the host's memory are vLLM's own cache.\n"
    )
    return (
        "#!/bin/sh\n# An engine that uses the cache, written by `kvferry init`. "
        f"Arguments go to vLLM.\n{first}exec vllm serve {shlex.quote(answers.model)}{flags}\n"
    )


# ── the steps ────────────────────────────────────────────────────────────────────────────


def _steps(answers: Answers, folder: Path, names: list[str]) -> str:
    key = f"{folder / KEYS}/client-{answers.tenants[0]}.key" if answers.tenants else ""
    servers = ",".join(answers.addresses(key))
    about = {
        SETTINGS: "the settings of a server, each explained",
        COMMAND: "starts vLLM with the cache",
        "kvferry.service": "the unit of systemd",
        "kvferry@.service": "the unit of systemd, one for each server by its name",
        "kustomization.yaml": "what `kubectl apply -k` reads",
        "kvferry.yaml": "a StatefulSet and its Service",
        "sizes.yaml": "replicas, memory, storage",
        "bucket.yaml": "the bucket, and a drain into it before a pod ends",
    }
    rows = [f"- `{name}`: {about[name]}" for name in names]
    if answers.tenants or answers.target == KUBERNETES:
        rows.append(f"- `{KEYS}/`: secret. `server.*` and `tenants.toml` stay with the servers, "
                    "`client-NAME.key` goes to the engines of NAME")  # fmt: skip
    if answers.target == KUBERNETES:
        steps = _cluster_steps(answers)
    else:
        steps = _host_steps(answers, folder)
    steps += [
        f"Start the engine: `sh {COMMAND}`. It needs vLLM and kvferry in one environment: "
        "`pip install .` in a clone, or a wheel from `make wheel`.",
        f"Look: `export KVFERRY_SERVER='{servers}'`, then `kvferry doctor` and `kvferry top`.",
    ]
    numbered = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    return "\n".join(
        ["# kvferry", "", "Written by `kvferry init`, for you to keep and change.", "", *rows, "",
         "## Steps", "", *numbered, ""]
    )  # fmt: skip


def _host_steps(answers: Answers, folder: Path) -> list[str]:
    several = len(answers.hosts) > 1
    steps = []
    if answers.is_reachable:
        steps.append(f"Copy this folder to each server's host, as `{folder}`: "
                     f"{', '.join(answers.hosts)}. Engines' hosts get `vllm.sh` and "
                     f"`{KEYS}/client-NAME.key` at the same place.")  # fmt: skip
    names = ", ".join(f"`{one.name}`" for one in answers.servers().members)
    name = " --name NAME" if several else ""
    which = f", on each host with its name of {names}" if several else ""
    steps.append(f"Try it by hand{which}: `kvferry serve --settings {folder / SETTINGS}{name}`. It "
                 "is ready when it prints `kvferry ready on`.")  # fmt: skip
    unit = "kvferry@NAME" if several else "kvferry"
    keys = folder / KEYS
    own = [f"chown kvferry: {keys}/server.* {keys}/{TENANTS_FILE}", f"chmod 711 {keys}"]
    own = own if answers.tenants else []
    disk = [f"install -d -o kvferry -g kvferry -m 0700 {answers.disk}"] if answers.disk else []
    commands = "; ".join(["id kvferry || useradd --system kvferry", *own, *disk,
                          f"cp {folder}/kvferry*.service /etc/systemd/system/",
                          f"systemctl enable --now {unit}"])  # fmt: skip
    steps.append(f"Keep it running, as root: `{commands}`.")
    if hidden := [path for path in (folder, Path(sys.executable)) if _is_hidden(path)]:
        which = " and ".join(map(str, hidden))
        steps[-1] += (f" First move what is in {which} to a place that a service sees, such as "
                      "/etc/kvferry and /opt.")  # fmt: skip
    return steps


def _is_hidden(path: Path) -> bool:
    """Whether a unit with PrivateTmp, or another user, does not see it."""
    return any(Path(above) in path.parents for above in ("/root", "/home", "/tmp", "/var/tmp"))


def _cluster_steps(answers: Answers) -> list[str]:
    return [
        "Build the image, as examples/container/README.md of the repository describes, and set its "
        "name in `kvferry.yaml`.",
        *(
            ["Make the Secret `kvferry-bucket` with the bucket's credentials."]
            * bool(answers.bucket)
        ),
        "Start the servers: `kubectl apply -k .`",
        "Give the engines their key: `kubectl create secret generic kvferry-client "
        f"--from-file={KEYS}/client-{answers.tenants[0]}.key`, mounted at `/etc/kvferry`.",
    ]


def summary(answers: Answers, texts: Mapping[str, str], folder: Path) -> list[str]:
    """Lines for people after the files are written."""
    made = [*texts, *([f"{KEYS}/"] if answers.tenants else [])]
    return [
        f"{folder}: {', '.join(made)}",
        f"next: {folder / STEPS} has the steps; the first engine is `sh {folder / COMMAND}`",
    ]
