"""deploy/Dockerfile, as far as it can be checked without building it."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tools.image_steps import DOCKERFILE, entering, stages_of

from quire import envs
from quire.cli.serve import command_line, server_config
from quire.config.server import ServerConfig
from quire.frontend.openai.app import endpoints_of

ROOT = Path(__file__).resolve().parents[3]
STAGES = stages_of(DOCKERFILE.read_text(encoding="utf-8"), {})
INSTRUCTIONS = [(name, match[0]) for stage in STAGES for name, match, *_ in stage.steps]
LAST_STAGE = [(name, match[0]) for name, match, *_ in STAGES[-1].steps]


def only(name: str) -> str:
    """The one instruction of that name in the last stage."""
    (rest,) = [rest for found, rest in LAST_STAGE if found == name]
    return rest


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


def test_each_step_sees_what_was_set_before_it() -> None:
    _, build, image = STAGES
    assert [stage.name for stage in (build, image)] == ["build", "image"]
    assert {workdir for name, _, workdir, _ in build.steps if name == "COPY"} == {"/source"}
    ((_, install, workdir, variables), _) = [step for step in image.steps if step[0] == "RUN"]
    assert install.groups()[:3] == ("build", "/wheels", "/wheels")
    assert workdir == "/"
    assert variables["TORCH_INDEX_URL"].endswith("/cpu")
    assert "QUIRE_CACHE_ROOT" not in variables
    assert image.environment["QUIRE_CACHE_ROOT"] == "/var/cache/quire"
    assert (image.holds["USER"], image.holds["WORKDIR"]) == ("10001", "/home/quire")


def test_an_argument_of_the_build_replaces_its_default() -> None:
    _, stage = stages_of("FROM a:b\nARG X=1\nARG Y\nRUN a \\\n  # why\n  b\nRUN c", {"Y": "2"})
    assert [
        (match[0], variables.items() >= {("X", "1"), ("Y", "2")}) for _, match, _, variables in stage.steps[3:]
    ] == [
        ("a b", True),
        ("c", True),
    ]
    with pytest.raises(ValueError, match="no ARG is named Z"):
        stages_of("FROM a:b\nARG X=1", {"Z": "2"})


@pytest.mark.parametrize(
    "line",
    ["copy a b", "= 1", "ADD a b", "FROM build", "COPY a b", "COPY --from=build a ./", "RUN --network=none a",
     "ENV a=$b", "ENV a b", "USER quire", "WORKDIR here", "CMD quire", "USER 1\nRUN a"],
)  # fmt: skip
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="not implemented here: "):
        stages_of(f"FROM a:b\n{line}", {})


def test_a_command_becomes_itself_in_a_root_with_its_own_variables() -> None:
    *mounts, words = entering(Path("/r"), "10001", "/home", {"A": "x y"}, ["quire", "serve"])
    assert [mount[-1] for mount in mounts] == ["/r/proc", "/r/dev"]
    assert shlex.join(words) == "exec chroot --userspec=10001 /r env -i -C /home 'A=x y' quire serve"
