"""Runs the steps of deploy/Dockerfile in plain directories, where there is no builder of images. As root, on Linux:

    scripts/image_steps build DIRECTORY ROOT [NAME=VALUE ...]
    scripts/image_steps run DIRECTORY [COMMAND ...]

`build` makes a directory of each stage. ROOT, a root file system with python and pip, stands in for every FROM's image;
NAME=VALUE is an ARG. `run` becomes COMMAND (default: CMD) as a container would: as USER, with the variables of ENV and
a read-only root, where /tmp and the cache directory are in memory. Both use this machine's network.

Only the instructions of that file are known, in the forms that it uses; any other is an error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join

SOURCE = Path(__file__).resolve().parents[1]
DOCKERFILE = SOURCE / "deploy" / "Dockerfile"
PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FORMS = {
    "FROM": r"\S+:\S+(?: AS (\w+))?",
    "ARG": r"(\w+)=?(\S*)",
    "ENV": r"(\w+)=([^\s$\"']+)",
    "WORKDIR": r"/\S*",
    "USER": r"\d+",
    "COPY": r"(?!--)(?:(\S+) \1|.+ \./)",  # what is copied keeps its name
    "RUN": r"(?:--mount=type=bind,from=(\w+),source=(\S+),target=(\S+) )?((?!--).+)",
    "CMD": r"\[.*\]",
    "EXPOSE": r"\d+",
    "HEALTHCHECK": r".*",
}


@dataclass
class Stage:
    """One stage: its steps, and what holds after those that were read."""

    name: str
    holds: dict[str, str] = field(default_factory=lambda: {"WORKDIR": "/", "USER": "0"})
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: {"HOME": "/root", "PATH": PATH})
    steps: list[tuple[str, re.Match[str], str, dict[str, str]]] = field(default_factory=list)
    """(instruction, what follows the word, working directory, variables)."""


def stages_of(text: str, build_args: Mapping[str, str]) -> list[Stage]:
    """Returns the stages of a Dockerfile, the first for what precedes them. Raises ValueError for what is not known."""
    stages = [Stage("")]
    text = re.sub(r"\s*\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.strip().partition(" ")
        match, stage = re.fullmatch(FORMS.get(name, "(?!)"), rest), stages[-1]
        if match is None or (name in ("COPY", "RUN") and stage.holds["USER"] != "0"):
            raise ValueError(f"not implemented here: {line}")
        if name == "FROM":
            stages.append(stage := Stage(match[1] or "image"))
        elif name == "ARG":
            stage.arguments[match[1]] = build_args.get(match[1], match[2])
        elif name == "ENV":
            stage.environment[match[1]] = match[2]
        stage.holds[name] = rest
        stage.steps.append((name, match, stage.holds["WORKDIR"], {**stage.arguments, **stage.environment}))
    if unused := build_args.keys() - {name for stage in stages for name in stage.arguments}:
        raise ValueError(f"no ARG is named {', '.join(sorted(unused))}")
    return stages


def shell(commands: list[list[str]]) -> list[str]:
    """Returns the command that runs `commands`, whose mounts no other process sees."""
    return ["unshare", "--mount", "sh", "-ec", "\n".join(map(join, commands))]


def entering(root: Path, user: str, workdir: str, variables: Mapping[str, str], words: list[str]) -> list[list[str]]:
    """Returns the commands that become `words` in `root`."""
    chroot = ["exec", "chroot", f"--userspec={user}", str(root), "env", "-i", "-C", workdir]
    return [
        ["mount", "-t", "proc", "proc", f"{root}/proc"],
        ["mount", "--rbind", "/dev", f"{root}/dev"],
        [*chroot, *(f"{name}={value}" for name, value in variables.items()), *words],
    ]


def build(directory: Path, base: str, stages: list[Stage]) -> None:
    """Runs every step. Raises CalledProcessError for one that fails."""
    ignored = re.findall(r"^\*\*/(.*)", Path(f"{DOCKERFILE}.dockerignore").read_text(), re.MULTILINE)
    archive = ["tar", "-c", "-C", str(SOURCE), *(f"--exclude={pattern}" for pattern in ignored)]
    steps = [(directory / stage.name, *step) for stage in stages[1:] for step in stage.steps]
    for root, name, match, workdir, variables in steps:
        print(f"==> {root.name}: {name} {match[0]}", flush=True)
        if name == "FROM":
            subprocess.run(["cp", "-a", "-T", base, root], check=True)
        elif name == "COPY":
            files = subprocess.check_output([*archive, *match[0].split()[:-1]])
            subprocess.run(["tar", "-x", "-C", f"{root}{workdir}", "--no-same-owner"], input=files, check=True)
        elif name == "RUN":
            commands = entering(root, "0", workdir, variables, ["sh", "-c", match[4]])
            if match[1]:
                target = f"{root}{match[3]}"
                Path(target).mkdir(exist_ok=True)
                commands.insert(0, ["mount", "--bind", f"{directory / match[1]}{match[2]}", target])
            subprocess.run(shell(commands), check=True)
        Path(f"{root}{workdir}").mkdir(parents=True, exist_ok=True)


def run(root: Path, stage: Stage, words: list[str]) -> None:
    """Becomes `words` in the finished `root`."""
    user, variables = stage.holds["USER"], stage.environment
    (home,) = re.findall(rf"^.*:{user}:.*:(.*):.*$", (root / "etc/passwd").read_text(), re.MULTILINE)
    commands = [["mount", "--bind", str(root), str(root)], ["mount", "-o", "remount,bind,ro", str(root)]]
    writable = [f"{root}/tmp", f"{root}{variables['QUIRE_CACHE_ROOT']}"]
    commands += [["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", path] for path in writable]
    words = words or json.loads(stage.holds["CMD"])
    os.execvp(
        "unshare", shell(commands + entering(root, user, stage.holds["WORKDIR"], variables | {"HOME": home}, words))
    )


if __name__ == "__main__":
    verb, directory, *rest = [*sys.argv[1:], "", ""]
    given = [word for word in rest if word]
    if verb not in ("build", "run") or not directory or (verb == "build" and not given):
        sys.exit(str(__doc__))
    build_args = dict(item.split("=", 1) for item in given[1:]) if verb == "build" else {}
    stages = stages_of(DOCKERFILE.read_text(encoding="utf-8"), build_args)
    if verb == "build":
        if Path(directory).exists():
            sys.exit(f"{directory} is there already; `build` makes a new directory")
        Path(directory).mkdir(parents=True)
        build(Path(directory).resolve(), given[0], stages)
    else:
        run(Path(directory).resolve() / stages[-1].name, stages[-1], given)
