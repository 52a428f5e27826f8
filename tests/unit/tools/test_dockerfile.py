"""deploy/Dockerfile, as far as it can be checked without building it."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

import pytest
import yaml

from quire import envs
from quire.cli.serve import command_line, server_config
from quire.config.server import ServerConfig
from quire.frontend.openai.app import endpoints_of

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
INSTRUCTION = re.compile(r"([A-Z]+)\s+(.*)")


def instructions_of(text: str) -> list[tuple[str, str]]:
    """(name, rest), line continuations joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = []
    for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            match = INSTRUCTION.fullmatch(line.strip())
            assert match is not None, line
            found.append((match[1], match[2]))
    return found


INSTRUCTIONS = instructions_of(DOCKERFILE.read_text(encoding="utf-8"))
LAST_STAGE = INSTRUCTIONS[max(i for i, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :]


def only(name: str) -> str:
    """The one instruction of that name in the last stage."""
    (rest,) = [rest for found, rest in LAST_STAGE if found == name]
    return rest


def test_it_knows_every_instruction() -> None:
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}
    assert {name for name, _ in INSTRUCTIONS} <= known, "an instruction that nothing here holds"


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in ignored if line and not line.startswith("#")]
    assert patterns[0] == "*"
    kept = {line[1:] for line in patterns if line.startswith("!")}
    copied = {source for name, rest in INSTRUCTIONS if name == "COPY" for source in rest.split()[:-1]}
    assert copied == kept
    for source in copied:
        assert (ROOT / source).exists()
    assert any(fnmatch.fnmatch("src/quire/worker/kernels/libquire_kernels.so", line) for line in patterns[1:])


def test_the_build_needs_no_file_that_is_not_copied() -> None:
    copied = {source for name, rest in INSTRUCTIONS if name == "COPY" for source in rest.split()[:-1]}
    named = set(re.findall(r"\b(csrc|src|tests|tools|cmake)/", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named |= set(re.findall(r'^(?:readme = |license-files = \[)"(\S+?)"', project, re.MULTILINE))
    assert named <= copied


def test_the_server_is_nobody_special() -> None:
    (user,) = [rest for name, rest in INSTRUCTIONS if name == "USER"]
    assert int(user) > 0, "a number: runAsNonRoot cannot tell of a name"
    names = [name for name, _ in LAST_STAGE]
    assert "RUN" not in names[names.index("USER") :]
    deployment, *_ = yaml.safe_load_all((DOCKERFILE.parent / "kubernetes" / "server.yaml").read_text())
    assert int(user) == deployment["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert any(f"--uid {user} " in rest for name, rest in LAST_STAGE if name == "RUN")


def test_the_command_serves_where_others_can_reach_it() -> None:
    program, verb, *arguments = json.loads(only("CMD"))
    assert (program, verb) == ("quire", "serve")
    config = server_config(command_line().parse(arguments))
    assert (config.host, str(config.port)) == ("0.0.0.0", only("EXPOSE"))
    assert "ENTRYPOINT" not in [name for name, _ in INSTRUCTIONS], "the manifests' commands begin with quire"


def test_health_is_asked_of_a_route_that_asks_for_no_key() -> None:
    program, flag, code = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    assert (program, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    match = re.search(rf"http://127\.0\.0\.1:{only('EXPOSE')}(/[\w/]+)'", code)
    assert match is not None
    assert match[1] == "/health/live"
    assert match[1] in {endpoint.path for endpoint in endpoints_of(ServerConfig(), is_admin=False)}


def test_variables_are_known() -> None:
    names = [rest.partition("=")[0] for name, rest in LAST_STAGE if name == "ENV"]
    assert set(names) <= {variable.name for variable in envs.ENV_VARS} | {"HF_HOME"}


@pytest.mark.parametrize("text", ["copy a b", "  = 1"])
def test_the_reader_refuses_what_is_no_instruction(text: str) -> None:
    with pytest.raises(AssertionError):
        instructions_of(text)
