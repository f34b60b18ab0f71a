"""The example for Kubernetes is true: fields that exist, names that meet, settings that are valid.

`schemas/kubernetes-1.34.json` has the definitions of the kinds used here and of all that they
refer to, from the OpenAPI document of Kubernetes (Apache-2.0), without descriptions. Unknown fields
are errors in it.
"""

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from admin_http import served, write_token
from deployment_fixtures import REPOSITORY
from test_examples_of_services import BESIDE_DRAIN_S, BESIDE_MEMORY, settings_of
from typed_commands import flags_of

from remote_server.admin.site import _OPEN
from remote_server.fleet.server_list import read_list
from remote_server.keys import certificate_path, make_keys
from remote_server.server.config import ServerConfig
from remote_server.values import admin_address, parse_bytes

pytestmark = pytest.mark.real_time

EXAMPLE = REPOSITORY / "examples" / "kubernetes"
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "kubernetes-1.34.json").read_text())
KINDS = {
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("policy/v1", "PodDisruptionBudget"): "io.k8s.api.policy.v1.PodDisruptionBudget",
    ("apps/v1", "StatefulSet"): "io.k8s.api.apps.v1.StatefulSet",
}

Object = dict[str, Any]


class StrictLoader(yaml.SafeLoader):
    """YAML of which no mapping has a key twice."""


def _mapping(loader: StrictLoader, node: yaml.MappingNode) -> Object:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len({*keys}), f"a key is there twice: {keys}"
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in
            zip(keys, node.value, strict=True)}  # fmt: skip


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def objects_of(name: str, *, uncommented: bool = False) -> list[Object]:
    text = (EXAMPLE / name).read_text()
    if uncommented:
        text = re.sub(r"^( *)#   (.*)$", r"\1\2", text, flags=re.MULTILINE)
    return list(yaml.load_all(text, StrictLoader))


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge of the parts that are used here: mappings, and lists by `name`."""
    if isinstance(base, dict):
        return base | {k: merged(base.get(k), v) if k in base else v for k, v in patch.items()}
    if isinstance(base, list) and base and isinstance(base[0], dict):
        by_name = {one["name"]: one for one in base}
        return [*(merged(by_name.pop(new["name"], new), new) for new in patch), *by_name.values()]
    return patch


BASE = {one["kind"]: one for one in objects_of("kvferry.yaml")}
(BUCKET,) = objects_of("bucket.yaml")
(MONITOR,) = objects_of("service_monitor.yaml")
(KUSTOMIZATION,) = objects_of("kustomization.yaml")
STATEFUL_SETS = {"alone": BASE["StatefulSet"], "with a bucket": merged(BASE["StatefulSet"], BUCKET)}


@pytest.fixture(params=STATEFUL_SETS)
def stateful_set(request) -> Object:
    return STATEFUL_SETS[request.param]


@pytest.fixture
def pod(stateful_set: Object) -> Object:
    spec: Object = stateful_set["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: Object) -> Object:
    (one,) = pod["containers"]
    return one


def settings_in(container: Object) -> ServerConfig:
    """The settings of a pod, read as its command reads them."""
    mounted = {f"/etc/kvferry/settings/{name}": str(EXAMPLE / name) for name in files("settings")}
    command, *arguments = (mounted.get(word, word) for word in container["args"])
    assert command == "serve"
    given = {entry["name"]: entry["value"] for entry in container.get("env", [])}
    return settings_of(arguments, given)


def files(kind: str) -> dict[str, str]:
    """Of a generated ConfigMap or Secret: the path of each of its keys."""
    generators = {"settings": "configMapGenerator", "keys": "secretGenerator"}
    (one,) = KUSTOMIZATION[generators[kind]]
    assert one["name"] == f"kvferry-{kind}"
    return {Path(path).name: path for path in one["files"]}


# ── objects ──────────────────────────────────────────────────────────────────────────────


def errors_in(manifest: Object) -> list[str]:
    kind = KINDS[manifest["apiVersion"], manifest["kind"]]
    validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@pytest.mark.parametrize("manifest", [*BASE.values(), STATEFUL_SETS["with a bucket"]])
def test_every_object_has_the_fields_of_its_kind_and_no_other(manifest: Object):
    assert errors_in(manifest) == []


def test_selectors_match_labels_and_ports_match_names(stateful_set: Object, container: Object):
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    service, budget = BASE["Service"], BASE["PodDisruptionBudget"]
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert stateful_set["spec"]["selector"]["matchLabels"] == labels
    assert MONITOR["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert stateful_set["spec"]["serviceName"] == service["metadata"]["name"]
    open_ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in service["spec"]["ports"]:
        assert open_ports[port["targetPort"]] == port["port"]
    names = {port["name"] for port in service["spec"]["ports"]}
    assert {one["port"] for one in MONITOR["spec"]["endpoints"]} <= names


def test_the_list_of_the_readme_is_the_pods_by_their_names(stateful_set: Object):
    (setting,) = re.findall(r'"server": "(tcp:[^"]+)"', (EXAMPLE / "README.md").read_text())
    members = read_list(setting).members
    name, service = stateful_set["metadata"]["name"], BASE["Service"]["metadata"]["name"]
    pods = [f"{name}-{number}" for number in range(stateful_set["spec"]["replicas"])]
    assert [one.name for one in members] == pods
    assert [one.endpoint for one in members] == [f"tcp://{pod}.{service}:5757" for pod in pods]


def test_the_kustomization_names_files_that_are_there(tmp_path: Path):
    (whole,) = objects_of("kustomization.yaml", uncommented=True)
    named = {*whole["resources"], *(one["path"] for one in whole["patches"])}
    assert named == {"kvferry.yaml", "service_monitor.yaml", "bucket.yaml"}
    named |= {*files("settings").values()}
    assert [name for name in named if not (EXAMPLE / name).exists()] == []
    make_keys(tmp_path / "keys", ["team-a"])
    made = {path.name for path in (tmp_path / "keys").iterdir()} | {"admin.token"}
    assert {Path(name).name for name in files("keys").values()} <= made
    assert "keys/" in (EXAMPLE / ".gitignore").read_text().split()


# ── the server in the pod ────────────────────────────────────────────────────────────────


def test_the_settings_are_valid_and_the_ports_are_those_of_the_container(container: Object):
    config = settings_in(container)
    open_ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.bind == f"tcp://0.0.0.0:{open_ports['blocks']}"
    address = admin_address(config.admin)
    assert address is not None
    assert (address.host, address.port) == ("0.0.0.0", open_ports["admin"])


def test_every_file_that_the_settings_name_is_mounted(pod: Object, container: Object):
    config = settings_in(container)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]} | {"disk"}
    for place in (pod["initContainers"][0], container):
        assert {mount["name"] for mount in place["volumeMounts"]} <= volumes
    for path in (config.tenants, config.admin_token_file):
        folder, _, name = path.rpartition("/")
        assert mounts[folder]["name"] == "keys" and name in files("keys")
    disk = mounts[str(Path(config.disk).parent)]
    assert disk["name"] == "disk" and not disk.get("readOnly")


def test_the_secret_files_are_copied_to_files_of_the_servers_user(pod: Object, container: Object):
    """Kubernetes mounts a Secret as root's, readable by the pod's group, which the server
    refuses."""
    program, *options, key, certificate, folder = pod["initContainers"][0]["command"]
    assert (program, options) == ("install", ["-m", "0400"])
    secrets = [settings_in(container).keys, certificate_path(settings_in(container).keys)]
    for source, target in zip((key, certificate), secrets, strict=True):
        name = source.removeprefix("/etc/kvferry/keys/")
        assert name in files("keys")
        assert target == f"{folder}/{name}"
    (keys,) = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
    # Others cannot read it, and nothing but root can write it: tenants are refused otherwise.
    assert keys["secret"]["defaultMode"] & 0o227 == 0
    assert pod["securityContext"]["runAsUser"] == 5757, "the user of the container file"
    assert "--uid 5757" in (REPOSITORY / "examples/container/Containerfile").read_text()


def test_the_grace_period_is_longer_than_the_drain(pod: Object, container: Object):
    grace_s = pod["terminationGracePeriodSeconds"]
    assert grace_s >= settings_in(container).drain_timeout_s + BESIDE_DRAIN_S
    if "lifecycle" in container:
        assert grace_s >= 600, "a drain into the bucket takes minutes"


def test_memory_and_disk_fit(stateful_set: Object, container: Object):
    config = settings_in(container)
    limit = parse_bytes(container["resources"]["limits"]["memory"] + "B", "limit")
    assert limit >= config.memory + BESIDE_MEMORY
    (claim,) = stateful_set["spec"]["volumeClaimTemplates"]
    size = parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B", "storage")
    assert config.disk_bytes <= 0.96 * size, "ext4 needs its part"
    assert f'disk = "{config.disk_bytes >> 30}GiB"' in (EXAMPLE / "README.md").read_text()


def test_a_patched_pod_has_the_bucket_and_drains_into_it_first():
    (container,) = STATEFUL_SETS["with a bucket"]["spec"]["template"]["spec"]["containers"]
    config = settings_in(container)
    assert config.bucket == "s3://kv-cache/prod"
    program, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "kvferry"
    name, *rest = arguments
    flags = flags_of(name, rest)
    assert name == "drain" and flags.to_bucket
    assert flags.admin_token_file == config.admin_token_file
    address = admin_address(flags.admin)
    assert address is not None and address.port == 5758


PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@contextlib.contextmanager
def answers(url: str, token: str = "") -> Iterator[int]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
        yield reply.status


def test_probes_and_the_monitor_ask_paths_that_a_server_answers(container: Object, tmp_path: Path):
    paths = {container[probe]["httpGet"]["path"] for probe in PROBES}
    assert all(container[probe]["httpGet"]["port"] == "admin" for probe in PROBES)
    assert paths == {"/health", "/ready"}
    assert paths <= {*_OPEN}, "a probe sends no token"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "a drain is no failure"
    token = write_token(tmp_path)
    with served(admin_token_file=token) as (_, admin):
        for path in [*paths, MONITOR["spec"]["endpoints"][0]["path"]]:
            with answers(admin.url + path, Path(token).read_text().strip()) as status:
                assert status == 200
