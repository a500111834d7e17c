"""The first process on each host: it reads the job, takes over its environment and folder, and executes Shoal's process.

    python bootstrap.py SOURCE NODE

SOURCE is `-` for standard input (ten digits, a newline, and as many bytes of JSON), or a file. NODE is the number of the
host, or the variable that has it. The file imports the standard library alone, because Shoal itself may be found only in
the environment of the job, and it replaces the process, because variables such as LD_LIBRARY_PATH count at the start.
"""

import json
import os
import sys
import tempfile
from typing import NoReturn


def main(source: str, node: str) -> None:
    """Become the process of host `node` for the job at `source`."""
    number = node if node.isdecimal() else os.environ.get(node)
    if number is None:
        _end(f"the launcher does not set {node}")
    text = _from_stdin() if source == "-" else _from_file(source)
    job = json.loads(text)
    for name, value in job["environment"].items():
        os.environb[os.fsencode(name)] = os.fsencode(value)
    try:
        os.chdir(job["folder"])
    except OSError as error:
        _end(f"no folder {job['folder']}: {error.strerror}; start in a folder that every host has")
    file = tempfile.TemporaryFile()  # noqa: SIM115  it stays open across exec
    file.write(text)
    file.seek(0)
    os.set_inheritable(file.fileno(), True)
    words = [sys.executable, "-P", "-u", "-m", "shoal.launch.node", str(file.fileno()), number]
    os.execv(sys.executable, words)


def _from_stdin() -> bytes:
    """Read the job, and nothing that follows it."""
    head = _read(11)
    if not head.strip().isdigit():
        _end("standard input does not begin with a job")
    return _read(int(head))


def _read(count: int) -> bytes:
    text = b""
    while len(text) < count and (more := os.read(0, count - len(text))):
        text += more
    return text


def _from_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        _end(f"cannot read {path}: {error.strerror}; this launcher needs a folder that all hosts share: start in one, or "
             "use --launcher ssh")


def _end(reason: str) -> NoReturn:
    """Say why this host cannot run the job, where each kind of launcher shows it."""
    sys.stderr.write(f"shoal: {os.uname().nodename}: {reason}\n")
    sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
