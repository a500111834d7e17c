"""Control groups: the kernel counts the memory of their processes, and kills a process when it exceeds the limit.

Both versions of cgroups provide this under different file names. The count includes the page cache of files that the
processes read; the kernel reclaims that part near the limit, but not `anonymous` memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The file names of a cgroup version; `swap_limit` is the value that forbids swapping, None: the memory limit."""

    version: str
    limit: str
    swap: str
    swap_limit: int | None
    current: str
    peak: str
    anonymous: str
    events: str


V1 = FileNames(version="cgroup v1", limit="memory.limit_in_bytes", swap="memory.memsw.limit_in_bytes", swap_limit=None,
               current="memory.usage_in_bytes", peak="memory.max_usage_in_bytes", anonymous="total_rss",
               events="memory.oom_control")
V2 = FileNames(version="cgroup v2", limit="memory.max", swap="memory.swap.max", swap_limit=0, current="memory.current",
               peak="memory.peak", anonymous="anon", events="memory.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
    """A control group, by its folder."""

    folder: Path
    names: FileNames

    @property
    def current(self) -> int:
        """Bytes of the group now, cache included."""
        return int((self.folder / self.names.current).read_text())

    @property
    def peak(self) -> int:
        """The peak of `current`; 0 where the kernel does not report it (v2 before Linux 5.19)."""
        with suppress(FileNotFoundError):
            return int((self.folder / self.names.peak).read_text())
        return 0

    @property
    def anonymous(self) -> int:
        """Bytes of the group without the page cache."""
        return self._field("memory.stat", self.names.anonymous)

    @property
    def killed(self) -> int:
        """The number of processes killed at the limit."""
        return self._field(self.names.events, "oom_kill")

    @property
    def processes(self) -> Path:
        """The file to which a process id is written to move that process into the group."""
        return self.folder / "cgroup.procs"

    def limit(self, limit: int) -> None:
        """Limit the group to `limit` bytes, without swap."""
        (self.folder / self.names.limit).write_text(str(limit))
        with suppress(OSError):  # a kernel that does not count swap
            swap = self.names.swap_limit
            (self.folder / self.names.swap).write_text(str(limit if swap is None else swap))

    def remove(self) -> None:
        """Remove the group, which must be empty."""
        with suppress(OSError):
            self.folder.rmdir()

    def _field(self, file: str, name: str) -> int:
        fields = dict(line.split() for line in (self.folder / file).read_text().splitlines())
        return int(fields.get(name, 0))


def current_groups() -> Iterator[ControlGroup]:
    """Yield the groups that count this process's memory: that of version 2, then that of version 1."""
    paths: dict[str, str] = {}  # path by controller
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(Path("/proc/self/mountinfo")):
        fields, _, source = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = source.split()[:3]
        if kind == "cgroup2" and "" in paths:
            yield ControlGroup(folder=_below(Path(point), root, paths[""]), names=V2)
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            yield ControlGroup(folder=_below(Path(point), root, paths["memory"]), names=V1)


def capping_group(method: str) -> ControlGroup | None:
    """Return the group that caps this process, given the name of the cap method."""
    version = {V1.version: V1, V2.version: V2, "systemd": V2}.get(method)
    return next((group for group in current_groups() if group.names is version), None)


def create_groups(name: str) -> Iterator[ControlGroup]:
    """Create groups called `name` below those of this process or their parents, and yield each one.

    In version 2 a group with child groups must not contain processes, so that the new group may have to be a sibling.
    """
    for group in sorted(current_groups(), key=lambda group: group.names.version, reverse=True):
        for parent in (group.folder, *group.folder.parents):
            if not (parent / "cgroup.procs").exists():
                break
            if group.names is V2 and not _has_memory_controller(parent):
                continue
            with suppress(OSError):
                (parent / name).mkdir()
                yield ControlGroup(folder=parent / name, names=group.names)


def _has_memory_controller(folder: Path) -> bool:
    """Whether child groups of `folder` can have memory limits; enables the controller if needed."""
    control = folder / "cgroup.subtree_control"
    with suppress(OSError):
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
        return "memory" in control.read_text().split()
    return False


def _below(point: Path, root: str, path: str) -> Path:
    """Return the location of `path` if `root` is mounted at `point`."""
    with suppress(ValueError):
        return point / Path(path).relative_to(root)
    return point


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
