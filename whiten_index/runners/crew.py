"""The crew of workers on a cluster, which lives as long as a build."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whiten_index.errors import ClusterError, ConfigError, WhitenIndexError
from whiten_index.runners.actor import Actor
from whiten_index.runners.slots import Machine, Size, Slot, spread, too_small
from whiten_index.version import VERSION

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_WITHOUT_ANY = 300.0
_SECONDS_WITHOUT_SIGN = 300.0
_STARTS, _DEATHS = 3, 8
# Workers that are started side by side, as all read the model from one disk; one that was not
# ready by then waits for room, or hangs, and holds up no other.
_STARTING, _SECONDS_TO_START = 64, 60.0


@dataclass(eq=False)
class Member:
    """A worker of a crew.

    Attributes:
        name: of it, never given to another.
        slot: what it was given.
        actor: Ray's handle.
        node: the machine it is on, empty until it said.
        sign: of life that it was asked for, None where none is awaited.
        asked: when it was asked, in seconds of the monotonic clock.
    """

    name: str
    slot: Slot
    actor: Any
    node: str = ""
    sign: Any = None
    asked: float = 0.0


@dataclass
class _Post:
    """A place in the crew, for which another worker is started when one dies."""

    slot: Slot
    failures: int = 0
    deaths: int = 0
    member: Member | None = None
    hello: Any = None
    hired: float = 0.0
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
        self._late_noted = False
        self.gpu = self._takes_gpus()
        self._actor_class = self.ray.remote(Actor)
        self._recruit()
        if not self._posts:
            raise ConfigError(
                f"{too_small(self.size, self._machines())}; start more machines, or "
                "say with --workers how many it will have"
            )

    def start(self, check: Callable[[], None] | None = None) -> None:
        """Start the workers, which are ready when ``tend`` has seen them.

        Args:
            check: called by each on its machine before it is given work; what it raises is told.
        """
        self.check = check
        self._fill(time.monotonic())

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

    def tend(self) -> list[tuple[Member, BaseException]]:
        """See who is ready, replace who died, take in new machines.

        Returns:
            Workers that are found to be dead, and of what: they are to be lost.

        Raises:
            ClusterError: there is no worker, and none can be had.
            WhitenIndexError: what the check of every worker said.
        """
        now, dead = time.monotonic(), list[tuple[Member, BaseException]]()
        if now - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._recruit()
            dead = self._look_for_life(now)
            self._note_late(now)
        for post in tuple(self._posts):
            self._greet(post)
        self._fill(now)
        self._require_any(now)
        return dead

    def lose(self, member: Member, why: BaseException | None = None) -> None:
        """Take a worker out of the crew and end it; another is started for it.

        Args:
            member: of the crew.
            why: what it died of; None for one that is only busy with what nobody needs any more.
        """
        self.deaths += why is not None
        if why is not None and member.name in self.members:
            self.note(f"note: {member.name} on {member.node} died; what it had is done by others")
        self.members.pop(member.name, None)
        self._why = why or self._why
        # Perhaps only its answer was lost.
        self._kill(member)
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

    def end(self) -> None:
        """End all workers."""
        held = [post.member for post in self._posts if post.member is not None]
        for member in (*held, *self._parked):
            self._kill(member)
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

    def _machines(self) -> list[Machine]:
        return [Machine.of(node) for node in self.ray.nodes() if node["Alive"]]

    def _recruit(self) -> None:
        """Open a post for every machine, or GPU, that came since; or as many as were asked for."""
        if self.size.workers is not None:
            if not self._posts:
                self._posts = [_Post(slot) for slot in self._asked(self.size.workers)]
            return
        with contextlib.suppress(Exception):
            alive = {machine.name: machine for machine in self._machines()}
            for post in self._posts:
                post.gone = post.gone or post.slot.node not in alive
            self._posts = [each for each in self._posts if each.member or not each.gone]
            for name in alive.keys() - self._nodes:
                self._nodes.add(name)
                self._posts += [_Post(slot) for slot in alive[name].slots(gpu=self.gpu)]

    def _asked(self, workers: int) -> list[Slot]:
        machines = self._machines()
        if workers > sum(each.gpus if self.gpu else each.cpus for each in machines):
            # One that grows by itself sees what is waited for.
            self.note(f"note: {too_small(self.size, machines)} unless the cluster grows")
        return spread(workers, machines, gpu=self.gpu)

    def _look_for_life(self, now: float) -> list[tuple[Member, BaseException]]:
        """Ask each worker for a sign of life, end those whose process gives none, return the dead.

        One that waits for a disk gives signs all the same.
        """
        asked = [member for member in self.members.values() if member.sign is not None]
        signs = [member.sign for member in asked]
        heard = set(self.ray.wait(signs, num_returns=len(signs), timeout=0)[0]) if signs else set()
        dead = list[tuple[Member, BaseException]]()
        for member in self.members.values():
            if member.sign is None:
                member.sign, member.asked = member.actor.sign.remote(), now
            elif member.sign in heard:
                try:
                    self.ray.get(member.sign)
                except self.ray.exceptions.RayError as error:
                    dead.append((member, error))
                member.sign = None
            elif now - member.asked > _SECONDS_WITHOUT_SIGN:
                member.asked = now
                self.note(
                    f"note: {member.name} on {member.node} gave no sign of life for "
                    f"{_SECONDS_WITHOUT_SIGN:.0f} seconds, and is ended"
                )
                self._kill(member)
        return dead

    def _note_late(self, now: float) -> None:
        """Say once that workers do not become ready, as where the cluster is busy."""
        late = [
            post for post in self._posts
            if post.hello is not None and now - post.hired > _SECONDS_WITHOUT_SIGN
        ]  # fmt: skip
        if late and self.members and not self._late_noted:
            self._late_noted = True
            self.note(
                f"note: {len(late)} of {self.places} workers are not ready after "
                f"{_SECONDS_WITHOUT_SIGN:.0f} seconds, the others work; look at ray status"
            )

    def _kill(self, member: Member) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(member.actor)

    def _fill(self, now: float) -> None:
        """Start workers where there is none, so many at a time."""
        starting = sum(
            post.hello is not None and now - post.hired < _SECONDS_TO_START for post in self._posts
        )
        for post in self._posts:
            if starting < _STARTING and post.member is None and not post.gone:
                self._hire(post, now)
                starting += 1

    def _hire(self, post: _Post, now: float) -> None:
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
        post.hello, post.hired = actor.hello.remote(self.check), now

    def _greet(self, post: _Post) -> None:
        """Take in the worker of a post if it became ready; a failed start is counted."""
        if post.hello is None or post.member is None:
            return
        ready, _ = self.ray.wait([post.hello], timeout=0)
        if not ready:
            return
        member, hello, post.hello = post.member, post.hello, None
        try:
            node, refusal = self.ray.get(hello)
        except Exception as error:
            self._failed_start(post, member, error)
            return
        if refusal is not None:
            self._refused(post, member, node, refusal)
            return
        post.failures, member.node = 0, node
        self.members[member.name] = member

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


def first_line(error: BaseException) -> str:
    """Return the first line of a message, which Ray makes long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
