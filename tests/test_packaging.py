"""The unit files and the Nix code: they say the same, and nothing was loosened."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging_tools import (
    NIX,
    REPOSITORY,
    STUB,
    SYSTEMD,
    evaluate_module,
    find_tool,
    make_nix_environ,
    normalise,
    read_unit,
    run_nix,
)

from intern_decision_serve import lifecycle
from intern_decision_serve.config import PREFIX, SETTINGS, load_config, unknown_settings
from intern_decision_serve.errors import EXIT_REFUSED
from intern_decision_serve.pins import DEFAULT_MODEL, FAMILY, PINNED_STACK

NAME = "intern-decision-serve"
PLAIN = SYSTEMD / f"{NAME}.service"
TEMPLATE = SYSTEMD / f"{NAME}@.service"
SEALED = SYSTEMD / "socket-activated" / f"{NAME}.service"
SOCKET = SYSTEMD / "socket-activated" / f"{NAME}.socket"
SERVICES = [PLAIN, TEMPLATE, SEALED]
TOKEN = "t" * 40
LONGEST_COMPILE_SECONDS = 52  # first call of a process with an empty Triton cache


@pytest.fixture(scope="module")
def nix_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    find_tool("nix-instantiate", "nix-bin")
    return make_nix_environ(tmp_path_factory.mktemp("nix"))


def parameters(path: Path) -> Any:
    return pytest.param(path, id=str(path.relative_to(REPOSITORY)))


# --- Nix: parse, evaluate, refuse ---------------------------------------------------


@pytest.mark.parametrize(
    "path", [parameters(p) for p in sorted([*NIX.glob("*.nix"), *STUB.glob("*.nix")])]
)
def test_every_nix_file_parses(nix_environ: dict[str, str], path: Path) -> None:
    done = run_nix(nix_environ, "nix-instantiate", "--parse", str(path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("settings", "path", "instance"),
    [
        ({}, PLAIN, ""),
        ({"socketActivation": True}, SEALED, ""),
        ({"instances": {"1": {"port": 8101}}}, TEMPLATE, "1"),
    ],
    ids=["plain", "socket-activated", "instance"],
)
def test_the_module_and_the_unit_file_say_the_same_key_by_key(
    nix_environ: dict[str, str], settings: dict[str, Any], path: Path, instance: str
) -> None:
    asked, error = evaluate_module(nix_environ, **settings)
    assert asked is not None, error
    (name, service), *others = asked["systemd"]["services"].items()
    assert others == []
    assert f"{name}.service" == path.name.replace("@", f"@{instance}")
    unit = read_unit(path, instance)
    environment = dict(
        line.partition("=")[::2] for line in unit["Service"].pop("Environment")
    )
    assert service["environment"] == environment
    assert normalise(service["serviceConfig"]) == normalise(unit["Service"])
    around = {
        "Description": service["description"],
        "After": service["after"],
        "Wants": service["wants"],
        "StartLimitIntervalSec": service["startLimitIntervalSec"],
    }
    if service["requires"]:
        around["Requires"] = service["requires"]
    assert normalise(around) == normalise(unit["Unit"])
    assert service["wantedBy"] == unit["Install"]["WantedBy"]


def test_the_modules_socket_and_the_socket_unit_say_the_same(
    nix_environ: dict[str, str],
) -> None:
    asked, error = evaluate_module(nix_environ, socketActivation=True)
    assert asked is not None, error
    socket = asked["systemd"]["sockets"][NAME]
    unit = read_unit(SOCKET)
    listen = {"ListenStream": socket["listenStreams"], **socket["socketConfig"]}
    assert normalise(listen) == normalise(unit["Socket"])
    assert [socket["description"]] == unit["Unit"]["Description"]
    assert socket["wantedBy"] == unit["Install"]["WantedBy"]


def test_every_option_reaches_the_service(nix_environ: dict[str, str]) -> None:
    asked, error = evaluate_module(
        nix_environ,
        model="Intern-Decision-2B",
        checkpoint="/hf/a b/50%",
        host="::1",
        port=9000,
        tokenFile="/run/keys/token",
        vramCapGib=9.5,
        maxTokens=4096,
        maxDecisions=8,
        maxBodyBytes=65536,
        maxQueue=4,
        releaseSlackMib=0,
        keepVision=True,
        gpu="3",
        environment={"INTERN_DECISION_CUDA_GRAPHS": "16"},
        clients=["localhost", "10.0.0.0/8"],
        openFirewall=True,
    )
    assert asked is not None, error
    service = asked["systemd"]["services"][NAME]
    cache = "%C/intern-decision-serve"
    assert service["environment"] == {
        "INTERN_DECISION_MODEL": "Intern-Decision-2B",
        "INTERN_DECISION_CHECKPOINT": "/hf/a b/50%%",
        "INTERN_DECISION_HOST": "::1",
        "INTERN_DECISION_PORT": "9000",
        "INTERN_DECISION_MAX_TOKENS": "4096",
        "INTERN_DECISION_MAX_DECISIONS": "8",
        "INTERN_DECISION_MAX_BODY_BYTES": "65536",
        "INTERN_DECISION_MAX_QUEUE": "4",
        "INTERN_DECISION_RELEASE_SLACK_MIB": "0",
        "INTERN_DECISION_KEEP_VISION": "1",
        "INTERN_DECISION_CUDA_GRAPHS": "16",
        "VRAM_CAP_GIB": "9.500000",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "3",
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "CUDA_CACHE_PATH": f"{cache}/cuda",
        "USER": NAME,
        "LOGNAME": NAME,
    }
    assert service["serviceConfig"]["LoadCredential"] == "api-token:/run/keys/token"
    assert service["serviceConfig"]["IPAddressAllow"] == ["localhost", "10.0.0.0/8"]
    assert asked["networking"]["firewall"]["allowedTCPPorts"] == [9000]


def test_an_instance_takes_what_it_does_not_set_from_above(
    nix_environ: dict[str, str],
) -> None:
    asked, error = evaluate_module(
        nix_environ,
        vramCapGib=9,
        maxQueue=4,
        environment={"A": "above"},
        socketActivation=True,
        instances={
            "0": {"port": 8100},
            "big": {"port": 8101, "gpu": "3", "vramCapGib": 20}
            | {"environment": {"A": "own"}},
        },
    )
    assert asked is not None, error
    services = asked["systemd"]["services"]
    assert sorted(services) == [f"{NAME}@0", f"{NAME}@big"]
    told = {
        name: {
            key: service["environment"][key]
            for key in (
                "CUDA_VISIBLE_DEVICES",
                "VRAM_CAP_GIB",
                "INTERN_DECISION_MAX_QUEUE",
                "A",
            )
        }
        for name, service in services.items()
    }
    assert [list(one.values()) for one in told.values()] == [
        ["0", "9", "4", "above"],
        ["3", "20", "4", "own"],
    ]
    sockets = asked["systemd"]["sockets"]
    assert {name: one["listenStreams"] for name, one in sockets.items()} == {
        f"{NAME}@0": ["127.0.0.1:8100"],
        f"{NAME}@big": ["127.0.0.1:8101"],
    }


def test_the_command_line_is_as_expected(nix_environ: dict[str, str]) -> None:
    asked, error = evaluate_module(nix_environ)
    assert asked is not None, error
    command = asked["systemd"]["services"][NAME]["serviceConfig"]["ExecStart"]
    assert re.fullmatch(
        r"/\S+-coreutils/bin/env INTERN_DECISION_VRAM_CAP_GIB=\$\{VRAM_CAP_GIB\} "
        r"/package/bin/intern-decision-serve serve",
        command,
    )


def test_a_module_that_is_not_enabled_asks_for_nothing(
    nix_environ: dict[str, str],
) -> None:
    assert evaluate_module(nix_environ, enable=False) == ({}, "")


def test_the_firewall_stays_closed_unless_told(nix_environ: dict[str, str]) -> None:
    asked, error = evaluate_module(nix_environ, clients=["10.0.0.0/8"])
    assert asked is not None, error
    assert not asked["networking"]["firewall"]["allowedTCPPorts"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"port": 70000}, "port' is not of type `port'"),
        ({"port": -1}, "port' is not of type `port'"),
        ({"port": "8100"}, "port' is not of type `port'"),
        ({"enable": "yes"}, "enable' is not of type `bool'"),
        ({"model": "Intern-Decision-9B"}, "model' is not of type `enum'"),
        ({"checkpoint": "hf/snapshot"}, "checkpoint' is not of type"),
        ({"host": "0.0.0.0\nUser=root"}, "host' is not of type"),
        ({"tokenFile": "token"}, "tokenFile' is not of type"),
        ({"vramCapGib": 0}, "vramCapGib' is not of type"),
        ({"vramCapGib": "9"}, "vramCapGib' is not of type"),
        ({"maxTokens": 0}, "maxTokens' is not of type"),
        ({"maxDecisions": 1.5}, "maxDecisions' is not of type"),
        ({"maxBodyBytes": 0}, "maxBodyBytes' is not of type"),
        ({"maxQueue": 0}, "maxQueue' is not of type"),
        ({"releaseSlackMib": -1}, "releaseSlackMib' is not of type"),
        ({"keepVision": 1}, "keepVision' is not of type"),
        ({"gpu": 0}, "gpu' is not of type"),
        ({"environment": {"A": 1}}, "environment' is not of type"),
        ({"clients": "localhost"}, "clients' is not of type"),
        ({"openFirewall": 1}, "openFirewall' is not of type"),
        ({"prot": 8100}, "prot' does not exist"),
        ({"apiToken": TOKEN}, "apiToken' does not exist"),
        ({"instances": {"0": {}}}, "instances.0.port' is used but not defined"),
        ({"instances": {"0": {"port": 0.5}}}, "instances.0.port' is not of type"),
        ({"instances": {"0": {"host": "::"}}}, "instances.0.host' does not exist"),
        ({"instances": {"A b": {"port": 8100}}}, "an instance's name is"),
        (
            {"instances": {"0": {"port": 8100}, "1": {"port": 8100}}},
            "two instances share a port",
        ),
        ({"environment": {PREFIX + "API_TOKEN": TOKEN}}, "use tokenFile"),
        ({"tokenFile": "/nix/store/x-token"}, "tokenFile lies in the store"),
        ({"openFirewall": True}, "openFirewall is in vain"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_the_module_refuses(
    nix_environ: dict[str, str], settings: dict[str, Any], complaint: str
) -> None:
    environ = {**nix_environ, "NIX_STORE_DIR": "/nix/store"}
    asked, error = evaluate_module(environ, **settings)
    assert asked is None
    assert complaint in error


# --- The package and the flake ------------------------------------------------------


@pytest.fixture(scope="module")
def flake(nix_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkout of what the flake needs: a flake takes what git knows."""
    git = find_tool("git", "git")
    checkout = tmp_path_factory.mktemp("checkout")
    wanted = [NIX, SYSTEMD, REPOSITORY / "pyproject.toml"]
    wanted.append(REPOSITORY / "intern_decision_serve" / "__init__.py")
    for path in wanted:
        target = checkout / path.relative_to(REPOSITORY)
        target.parent.mkdir(exist_ok=True)
        if path.is_dir():
            target.mkdir()
            for file in path.iterdir():
                if file.is_file():
                    (target / file.name).write_bytes(file.read_bytes())
        else:
            target.write_bytes(path.read_bytes())
    for arguments in (["init", "-q"], ["add", "-A"]):
        subprocess.run([git, "-C", str(checkout), *arguments], check=True)
    return f"git+file://{checkout}?dir=nix"


def run_flake(
    environ: Mapping[str, str], flake: str, *command: str
) -> subprocess.CompletedProcess[str]:
    offline = ["--offline", "--no-write-lock-file"]
    override = ["--override-input", "nixpkgs", f"path:{STUB}"]
    return run_nix(
        environ, "nix", *command[:-1], *offline, *override, flake + command[-1]
    )


def test_the_flake_checks_offline(nix_environ: dict[str, str], flake: str) -> None:
    done = run_flake(nix_environ, flake, "flake", "check", "")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def recipe(nix_environ: dict[str, str], flake: str) -> Any:
    """What package.nix tells the builder, and what its Python packages tell theirs."""
    attribute = "#packages.x86_64-linux.default"
    done = run_flake(
        nix_environ,
        flake,
        "eval",
        "--json",
        "--apply",
        """package:
          let
            strip = settings: removeAttrs settings
              [ "src" "passthru" "build-system" "nativeBuildInputs" "buildInputs"
                "dependencies" "nativeCheckInputs" ]
              // { dependencies = map name (settings.dependencies or [ ]); };
            name = package: package.pname or package.name;
            packages = package.settings.passthru.python.pkgs;
            pinned = builtins.attrNames package.settings.passthru.pins.files;
          in {
            service = strip package.settings;
            packages = builtins.listToAttrs (map (name: {
              inherit name;
              value = strip packages.${name}.settings // {
                fetched = packages.${name}.settings.src.settings;
              };
            }) pinned);
          }""",
        attribute,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_closure_holds_the_stack_and_the_run_time_needs(recipe: Any) -> None:
    assert recipe["service"]["dependencies"] == [
        "backports-zstd",
        "prometheus-client",
        "torch",
        "torchvision",
        "pillow",
        "transformers",
        "flash-linear-attention",
        "fla-core",
        "causal-conv1d",
    ]
    everything = {
        name for one in recipe["packages"].values() for name in one["dependencies"]
    }
    assert everything.isdisjoint({"kernels", "hf-xet"})  # nothing that fetches code


def test_the_packages_version_is_the_services(recipe: Any) -> None:
    text = (REPOSITORY / "intern_decision_serve" / "__init__.py").read_text()
    assert f'__version__ = "{recipe["service"]["version"]}"' in text


def test_the_wrapper_sets_what_triton_and_torch_look_for(recipe: Any) -> None:
    wrapper = " ".join(recipe["service"]["makeWrapperArgs"])
    driver = "/run/opengl-driver/lib"
    # The driver's directory first, then nvrtc, which torch opens by its bare name.
    assert re.search(
        rf"--prefix LD_LIBRARY_PATH : {driver}:/\S+cuda_nvrtc/lib ", wrapper
    )
    assert f"--set-default TRITON_LIBCUDA_PATH {driver} " in wrapper
    assert re.search(
        r"--set-default TRITON_PTXAS_PATH /\S+cuda_nvcc/bin/ptxas", wrapper
    )
    assert re.search(r"--set-default CC /\S+-gcc/bin/cc$", wrapper)


def test_the_install_check_covers_the_stack_and_the_torch_free_tests(
    recipe: Any,
) -> None:
    phase = recipe["service"]["checkPhase"]
    expected = json.loads(phase.split("check_stack.py '")[1].split("'")[0])
    assert expected["torch"] == "2.10.0+cu128"
    assert expected["cuda"] == "12.8"
    assert (
        PINNED_STACK.items() - {("torch", "2.10.0")}
        <= expected["distributions"].items()
    )
    assert '-m "not torch and not gpu and not network" tests' in phase
    assert recipe["service"]["pythonImportsCheck"] == ["intern_decision_serve"]


def test_the_install_check_stops_at_the_first_other_version() -> None:
    expected = {"distributions": {"pytest": pytest.__version__, "pluggy": "0"}}
    done = subprocess.run(
        [sys.executable, str(NIX / "check_stack.py"), json.dumps(expected)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"not the pinned stack: pluggy is \S+, pinned is 0\n", done.stderr
    )


def test_causal_conv1d_is_compiled_here_for_named_architectures(recipe: Any) -> None:
    build = recipe["packages"]["causal-conv1d"]
    assert (
        build["env"]["CAUSAL_CONV1D_FORCE_BUILD"] == "TRUE"
    )  # else: a wheel from afar
    assert build["env"]["KERNEL_GENCODE"].startswith(
        "-gencode arch=compute_80,code=sm_80 "
    )
    assert "format" not in build["fetched"]  # the sdist


def test_what_is_fetched_is_named_by_hash_and_never_by_host(recipe: Any) -> None:
    fetched = {name: one["fetched"] for name, one in recipe["packages"].items()}
    assert all({"pname", "version", "hash"} <= one.keys() for one in fetched.values())
    assert fetched["flash-linear-attention"]["pname"] == "flash_linear_attention"
    text = "".join(path.read_text() for path in NIX.glob("*.nix"))
    assert re.findall(r"https?://", text) == []


# --- Pins ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pins(nix_environ: dict[str, str]) -> Any:
    done = run_nix(
        nix_environ,
        "nix-instantiate",
        *("--store", "dummy://", "--eval", "--strict", "--json", str(NIX / "pins.nix")),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_project() -> Any:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_pinned_versions_equal_the_projects_and_the_services(pins: Any) -> None:
    pinned = {name: file["version"] for name, file in pins["files"].items()}
    pinned |= {name: pins[name] for name in ("torch", "torchvision")}
    exact = dict(
        requirement.split("==")
        for requirement in read_project()["optional-dependencies"]["cuda"]
        if "==" in requirement
    )
    assert {name: pinned[name] for name in exact} == exact
    assert {name: pinned[name] for name in PINNED_STACK} == PINNED_STACK


def test_every_run_time_need_of_the_project_is_in_the_closure(recipe: Any) -> None:
    project = read_project()
    needs = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    names = {
        re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", need)[0])  # type: ignore[index]
        for need in needs
    }
    assert names == set(recipe["service"]["dependencies"])


def test_python_is_new_enough_for_every_pinned_file(pins: Any) -> None:
    python = tuple(map(int, pins["python"].split(".")))
    assert all(python >= model.min_python for model in FAMILY.values())


def test_every_hash_is_well_formed(pins: Any) -> None:
    found: list[str] = []
    for path in [*NIX.glob("*.nix"), NIX / "flake.lock"]:
        found += re.findall(r"sha\d+-[^\"]*", path.read_text())
    assert len(found) == len(set(found)) == len(pins["files"]) + 1
    for one in found:
        kind, _, digest = one.partition("-")
        assert kind == "sha256"
        assert len(base64.b64decode(digest, validate=True)) == 32


def test_the_lock_is_of_the_window_the_flake_names() -> None:
    lock = json.loads((NIX / "flake.lock").read_text())
    node = lock["nodes"]["nixpkgs"]
    revision = "8c809a146a140c5c8806f13399592dbcb1bb5dc4"
    assert node["locked"]["rev"] == node["original"]["rev"] == revision
    assert f"/nixpkgs/{revision}" in (NIX / "flake.nix").read_text()


@pytest.mark.network
@pytest.mark.skipif(
    os.environ.get("INTERN_DECISION_TEST_NETWORK") != "1",
    reason="reaches the package index: set INTERN_DECISION_TEST_NETWORK=1",
)
@pytest.mark.parametrize(
    "name",
    sorted(PINNED_STACK.keys() - {"torch"})
    + [
        "backports-zstd",
        "einops",
        "huggingface-hub",
        "safetensors",
        "tokenizers",
    ],
)
def test_the_index_still_serves_what_was_pinned(
    pins: Any, tmp_path: Path, name: str
) -> None:
    pin = pins["files"][name]
    digest = base64.b64decode(pin["hash"].removeprefix("sha256-")).hex()
    wanted = tmp_path / "wanted.txt"
    wanted.write_text(f"{name}=={pin['version']} --hash=sha256:{digest}\n")
    if pin["format"] == "wheel":
        kind = ["--only-binary", ":all:", "--python-version", pins["python"]]
        kind += ["--implementation", "cp"]
        for platform in pin["platform"].split("."):
            kind += [] if platform == "any" else ["--platform", platform]
    else:  # pip asks a source for its metadata, and this one's needs torch
        pytest.importorskip("torch")
        kind = ["--no-binary", ":all:", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        + [*kind, "--dest", str(tmp_path / "files"), "-r", str(wanted)],
        env={**os.environ, "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "files").iterdir())) == 1


# --- Units: systemd's own judgement -------------------------------------------------


def copy_for_systemd(path: Path, directory: Path) -> str:
    """Copy a unit under a real name; its program need not exist here."""
    text = re.sub(r"(?m)^ExecStart=.*$", "ExecStart=/bin/true", path.read_text())
    name = path.name.replace("@", "@0")
    (directory / name).write_text(text)
    if path.parent == SOCKET.parent and path != SOCKET:
        (directory / SOCKET.name).write_bytes(SOCKET.read_bytes())
    return name


@pytest.mark.parametrize("path", [parameters(p) for p in [*SERVICES, SOCKET]])
def test_systemd_has_nothing_to_say_about_the_unit(path: Path, tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze", "systemd")
    name = copy_for_systemd(path, tmp_path)
    if path == SOCKET:
        copy_for_systemd(SEALED, tmp_path)
    done = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", f"./{name}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("path", "tenths"),
    [(PLAIN, 12), (TEMPLATE, 12), (SEALED, 5)],
    ids=["plain", "instance", "socket-activated"],
)
def test_the_exposure_stays_as_low_as_cuda_allows(
    path: Path, tenths: int, tmp_path: Path
) -> None:
    analyze = find_tool("systemd-analyze", "systemd")
    name = copy_for_systemd(path, tmp_path)
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", f"./{name}"]
        + [f"--threshold={tenths}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("PrivateDevices", ["no"], "yes would hide /dev/nvidia*"),
        ("DevicePolicy", ["closed"], "else DeviceAllow is a list of exceptions to all"),
        (
            "DeviceAllow",
            ["char-nvidia* rw"],
            "CUDA opens nvidiactl, nvidia-uvm, nvidia-caps too; paths take no glob",
        ),
        ("MemoryDenyWriteExecute", ["no"], "CUDA and Triton run code they wrote"),
        ("ProcSubset", ["all"], "CUDA reads /proc/driver/nvidia, torch /proc/meminfo"),
        (
            "SystemCallFilter",
            ["@system-service", "~@privileged"],
            "without @resources torch falls to one CPU thread; the rest runs compilers",
        ),
        ("SystemCallErrorNumber", ["EPERM"], "a probe that is refused must not kill"),
        ("PrivateTmp", ["yes"], "Triton compiles in a writable TMPDIR"),
        ("LimitCORE", ["0"], "a core dump would hold prompts and the token"),
        ("NotifyAccess", ["main"], "a compiler must not claim that we are ready"),
        ("LoadCredential", [f"api-token:/etc/{NAME}/api-token"], "never a setting"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_what_cuda_and_triton_need_must_stay(
    path: Path, key: str, value: list[str], reason: str
) -> None:
    assert read_unit(path)["Service"][key] == value, reason


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_device_groups_exist_before_the_service_starts(path: Path) -> None:
    unit = read_unit(path)["Unit"]
    for provider in ("modprobe@nvidia_uvm.service", "nvidia-persistenced.service"):
        assert provider in unit["After"][0].split()
        assert provider in unit["Wants"][0].split()
    assert "systemd-modules-load.service" in unit["After"][0].split()


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_caches_are_kept_in_the_cache_directory(path: Path) -> None:
    service = read_unit(path, "1")["Service"]
    environment = dict(line.split("=", 1) for line in service["Environment"])
    place = f"%C/{service['CacheDirectory'][0]}"
    names = ["HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"]
    for name in [*names, "CUDA_CACHE_PATH"]:
        assert f"{environment[name]}/".startswith(f"{place}/")
    # A uid without a passwd entry: torch's import asks the environment first.
    assert environment["USER"] == environment["LOGNAME"] == service["User"][0]


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_a_refused_start_is_not_repeated_and_a_lost_engine_is(path: Path) -> None:
    unit = read_unit(path)
    service = unit["Service"]
    assert service["RestartPreventExitStatus"] == [str(EXIT_REFUSED)]
    assert service["Restart"] == ["on-failure"]
    assert unit["Unit"]["StartLimitIntervalSec"] == ["0"]  # a late device is waited for
    assert "ExecStartPre" not in service  # 78 counts of the main process alone


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_no_timeout_is_shorter_than_what_it_waits_for(path: Path) -> None:
    service = read_unit(path)["Service"]
    assert int(service["WatchdogSec"][0]) > LONGEST_COMPILE_SECONDS
    assert int(service["TimeoutStartSec"][0]) >= 600
    assert int(service["TimeoutStopSec"][0]) > lifecycle.GRACE_SECONDS


def test_only_the_socket_activated_unit_has_no_network_at_all() -> None:
    sealed = read_unit(SEALED)["Service"]
    assert sealed["PrivateNetwork"] == ["yes"]
    assert sealed["RestrictAddressFamilies"] == ["AF_UNIX"]  # for READY alone
    assert "PrivateNetwork" not in read_unit(PLAIN)["Service"]


def test_a_waiting_connection_cannot_repeat_a_refused_start_for_ever() -> None:
    socket = read_unit(SOCKET)["Socket"]
    assert int(socket["TriggerLimitBurst"][0]) <= 3
    assert int(socket["TriggerLimitIntervalSec"][0]) >= 60
    assert int(socket["Backlog"][0]) > 32  # MAX_QUEUE


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_the_token_is_in_no_setting_that_systemctl_shows(path: Path) -> None:
    settings = read_unit(path)["Service"]
    shown = (
        settings["Environment"] + settings["ExecStart"] + settings["EnvironmentFile"]
    )
    assert "token" not in " ".join(shown).lower()
    assert "PassEnvironment" not in settings
    assert "SetCredential" not in settings  # its value would be shown


# --- Units: what the service makes of them ------------------------------------------


def as_the_service_sees_it(path: Path) -> dict[str, str]:
    lines = read_unit(path, "1")["Service"]["Environment"]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_the_service_accepts_the_units_environment(path: Path) -> None:
    environ = as_the_service_sees_it(path)
    environ |= {PREFIX + "API_TOKEN": TOKEN, PREFIX + "VRAM_CAP_GIB": ""}
    assert unknown_settings(environ) == ()
    config = load_config(environ)
    assert config.model == DEFAULT_MODEL
    assert config.vram_cap_gib is None
    assert config.port == (8101 if path == TEMPLATE else 8100)


def test_the_units_address_is_the_services_own_default() -> None:
    defaults = {setting.variable: setting.default for setting in SETTINGS}
    environ = as_the_service_sees_it(PLAIN)
    for name in (PREFIX + "HOST", PREFIX + "PORT"):
        assert environ[name] == defaults[name]
    listen = f"{defaults[PREFIX + 'HOST']}:{defaults[PREFIX + 'PORT']}"
    assert read_unit(SOCKET)["Socket"]["ListenStream"] == [listen]


def test_the_module_offers_exactly_the_pinned_family() -> None:
    text = (NIX / "module.nix").read_text()
    offered = re.search(r"types\.enum \[(.*?)\]", text, re.S)
    assert offered is not None
    assert re.findall(r'"([^"]+)"', offered[1]) == list(FAMILY)


@pytest.mark.parametrize(
    ("host_file", "told"),
    [
        ([], ""),
        (["VRAM_CAP_GIB="], ""),
        (["VRAM_CAP_GIB=9.5"], "9.5"),
    ],
    ids=["unset", "empty", "set"],
)
@pytest.mark.parametrize("path", [parameters(p) for p in SERVICES])
def test_systemd_expands_the_hosts_knob_into_the_services_own(
    path: Path, host_file: list[str], told: str
) -> None:
    """By the very function that systemd 252 runs ExecStart through."""
    (command,) = read_unit(path)["Service"]["ExecStart"]
    argv = expand_like_systemd(command.split(), host_file)
    assert argv == [
        "/usr/bin/env",
        f"INTERN_DECISION_VRAM_CAP_GIB={told}",
        "/usr/local/bin/intern-decision-serve",
        "serve",
    ]


def expand_like_systemd(argv: list[str], environ: list[str]) -> list[str]:
    library = next(Path("/usr/lib").glob("*/systemd/libsystemd-shared-252.so"), None)
    if library is None:
        pytest.skip("systemd 252 is not installed: other versions call it differently")
    expand = ctypes.CDLL(str(library)).replace_env_argv
    expand.restype = ctypes.POINTER(ctypes.c_char_p)
    expanded = expand(_as_strv(argv), _as_strv(environ))
    words: list[str] = []
    while (word := expanded[len(words)]) is not None:
        words.append(word.decode())
    return words


def _as_strv(words: list[str]) -> Any:
    encoded = [word.encode() for word in words]
    return (ctypes.c_char_p * (len(words) + 1))(*encoded, None)
