"""Control groups: the kernel counts the memory of the processes in one and ends them where it exceeds a limit.

Both versions of them do the same under other names. What a group counts includes the system's cache of the files that its
processes read; that part goes away by itself when the limit is near, `own` does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a version of control groups calls things; `swap_limit` is the value that forbids swapping, None: the limit."""

    version: str
    limit: str
    swap: str
    swap_limit: int | None
    current: str
    peak: str
    own: str
    events: str


V1 = Names(version="cgroup v1", limit="memory.limit_in_bytes", swap="memory.memsw.limit_in_bytes", swap_limit=None,
           current="memory.usage_in_bytes", peak="memory.max_usage_in_bytes", own="total_rss", events="memory.oom_control")
V2 = Names(version="cgroup v2", limit="memory.max", swap="memory.swap.max", swap_limit=0, current="memory.current",
           peak="memory.peak", own="anon", events="memory.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A control group: its folder."""

    folder: Path
    names: Names

    @property
    def current(self) -> int:
        """Bytes that the group takes now, cache included."""
        return int((self.folder / self.names.current).read_text())

    @property
    def peak(self) -> int:
        """The most bytes that the group has taken, cache included; 0 where the kernel does not say (v2 before 5.19)."""
        with suppress(FileNotFoundError):
            return int((self.folder / self.names.peak).read_text())
        return 0

    @property
    def own(self) -> int:
        """Bytes of the processes' own memory, which no cache is."""
        return self._field("memory.stat", self.names.own)

    @property
    def killed(self) -> int:
        """How many processes the kernel has ended because the limit was exceeded."""
        return self._field(self.names.events, "oom_kill")

    @property
    def processes(self) -> Path:
        """The file that moves a process into the group when its number is written there."""
        return self.folder / "cgroup.procs"

    def limit(self, limit: int) -> None:
        """Let the group take `limit` bytes at most, and swap nothing."""
        (self.folder / self.names.limit).write_text(str(limit))
        with suppress(OSError):  # a kernel that does not count swap
            swap = self.names.swap_limit
            (self.folder / self.names.swap).write_text(str(limit if swap is None else swap))

    def remove(self) -> None:
        """Remove the group, in which nobody is any more."""
        with suppress(OSError):
            self.folder.rmdir()

    def _field(self, file: str, name: str) -> int:
        fields = dict(line.split() for line in (self.folder / file).read_text().splitlines())
        return int(fields.get(name, 0))


def own_groups() -> Iterator[Group]:
    """Yield the groups that count this process's memory: that of version 2, then that of version 1."""
    own: dict[str, str] = {}  # which controllers: which path
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(Path("/proc/self/mountinfo")):
        fields, _, source = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = source.split()[:3]
        if kind == "cgroup2" and "" in own:
            yield Group(folder=_below(Path(point), root, own[""]), names=V2)
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            yield Group(folder=_below(Path(point), root, own["memory"]), names=V1)


def own_group(way: str) -> Group | None:
    """Return the group in which this process is under a cap, by the name of the way that put it there."""
    version = {V1.version: V1, V2.version: V2, "systemd": V2}.get(way)
    return next((group for group in own_groups() if group.names is version), None)


def make(name: str) -> Iterator[Group]:
    """Yield new groups called `name` below those of this process, or below their parents, wherever one can be made.

    Version 2 lets a group divide its memory only if no process is in it, so that there the new one may have to be a sibling.
    """
    for group in sorted(own_groups(), key=lambda group: group.names.version, reverse=True):
        for around in (group.folder, *group.folder.parents):
            if not (around / "cgroup.procs").exists():
                break
            if group.names is V2 and not _divides_memory(around):
                continue
            with suppress(OSError):
                (around / name).mkdir()
                yield Group(folder=around / name, names=group.names)


def _divides_memory(folder: Path) -> bool:
    """Whether the groups below `folder` can have limits of their own; if not yet, ask for it."""
    control = folder / "cgroup.subtree_control"
    with suppress(OSError):
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
        return "memory" in control.read_text().split()
    return False


def _below(point: Path, root: str, path: str) -> Path:
    """Return where `path` lies if `root` is mounted at `point`."""
    with suppress(ValueError):
        return point / Path(path).relative_to(root)
    return point


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
