"""The recorded objects of the Helm chart: pods are restricted, and objects fit each other.

What Helm renders is compared with this record in tests/processes/test_chart.py.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import promql_parser
import pytest
import yaml

from streams.engines.address import engine_template
from streams.picker.process import LIVENESS, READINESS
from streams.settings import load
from tests.helpers.helm import pods, recorded_objects
from tests.helpers.pages import blocks
from tests.helpers.promql import selections_of

Objects = list[dict[str, Any]]

NAMESPACE = "llm"

#: The ports of a picker, in its environment.
PICKER_ENV = {"KVSTREAMS_PICKER_PORT": "9002", "KVSTREAMS_PICKER_HEALTH_PORT": "9003"}

#: The rights of a picker with the pool `engines`.
POOL_RULES = [
    {
        "apiGroups": ["inference.networking.k8s.io"],
        "resources": ["inferencepools"],
        "resourceNames": ["engines"],
        "verbs": ["list", "watch"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
]


@pytest.fixture(params=recorded_objects())
def objects(request: pytest.FixtureRequest) -> Objects:
    """Give the objects of one file of values."""
    return recorded_objects()[request.param]


def of_kind(objects: Objects, *kinds: str) -> Objects:
    return [each for each in objects if each["kind"] in kinds]


def component_of(rendered: Mapping[str, Any]) -> str:
    return str(rendered["metadata"]["labels"]["app.kubernetes.io/component"])


# -- pods ------------------------------------------------------------------------------------------------------------


def test_pods_are_restricted(objects: Objects) -> None:
    """Pods meet the level `restricted` of Kubernetes' pod security, write to volumes only, and have limits."""
    for pod in pods(objects).values():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"]["type"] == "RuntimeDefault"
        assert pod["enableServiceLinks"] is False  # variables such as KVSTREAMS_ROUTER_PORT would be settings
        assert {*("hostNetwork", "hostPID", "hostIPC")}.isdisjoint(pod)
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            for probe, path, service in (
                ("startup", "/healthz", LIVENESS),
                ("liveness", "/healthz", LIVENESS),
                ("readiness", "/ready", READINESS),
            ):
                found = container[f"{probe}Probe"]
                if container["name"] == "picker":
                    assert found["grpc"] == {
                        "port": int(PICKER_ENV["KVSTREAMS_PICKER_HEALTH_PORT"]),
                        "service": service,
                    }
                    assert PICKER_ENV.items() <= {each["name"]: each.get("value") for each in container["env"]}.items()
                else:
                    assert found["httpGet"]["path"] == path


def test_only_what_finds_engines_may_ask_the_api_server(objects: Objects) -> None:
    """A pod has an account's token only if it reads EndpointSlices or a pool, and may do nothing else with it."""
    accounts = {}
    for name, pod in pods(objects).items():
        (container,) = pod["containers"]
        options = {"--engines-kubernetes", "--engines-inference-pool", "--inference-pool"} & set(container["args"])
        assert pod["automountServiceAccountToken"] is bool(options), name
        accounts[name] = pod["serviceAccountName"]
    bindings = {each["metadata"]["name"]: each for each in of_kind(objects, "RoleBinding")}
    for role in of_kind(objects, "Role"):
        name = role["metadata"]["name"]
        slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        assert role["rules"] == ([slices] if component_of(role) == "bridge" else POOL_RULES)
        (subject,) = bindings[name]["subjects"]
        assert (subject["name"], bindings[name]["roleRef"]["name"]) == (accounts[name], name)
    assert not of_kind(objects, "ClusterRole")


def test_an_inference_pool_names_its_picker() -> None:
    """Its reference is a service and a port of it, in its own namespace, and the picker picks from this pool."""
    objects = recorded_objects()["keda"]
    (pool,) = of_kind(objects, "InferencePool")
    picker = pool["spec"]["endpointPickerRef"]
    (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == picker["name"])
    grpc = service["spec"]["ports"][0]
    assert (picker["port"]["number"], grpc["appProtocol"]) == (grpc["port"], "kubernetes.io/h2c")
    (container,) = pods(objects)[picker["name"]]["containers"]
    assert {"name": grpc["targetPort"], "containerPort": int(PICKER_ENV["KVSTREAMS_PICKER_PORT"])} in container["ports"]
    assert container["args"][1:] == ["--inference-pool", f"{NAMESPACE}/{pool['metadata']['name']}"]
    (service,) = (
        each for each in of_kind(recorded_objects()["production"], "Service") if component_of(each) == "picker"
    )
    assert service["spec"]["ports"][0]["appProtocol"] == "https"  # with a certificate


def selected(objects: Objects, selector: Mapping[str, str]) -> list[str]:
    """The workloads whose pods a selector selects."""
    return [
        each["metadata"]["name"]
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet")
        and selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_selectors_select_the_pods_that_they_mean(objects: Objects) -> None:
    """Workloads and budgets select one workload each; services and policies select all of one component."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            assert selected(objects, spec["selector"]["matchLabels"]) == [each["metadata"]["name"]]
        elif each["kind"] in ("Service", "NetworkPolicy"):
            selector = spec["selector"] if each["kind"] == "Service" else spec["podSelector"]["matchLabels"]
            name = each["metadata"]["name"]
            assert selected(objects, selector), name
            assert all(found == name or found.startswith(f"{name}-") for found in selected(objects, selector))


def test_the_front_finds_the_routers_of_its_release(objects: Objects) -> None:
    """The address in its arguments is a service's name, scheme and port."""
    service = {each["metadata"]["name"]: each["spec"]["ports"][0] for each in of_kind(objects, "Service")}
    for name, pod in pods(objects).items():
        (container,) = pod["containers"]
        if container["args"][0] == "front":
            url = container["args"][container["args"].index("--router-url") + 1]
            scheme, host, port = re.fullmatch(r"(https?)://([^:]+):(\d+)", url).groups()  # type: ignore[union-attr]
            assert host == name.replace("-front", "-router")
            assert (service[host]["port"], service[host]["appProtocol"]) == (int(port), scheme)
            assert container["readinessProbe"]["httpGet"]["scheme"] == scheme.upper()


def test_a_pod_can_read_its_secrets_and_write_its_volumes(objects: Objects) -> None:
    """Its group owns the volumes, also after a restart on another node, and may read the Secrets."""
    for name, pod in pods(objects).items():
        security = pod["securityContext"]
        assert security["fsGroup"] == security["runAsGroup"] > 0, name
        assert security["fsGroupChangePolicy"] == "OnRootMismatch"  # a large volume is not walked through at each start
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, name


def test_a_worker_keeps_its_tables_when_it_is_restarted(objects: Objects) -> None:
    """Its volume is a claim of its own, at the path of `data_dir`; only a worker has one."""
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        claims = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])]
        if component_of(each) != "worker":
            assert not claims
            assert "KVSTREAMS_DATA_DIR" not in env
            continue
        assert env["KVSTREAMS_DATA_DIR"] == mounted["data"]
        assert (claims == ["data"]) is not any(volume["name"] == "data" for volume in pod["volumes"])
        assert each["spec"]["serviceName"] in {service["metadata"]["name"] for service in of_kind(objects, "Service")}


# -- autoscaling -------------------------------------------------------------------------------------------------------


def test_an_autoscaler_has_its_deployment_to_itself(objects: Objects) -> None:
    """With a number of replicas, each upgrade would undo what it decided. A share of CPU needs a request."""
    workloads = {each["metadata"]["name"]: each for each in of_kind(objects, "Deployment", "StatefulSet")}
    scaled = set()
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        if component_of(scaler) != "engine-autoscaling":
            target = scaler["spec"]["scaleTargetRef"]
            workload = workloads[target["name"]]
            assert (workload["apiVersion"], workload["kind"]) == (target["apiVersion"], target["kind"])
            assert component_of(workload) == component_of(scaler)
            (container,) = workload["spec"]["template"]["spec"]["containers"]
            assert "cpu" in container["resources"]["requests"]
            scaled.add(target["name"])
    assert {name for name, workload in workloads.items() if "replicas" not in workload["spec"]} == scaled


def router_service(objects: Objects) -> str:
    (name,) = (each["metadata"]["name"] for each in of_kind(objects, "Service") if component_of(each) == "router")
    return str(name)


@dataclass(frozen=True)
class Query:
    """What an autoscaler of engines asks Prometheus. equal, like: values that labels have, or match."""

    metric: str
    equal: Mapping[str, str]
    like: Mapping[str, str]

    @classmethod
    def of(cls, expression: str) -> Query:
        """Raise ValueError for what is not PromQL, and AssertionError for more than one mean of one metric."""
        (selection,) = selections_of("an autoscaler", expression, set())
        parsed: Any = promql_parser.parse(expression)
        assert (str(parsed.op), parsed.modifier) == ("avg", None)
        equal, like = (
            {each.name: each.value for each in parsed.expr.matchers.matchers if each.op == op}
            for op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re)
        )
        return cls(selection.metric, equal, like)


def adapter_query(metric: Mapping[str, Any]) -> str:
    """The query that the rule of docs/kubernetes.md makes of a metric of an HPA."""
    (text,) = (code for _, code in blocks("docs/kubernetes.md", "yaml") if code.startswith("rules:"))
    (rule,) = yaml.safe_load(text)["rules"]["external"]
    assert rule["resources"] == {"namespaced": False}  # the HPA may be in another namespace than the routers
    assert metric["name"] == rule["seriesQuery"]
    values = {"Series": metric["name"]} | {
        f"LabelValuesByName.{label}": value for label, value in metric["selector"]["matchLabels"].items()
    }
    return re.sub(r"<<\.([\w.]+)>>", lambda found: values[found[1]], rule["metricsQuery"])


def queries(objects: Objects) -> Iterator[Query]:
    """What the release asks of its engines."""
    for scaled in of_kind(objects, "ScaledObject"):
        (trigger,) = scaled["spec"]["triggers"]
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
        # Otherwise KEDA takes an empty answer for 0, and removes engines while no router is ready.
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        yield Query.of(trigger["metadata"]["query"])
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        if component_of(scaler) == "engine-autoscaling":
            (metric,) = scaler["spec"]["metrics"]
            assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
            for value in metric["external"]["metric"]["selector"]["matchLabels"].values():
                assert re.fullmatch(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", value)  # a label's value
            yield Query.of(adapter_query(metric["external"]["metric"]))


@pytest.mark.parametrize("file", ["keda", "roles-cxl"])
def test_engines_follow_what_the_routers_of_the_release_want(file: str) -> None:
    """KEDA's query and that of the adapter's rule find the metric of these routers, for the pool's model and role."""
    objects = recorded_objects()[file]
    models = {"keda": ["my-org/my-model"], "roles-cxl": ["meta/llama-70b", "llama-70b"]}[file]
    found = list(queries(objects))
    for query, model in zip(found, models, strict=True):
        assert query.metric == "kvstreams_pool_replicas_wanted"
        assert query.equal["namespace"] == NAMESPACE
        assert query.equal["service"] == router_service(objects)
        assert query.equal["role"] in ("both", "prefill", "decode")
        assert query.equal.get("model") == model or re.fullmatch(query.like["model"], model)
        assert query.equal.keys() | query.like.keys() == {"namespace", "service", "model", "role"}


# -- metrics and ways in -----------------------------------------------------------------------------------------------


def test_prometheus_reads_each_pod_once() -> None:
    """The ServiceMonitor selects services that together have every workload once, by a port that all of them have."""
    for file in ("keda", "production"):
        objects = recorded_objects()[file]
        (monitor,) = of_kind(objects, "ServiceMonitor")
        (endpoint,) = monitor["spec"]["endpoints"]
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [each for each in of_kind(objects, "Service") if wanted <= each["metadata"]["labels"].items()]
        read = [name for each in services for name in selected(objects, each["spec"]["selector"])]
        assert sorted(read) == sorted(pods(objects))
        for service in services:
            (port,) = (each for each in service["spec"]["ports"] if each["name"] == endpoint["port"])
            assert port["appProtocol"] == endpoint["scheme"]
            assert port["targetPort"] in [
                each["name"] for pod in pods(objects).values() for each in pod["containers"][0]["ports"]
            ]


def test_ways_in_lead_to_the_fronts() -> None:
    """An Ingress and an HTTPRoute name a port of the fronts' service."""
    (ingress,) = of_kind(recorded_objects()["production"], "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    (route,) = of_kind(recorded_objects()["keda"], "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    for file, name, port in (
        ("production", path["backend"]["service"]["name"], path["backend"]["service"]["port"]["name"]),
        ("keda", backend["name"], backend["port"]),
    ):
        (service,) = (each for each in of_kind(recorded_objects()[file], "Service") if each["metadata"]["name"] == name)
        assert component_of(service) == "front"
        assert port in service["spec"]["ports"][0].values()


# -- network policies --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One end of a connection: a pod of a namespace, or an address outside of the pods' network."""

    namespace: str = ""
    labels: frozenset[tuple[str, str]] = frozenset()
    address: str = ""

    def is_named_by(self, peer: Mapping[str, Any]) -> bool:
        """Whether a peer of a rule is this place. Selectors have `matchLabels` alone."""
        if "ipBlock" in peer:
            assert peer["ipBlock"].keys() == {"cidr"}
            network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
            return bool(self.address) and ipaddress.ip_address(self.address) in network
        namespaces = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}})
        own = {("kubernetes.io/metadata.name", self.namespace)}
        return not self.address and all(
            selector.get("matchLabels", {}).items() <= labels
            for selector, labels in ((namespaces, own), (peer.get("podSelector", {}), self.labels))
        )


def allows(rules: Sequence[Mapping[str, Any]], way: str, place: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether rules allow a connection. way: `to` or `from`."""
    return any(
        (way not in rule or any(place.is_named_by(peer) for peer in rule[way]))
        and ("ports" not in rule or any(_has(each, port, protocol) for each in rule["ports"]))
        for rule in rules
    )


def _has(ports: Mapping[str, Any], port: int, protocol: str) -> bool:
    first = {"http": 8000, "grpc": 9002}.get(ports["port"], ports["port"])
    return bool(ports.get("protocol", "TCP") == protocol and first <= port <= ports.get("endPort", first))


def policies(objects: Objects) -> dict[str, dict[str, Any]]:
    """The policy of each component."""
    return {component_of(each): each["spec"] for each in of_kind(objects, "NetworkPolicy")}


def place_of(objects: Objects, component: str) -> Place:
    """A pod of a component of the release."""
    labels = next(
        each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(objects, "Deployment", "StatefulSet")
        if component_of(each) == component
    )
    return Place(NAMESPACE, frozenset(labels.items()))


#: Where the file of values for production has what pods connect to.
KAFKA, ENGINES, MONITORING, INGRESS, TRACES, OTHERS = (
    Place(name) for name in ("kafka", "models", "monitoring", "ingress", "tracing", "others")
)
API_SERVER, INTERNET = Place(address="10.0.0.1"), Place(address="192.0.2.1")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def needed(objects: Objects) -> set[tuple[str, Place, int]]:
    """The connections that the processes make, by their arguments and variables. The last is the port of the peer."""
    found = set()
    for name, pod in pods(objects).items():
        (container,) = pod["containers"]
        component, *arguments = container["args"]
        if component == "picker":
            found.add((component, ENGINES, 8000))  # for tokens
        options = list(itertools.pairwise(arguments))
        env = {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("KVSTREAMS_KAFKA")}
        assert bool(env) is (component != "front"), name
        for server in load({}, env).settings.kafka.split(",") if env else ():
            found.add((component, KAFKA, port_of(server)))
        for option, value in options:
            if option == "--engines-kubernetes":
                found.add((component, API_SERVER, 6443))
                assert value.partition("/")[0] == ENGINES.namespace
            elif option == "--engine-template":
                engine = engine_template(value).at("engine")
                for address in (engine.url, engine.events, engine.replay):
                    assert address
                    ranks = range(1 if address == engine.url else engine.dp_size)
                    found |= {("bridge", ENGINES, port_of(address) + rank) for rank in ranks}
                found.add(("front", ENGINES, port_of(engine.url)))  # a front sends requests to the registered URLs
            elif option == "--router-url":
                (service,) = (each for each in of_kind(objects, "Service") if component_of(each) == "router")
                assert service["spec"]["ports"][0]["port"] == port_of(value)
                found.add((component, place_of(objects, "router"), 8000))
    return found


def test_pods_reach_what_they_need_and_nothing_else() -> None:
    """Each connection of each process is allowed by its component's policy, and no other one to these places is."""
    objects = recorded_objects()["production"]
    connections = needed(objects)
    components = policies(objects)
    assert components.keys() == {"worker", "router", "front", "bridge", "picker"}
    places = [KAFKA, ENGINES, MONITORING, INGRESS, OTHERS, API_SERVER, INTERNET]
    places += [place_of(objects, component) for component in components]
    ports = {port for _, _, port in connections} | {22, 80, 443, 5556, 9092}
    assert {place_of(objects, "router"), KAFKA, ENGINES, API_SERVER} == {place for _, place, _ in connections}
    for component, policy in components.items():
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        allowed = {
            (component, place, port)
            for place, port in itertools.product(places, ports)
            if allows(policy["egress"], "to", place, port)
        }
        assert allowed == {connection for connection in connections if connection[0] == component}
        for protocol in ("UDP", "TCP"):
            assert allows(policy["egress"], "to", Place("kube-system"), 53, protocol)
        assert allows(policy["egress"], "to", TRACES, 4317)


def test_pods_are_reached_by_whom_they_serve_and_by_nobody_else() -> None:
    """Fronts by clients, pickers by gateways, routers by fronts, all by Prometheus. Nodes need no rule."""
    objects = recorded_objects()["production"]
    components = policies(objects)
    front = place_of(objects, "front")
    sources = [KAFKA, ENGINES, MONITORING, INGRESS, OTHERS, INTERNET, front, place_of(objects, "bridge")]
    for component, policy in components.items():
        served = {"front": [MONITORING, INGRESS], "router": [MONITORING, front]}.get(component, [MONITORING])
        served_at = {8000: served, 9002: [INGRESS] if component == "picker" else []}
        for port in (8000, 9002, 9003, 22, 9090):
            reached_by = [place for place in sources if allows(policy["ingress"], "from", place, port)]
            assert reached_by == served_at.get(port, [])


def test_a_policy_that_is_too_narrow_or_too_broad_is_found() -> None:
    """Rules are read as Kubernetes reads them: without peers for all, without ports for every port."""
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kafka"}}}]
    rule: dict[str, Any] = {"ports": [{"port": 9093}], "to": peers}
    assert allows([rule], "to", KAFKA, 9093)
    assert not allows([rule], "to", KAFKA, 9092)
    assert not allows([rule], "to", KAFKA, 9093, "UDP")
    assert not allows([rule], "to", OTHERS, 9093)
    assert not allows([rule], "to", API_SERVER, 9093)
    assert allows([{"ports": [{"port": 9000, "endPort": 9100}]}], "to", INTERNET, 9093)
    assert allows([{"to": rule["to"]}], "to", KAFKA, 22)
    assert not allows([{"to": [{"podSelector": {}}]}], "to", KAFKA, 22)  # of the policy's own namespace
    assert not allows([], "to", KAFKA, 9093)
