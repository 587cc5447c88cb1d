"""The crew of workers on a cluster, which lives as long as a build."""

from __future__ import annotations

import contextlib
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whiten_index.errors import ClusterError, ConfigError, WhitenIndexError
from whiten_index.release import VERSION
from whiten_index.runners.actor import Actor

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_WITHOUT_ANY = 300.0
_SECONDS_TO_KNOCK = 10.0
_STARTS, _DEATHS = 3, 8


@dataclass(frozen=True)
class Slot:
    """What a worker is given.

    Attributes:
        cpus: cores, which are also its threads.
        gpus: 0 or 1.
        node: the machine that it is meant for, empty for any.
    """

    cpus: int
    gpus: int
    node: str = ""


@dataclass(frozen=True)
class Size:
    """How many workers, and what each has.

    Attributes:
        workers: None for one a GPU, or one a machine where no GPU is used.
        gpu: whether each is to have a GPU; None for where the cluster has any.
    """

    workers: int | None = None
    gpu: bool | None = None


@dataclass(eq=False)
class Member:
    """A worker of a crew.

    Attributes:
        name: of it, never given to another.
        slot: what it was given.
        actor: Ray's handle.
        node: the machine it is on, empty until it said.
    """

    name: str
    slot: Slot
    actor: Any
    node: str = ""


@dataclass
class _Post:
    """A place in the crew, for which another worker is started when one dies."""

    slot: Slot
    failures: int = 0
    deaths: int = 0
    member: Member | None = None
    hello: Any = None
    gone: bool = False


@dataclass(eq=False)
class Crew:
    """Workers on a cluster; those that die are replaced, on another machine where need be.

    Attributes:
        check: what every new worker looks at before it is given work.
        members: name -> worker that is ready.
        note: told what a user should know.
        deaths: of workers, also of those that were not ready yet.
    """

    ray: Any
    size: Size
    note: Callable[[str], None]
    check: Callable[[], None] | None = None
    members: dict[str, Member] = field(default_factory=dict)
    deaths: int = 0

    def __post_init__(self) -> None:
        self._posts: list[_Post] = []
        self._parked: list[Member] = []
        self._count = self._phase = 0
        self._looked = 0.0
        self._nodes: set[str] = set()
        self._why: BaseException | None = None
        self._none_since: float | None = None
        self._noted: set[str] = set()
        self.gpu = self._takes_gpus()
        self._actor_class = self.ray.remote(Actor)
        self._recruit()
        if not self._posts:
            raise ConfigError(
                f"{_too_small(self.size, self.ray.cluster_resources())}; start more machines, or "
                "say with --workers how many it will have"
            )

    def start(self, check: Callable[[], None] | None = None) -> None:
        """Start the workers, which are ready when ``tend`` has seen them.

        Args:
            check: called by each on its machine before it is given work; what it raises is told.
        """
        self.check = check
        for post in self._posts:
            self._hire(post)

    def next_phase(self) -> int:
        """Return a number for a pass over items, greater than those before."""
        self._phase += 1
        return self._phase

    def proved(self, member: Member) -> None:
        """Note that a worker did an item: whatever it dies of is not its machine's fault."""
        for post in self._posts:
            if post.member is member:
                post.deaths = 0

    @property
    def places(self) -> int:
        """How many workers there are, or are to be."""
        return sum(not post.gone for post in self._posts)

    def starting(self) -> list[Any]:
        """Return what ``ray.wait`` tells new workers by."""
        return [post.hello for post in self._posts if post.hello is not None]

    def tend(self) -> list[Member]:
        """See who is ready, replace who died, take in new machines; return who is new.

        Raises:
            ClusterError: there is no worker, and none can be had.
            WhitenIndexError: what the check of every worker said.
        """
        now = time.monotonic()
        if now - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._recruit()
        new = [member for post in self._posts if (member := self._greet(post)) is not None]
        for post in self._posts:
            if post.member is None and not post.gone:
                self._hire(post)
        self._require_any(now)
        return new

    def lose(self, member: Member, why: BaseException | None = None) -> None:
        """Take a worker that died out of the crew; another is started for it."""
        self.deaths += why is not None
        if why is not None and member.name in self.members:
            self.note(f"note: {member.name} on {member.node} died; what it had is done by others")
        self.members.pop(member.name, None)
        self._why = why or self._why
        with contextlib.suppress(Exception):
            # Perhaps only its answer was lost.
            self.ray.kill(member.actor)
        for post in self._posts:
            if post.member is member:
                post.member = post.hello = None
                post.deaths += why is not None
                self._give_up(post, post.deaths >= _DEATHS, why)

    def _give_up(self, post: _Post, hopeless: bool, why: BaseException | None) -> None:
        if hopeless and not post.gone:
            post.gone = True
            said = f" ({first_line(why)})" if why else ""
            self.note(f"note: no worker stays alive at one of the places of the cluster{said}")

    def dismiss(self, member: Member) -> None:
        """End a worker that is still busy with what nobody needs any more."""
        self.lose(member)

    def end(self) -> None:
        """End all workers."""
        held = [post.member for post in self._posts if post.member is not None]
        for member in (*held, *self._parked):
            with contextlib.suppress(Exception):
                self.ray.kill(member.actor)
        self._posts.clear()
        self.members.clear()

    def _takes_gpus(self) -> bool:
        there = int(self.ray.cluster_resources().get("GPU", 0))
        if self.size.gpu and not there and self.size.workers is None:
            raise ConfigError(
                "--device names a GPU, and the cluster has none; start its machines with "
                "--num-gpus, say with --workers how many it will have, or use --device cpu"
            )
        return bool(there) if self.size.gpu is None else self.size.gpu

    def _recruit(self) -> None:
        """Open a post for every machine, or GPU, that came since; or as many as were asked for."""
        if self.size.workers is not None:
            if not self._posts:
                self._posts = [_Post(slot) for slot in self._asked(self.size.workers)]
            return
        with contextlib.suppress(Exception):
            alive = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
            for post in self._posts:
                post.gone = post.gone or post.slot.node not in alive
            self._posts = [each for each in self._posts if each.member or not each.gone]
            for name in alive.keys() - self._nodes:
                self._nodes.add(name)
                self._posts += [_Post(slot) for slot in _slots_of(alive[name], gpu=self.gpu)]

    def _asked(self, workers: int) -> list[Slot]:
        resources = self.ray.cluster_resources()
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        if workers > (gpus if self.gpu else cpus):
            # One that grows by itself sees what is waited for.
            self.note(f"note: {_too_small(self.size, resources)} unless the cluster grows")
        return [Slot(max(self._share(cpus, workers), 1), int(self.gpu))] * workers

    def _share(self, cpus: int, workers: int) -> int:
        """Return cores a worker such that all find room, machine by machine."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        sizes = [(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in nodes]
        for share in range(cpus // workers, 1, -1):
            room = (min(cpu // share, gpu if self.gpu else cpu) for cpu, gpu in sizes)
            if sum(room) >= workers:
                return share
        return 1

    def _hire(self, post: _Post) -> None:
        if post.member is not None or post.gone:
            return
        self._count += 1
        slot, name = post.slot, f"worker-{self._count}"
        where: Any = "SPREAD"
        if slot.node:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            where = NodeAffinitySchedulingStrategy(slot.node, soft=False)
        actor = self._actor_class.options(
            num_cpus=slot.cpus,
            num_gpus=slot.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=16,
            scheduling_strategy=where,
        ).remote(VERSION, platform.python_version(), slot.cpus)
        post.member = Member(name, slot, actor)
        post.hello = actor.hello.remote(self.check)

    def _greet(self, post: _Post) -> Member | None:
        """Return the worker of a post if it just became ready; a failed start is counted."""
        if post.hello is None or post.member is None:
            return None
        ready, _ = self.ray.wait([post.hello], timeout=0)
        if not ready:
            return None
        member, hello, post.hello = post.member, post.hello, None
        try:
            node, refusal = self.ray.get(hello)
        except Exception as error:
            self._failed_start(post, member, error)
            return None
        if refusal is not None:
            self._refused(post, member, node, refusal)
            return None
        post.failures, member.node = 0, node
        self.members[member.name] = member
        return member

    def _failed_start(self, post: _Post, member: Member, error: BaseException) -> None:
        self.lose(member, error)
        post.failures += 1
        self._give_up(post, post.failures >= _STARTS, error)

    def _refused(self, post: _Post, member: Member, node: str, why: BaseException) -> None:
        """Do without a machine where a worker cannot work.

        Where any machine will do, the worker stays to keep the place, so that none is sent there
        again, and another post is opened.
        """
        self._why, post.gone, post.member = why, True, None
        self._parked.append(member)
        if not post.slot.node and len(self._parked) <= (self.size.workers or 0):
            self._posts.append(_Post(post.slot))
        if node not in self._noted:
            self._noted.add(node)
            self.note(f"note: no worker on machine {node}: {why}")

    def _require_any(self, now: float) -> None:
        if self.members:
            self._none_since = None
            return
        open_posts = [post for post in self._posts if not post.gone]
        self._none_since = self._none_since or now
        if open_posts and now - self._none_since < _SECONDS_WITHOUT_ANY:
            return
        if isinstance(self._why, WhitenIndexError):
            raise self._why
        why = f" ({first_line(self._why)})" if self._why else ""
        waited = f" within {_SECONDS_WITHOUT_ANY:.0f} seconds" if open_posts else ""
        raise ClusterError(
            f"no worker could be started on the cluster{waited}{why}; look at ray status, and at "
            "whether whiten-index is installed on its machines. What was finished is kept: run "
            "the same command again"
        )


def _slots_of(node: dict[str, Any], *, gpu: bool) -> list[Slot]:
    resources = node["Resources"]
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if gpu:
        return [Slot(max(cpus // max(gpus, 1), 1), 1, node["NodeID"])] * min(gpus, cpus)
    return [Slot(cpus, 0, node["NodeID"])] if cpus else []


def _too_small(size: Size, resources: dict[str, float]) -> str:
    there = f"{int(resources.get('CPU', 0))} cores and {int(resources.get('GPU', 0))} GPUs"
    asked = "a worker" if size.workers is None else f"{size.workers} workers"
    return f"the cluster has {there}, too few for {asked}"


def knock(address: str) -> None:
    """Connect to a head's port, and leave.

    Raises:
        OSError: nobody listens there.
    """
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        place = host.strip("[]"), int(port)
        socket.create_connection(place, timeout=_SECONDS_TO_KNOCK).close()


def first_line(error: BaseException) -> str:
    """Return the first line of a message, which Ray makes long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
