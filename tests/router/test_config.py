"""The YAML file: what is refused, and where the message points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import router.config
from router import locate
from router.cli import build
from router.config import Config, load_config
from router.errors import ConfigError
from router.gateway import Gateway

GOOD = """\
tiers:
  - name: small
    served: served-small
    address: http://127.0.0.1:1
  - name: large
    served: served-large
    start:
      model: somewhere
      args: {mem-fraction-static: 0.3, disable-radix-cache: true}
policies:
  sure:
    method: avg_logprob
    threshold: -0.5
default_policy: sure
limits:
  retries: 1
"""


def load(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load_config(file)


def refusal(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_a_good_file_is_what_it_says(tmp_path):
    config = load(tmp_path, GOOD)
    assert [tier.name for tier in config.tiers] == ["small", "large"]
    assert config.policies["sure"].threshold == -0.5
    assert config.limits.retries == 1
    assert config.listen.host == "127.0.0.1"  # loopback unless told otherwise
    assert config.tiers[1].start.arguments() == ["--mem-fraction-static", "0.3", "--disable-radix-cache"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  retries: 1", "  retris: 1", "c.yaml:16: limits.retris: unknown key; did you mean 'retries'?"),
        ("    threshold", "    treshold", "c.yaml:13: policies.sure.treshold: unknown key; did you mean 'threshold'?"),
        (
            "    served: served-small",
            "    served: served-small\n    zzz: 1",
            "c.yaml:4: tiers.0.zzz: unknown key; remove it",
        ),
        ("threshold: -0.5", "threshold: high", "c.yaml:13: policies.sure.threshold:"),
        ("avg_logprob", "guess", "c.yaml:12: policies.sure"),
        (
            "retries: 1",
            "retries: -1",
            "c.yaml:16: limits.retries: Input should be greater than or equal to 0 (found -1)",
        ),
        ("    served: served-small\n", "", "c.yaml:2: tiers.0.served: Field required"),
        ("http://", "tcp://", "c.yaml:4: tiers.0.address:"),
        ("    address: http://127.0.0.1:1\n", "", "c.yaml:2: tiers.0: give either 'address'"),
        ("mem-fraction-static", "port", "c.yaml:9: tiers.1.start.args.port: set by kvlift up"),
        ("disable-radix-cache: true", "disable-radix-cache: false", "c.yaml:9: tiers.1.start.args.disable-radix-cache"),
        ("model: somewhere", "model: family:nothing", "c.yaml:8: tiers.1.start.model: 'family:nothing': no folder"),
        (
            "default_policy: sure",
            "default_policy: unsure",
            "c.yaml:14: default_policy: no policy 'unsure' under policies; known: sure",
        ),
        ("name: large", "name: sure", "c.yaml:5: tiers.1.name: the name 'sure' is taken by policies.sure"),
        ("name: large", "name: small", "c.yaml:5: tiers.1.name: the name 'small' is taken by tiers.0.name"),
        ("  sure:", "  kvlift:", "c.yaml:11: policies.kvlift: the name 'kvlift' stands for"),
        (
            "limits:",
            "lift: {pairs: [{source: small, target: huge, pack: p}]}\nlimits:",
            "c.yaml:15: lift.pairs.0.target: no tier 'huge'; tiers: small, large",
        ),
        (
            "limits:",
            "lift: {pairs: [{source: large, target: small, pack: p}]}\nlimits:",
            "c.yaml:15: lift.pairs.0: 'large' must come before 'small'",
        ),
        (
            "limits:",
            "lift: {rho: 1.5}\nlimits:",
            "c.yaml:15: lift.rho: Input should be less than or equal to 1 (found 1.5)",
        ),
        (
            "limits:",
            "lift: {rho: 0.3, coverage: 0.5}\nlimits:",
            "c.yaml:15: lift: give either 'rho' or 'coverage'",
        ),
        (
            "limits:",
            "lift: {when: never}\nlimits:",
            "c.yaml:15: lift.when: Input should be 'faster' or 'always'",
        ),
        (
            "limits:",
            "lift: {selector: magic}\nlimits:",
            "c.yaml:15: lift.selector: String should match pattern",
        ),
        (
            "    method: avg_logprob\n    threshold: -0.5",
            "    method: any\n    of:\n      - {method: empty}\n      - {method: tools, to: huge}",
            "c.yaml:15: policies.sure.of.1.to: no tier 'huge'; tiers: small, large",
        ),
        (
            "    method: avg_logprob\n    threshold: -0.5",
            "    method: shadow\n    of: {method: weighted, votes: [{policy: {method: tier_ready, tier: huge}}]}",
            "c.yaml:13: policies.sure.of.votes.0.policy.tier: no tier 'huge'; tiers: small, large",
        ),
        (
            "    method: avg_logprob\n    threshold: -0.5",
            "    method: any\n    of:\n      - {method: shadow, of: {method: empty}}",
            "c.yaml:14: policies.sure.of.0.method: Input tag 'shadow'",
        ),
        (
            "    address: http://127.0.0.1:1",
            "    address: http://127.0.0.1:1\n    replicas: [{address: 'http://127.0.0.1:2'}]",
            "c.yaml:4: tiers.0.address: belongs to each of the replicas",
        ),
        (
            "    address: http://127.0.0.1:1",
            "    replicas:\n      - address: http://127.0.0.1:2\n      - api_key_env: K",
            "c.yaml:6: tiers.0.replicas.1: give either 'address'",
        ),
        ("    start:", "    gateway: true\n    start:", "c.yaml:7: tiers.1.gateway: kvlift up starts workers"),
        (
            "limits:",
            "listen: {host: 0.0.0.0}\nlimits:",
            "c.yaml:15: listen.host: '0.0.0.0' can be reached from other machines, and there are no keys; add",
        ),
        ("limits:", "auth: {keys: [{tenant: a}]}\nlimits:", "c.yaml:15: auth.keys.0: give either 'key_env'"),
        (
            "limits:",
            "auth: {keys: [{tenant: a, key_sha256: abc}]}\nlimits:",
            "c.yaml:15: auth.keys.0.key_sha256: String",
        ),
        (
            "limits:",
            "auth: {keys: [{tenant: a, key_env: A}, {tenant: a, key_env: B, max_in_flight: 3}]}\nlimits:",
            "c.yaml:15: auth.keys.1.max_in_flight: tenant 'a' has another limit at an earlier key",
        ),
        ("  retries: 1", "  max_shadow: 0", "c.yaml:16: limits.max_shadow: Input should be greater than or equal to 1"),
        ("  retries: 1", "  retries: 1\n  retries: 2", "c.yaml:17: retries: given twice, first on line 16"),
        ("limits:", "limits: [", "c.yaml: not YAML"),
    ],
)
def test_case_36_a_fault_is_named_with_file_line_and_key(tmp_path, old, new, message):
    assert old in GOOD
    assert message in refusal(tmp_path, GOOD.replace(old, new))


GATED = """\
tiers:
  - {{name: small, served: s, address: http://h:1, gateway: {small}}}
  - {{name: large, served: l, address: http://h:2, gateway: {large}}}
policies: {{p: {{method: never}}}}
default_policy: p
lift: {{pairs: [{{source: small, target: large, pack: p}}]}}
"""


@pytest.mark.parametrize(("key", "tier"), [("source", "small"), ("target", "large")])
def test_a_lift_to_or_from_a_gateway_is_refused(tmp_path, key, tier):
    gates = {"small": "false", "large": "false"}
    assert load(tmp_path, GATED.format(**gates)).pack("small", "large") == "p"
    message = f"c.yaml:6: lift.pairs.0.{key}: tier {tier!r} stands behind a gateway"
    assert message in refusal(tmp_path, GATED.format(**{**gates, tier: "true"}))


def test_an_empty_or_missing_file_is_refused(tmp_path):
    assert "empty" in refusal(tmp_path, "")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_all_faults_are_named_at_once_in_the_files_order(tmp_path):
    lines = refusal(tmp_path, GOOD.replace("retries", "retris").replace("threshold", "treshold")).split("\n")
    assert [line.split(":")[1] for line in lines] == ["13", "16"]


def test_a_key_that_is_not_exported_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = load(
        tmp_path, GOOD.replace("    served: served-small", "    served: served-small\n    api_key_env: NO_SUCH_KEY")
    )
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        config.require_secrets()


def test_the_router_alone_needs_addresses(tmp_path):
    with pytest.raises(ConfigError, match="kvlift up"):
        Gateway(load(tmp_path, GOOD))


def test_connect_s_is_the_connect_timeout(tmp_path):
    from router.worker import Worker

    config = load(tmp_path, GOOD.replace("  retries: 1", "  connect_s: 1.5"))
    tier = config.tiers[0]
    worker = Worker(tier, "small", tier.workers()[0], config.limits, config.breaker)
    assert worker._client.timeout.connect == 1.5


def test_the_example_names_the_tiny_family(tmp_path, monkeypatch):
    root = tmp_path / "family"
    for folder in ("models/kvlift-tiny-small", "models/kvlift-tiny-large", "packs/tiny-small-to-large"):
        (root / folder).mkdir(parents=True)
    monkeypatch.setattr(locate, "_family_root", lambda: root)
    config = load_config(Path(locate.__file__).parent / "examples" / "laptop.yaml")
    assert config.tiers[0].start.model == str(root / "models/kvlift-tiny-small")
    assert config.tiers[1].start.packs == [str(root / "packs/tiny-small-to-large")]
    assert config.pack("small", "large") == "tiny-small-to-large"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(tmp_path, host):
    assert load(tmp_path, GOOD + f"listen: {{host: '{host}'}}\n").listen.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "router.example", ""])
def test_anything_wider_needs_keys(tmp_path, host):
    wide = GOOD + f"listen: {{host: '{host}'}}\n"
    assert "add auth.keys" in refusal(tmp_path, wide)
    assert load(tmp_path, wide + "auth: {keys: [{tenant: a, key_env: A}]}\n").listen.host == host


EXAMPLES = Path(locate.__file__).parent / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_passes_config_check(file, monkeypatch):
    assert file.read_text().startswith("# yaml-language-server: $schema=kvlift.schema.json\n")
    for name in ("ACME_KEY", "BETA_KEY", "SMALL_KEY", "LARGE_KEY"):
        monkeypatch.setenv(name, f"key {name}")
    said = CliRunner().invoke(build(), ["config", "check", str(file)])
    assert said.exit_code == 0, said.output


def test_the_schema_beside_the_examples_is_the_one_of_this_version():
    printed = CliRunner().invoke(build(), ["config", "schema"]).output
    assert (EXAMPLES / "kvlift.schema.json").read_text() == printed, "kvlift config schema > it"


def test_every_key_of_the_config_is_described():
    schema = Config.model_json_schema()
    sections = {name: part for name, part in schema["$defs"].items() if name in router.config.__all__}
    keys = {
        f"{n}.{key}": told for n, part in {"": schema, **sections}.items() for key, told in part["properties"].items()
    }
    assert len(keys) > 50
    assert [key for key, told in keys.items() if not {"description", "$ref"} & told.keys()] == []


def test_config_check_says_good_or_what_is_wrong(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    good = CliRunner().invoke(build(), ["config", "check", str(file)])
    assert good.exit_code == 0 and "small -> large" in good.output
    file.write_text(GOOD.replace("retries", "retris"))
    bad = CliRunner().invoke(build(), ["config", "check", str(file)])
    assert bad.exit_code == 1 and "c.yaml:16" in bad.output


def test_the_router_and_its_policies_never_import_torch():
    code = (
        "import sys, router.app, router.up, router.cli, router.locate\n"
        "router.locate._family_root()\n"
        "print([m for m in ('torch', 'sglang', 'sglang_ext.offline') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_config_of_the_schema_is_the_config_of_the_docs():
    """Every key of every section has a place in these tests or in those of the part that it steers."""
    tested = Path(__file__).parent
    texts = "".join(file.read_text() for file in tested.glob("*.py"))
    schema = Config.model_json_schema()
    keys = {key for part in (schema, *schema["$defs"].values()) for key in part.get("properties", {})}
    assert [key for key in keys if key not in texts] == []
