"""The calls to a group of ranks.

`start_forward` turns a group's method on shares into a function on whole experience.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from openrlhf.errors import LostRankError, OpenRLHFError
from openrlhf.trainer.ppo_utils.demands import TRAINED_ROLES
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples import scatter_back
from openrlhf.utils import stopping
from openrlhf.utils.threads import release_cores

Pending = Callable[[], list[Any]]
Forward = Callable[[Experience], Callable[[], Tensor]]  # `start_forward` of a group's method


class WorkerGroup:
    """Ranks that hold one model: one in this process, or those of a subclass. Methods are passed
    themselves: `group.call(PolicyModelActor.fit, ...)`.
    """

    num_shares = 1  # of samples; several ranks work on one where they split its rows or weights
    model_args: tuple[Any, ...] = ()  # what `init_model` of every rank takes

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def start(self, method: Callable[..., Any], shares: Iterable[tuple[Any, ...]]) -> Pending:
        """Call `method` on the ranks of each share, which may be made one at a time; return a
        function that waits for the results, one a share.
        """
        [share] = shares
        results = [self.worker.run(method.__name__, *share)]
        release_cores()  # the next phase may run in another thread
        return lambda: results

    def call(self, method: Callable[..., Any], *args: object) -> list[Any]:
        """Call `method` with the same arguments on every rank; return the results, by rank."""
        return self.start(method, [args])()

    def call_aside(self, method: Callable[..., Any]) -> list[Any]:
        """Call `method` on every rank while the ranks do other work, for a thread that waits."""
        return [method(self.worker)]

    def start_again(self, why: LostRankError | None = None) -> int:
        """Start all ranks again with the model that they began with, `why` if one was lost; return
        its parameter count. Raise EngineError where that is not to be.
        """
        raise AssertionError("ranks in this process are lost with it")

    def close(self) -> None:
        """End all ranks; start none again. Those in this process end with it."""

    def divide(self, method: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        """Call `method` with a part of the items on each share; return the results of all items, in
        order.
        """
        width = self.num_shares
        results: list[Any] = [None] * len(items)
        for k, part in enumerate(self.start(method, [(items[k::width],) for k in range(width)])()):
            results[k::width] = part
        return results


def wait_for_all(calls: Mapping[str, Pending]) -> dict[str, list[Any]]:
    """Return the results of calls that run side by side, by name; raise the first error once all
    have ended.
    """
    results, errors = {}, []
    for name, wait in calls.items():
        try:
            results[name] = wait()
        except OpenRLHFError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def start_forward(
    group: WorkerGroup, method: Callable[..., Any], experience: Experience
) -> Callable[[], Tensor]:
    """Send shares of experience, balanced by tokens, to the ranks of a group; return a function
    that waits for a flat (N,) or (B,) column in sample order. A frozen model whose rank is lost
    meanwhile is started again for it.
    """
    parts, shares = experience.forward_shares(group.num_shares)

    def start() -> Pending:
        return group.start(method, ((share,) for share in shares))

    pending = start()

    def wait() -> Tensor:
        nonlocal pending
        while True:
            try:
                return scatter_back(pending(), parts, experience.num_actions)
            except LostRankError as why:
                if why.role in TRAINED_ROLES:
                    raise
                with stopping.leavable():  # no weights have changed in this step
                    group.start_again(why)
                pending = start()

    return wait


def run_forwards(
    forwards: Mapping[str, Forward], experience: Experience, *, in_turn: bool
) -> dict[str, Tensor]:
    """Return the column of every forward; `in_turn`: the groups share devices."""
    if in_turn:
        return {name: start(experience)() for name, start in forwards.items()}
    pending = {name: start(experience) for name, start in forwards.items()}
    return {name: wait() for name, wait in pending.items()}
