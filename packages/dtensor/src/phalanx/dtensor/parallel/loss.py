"""loss_parallel: losses of scores whose classes are sharded, without gathering the scores."""

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.dtensor._mode import implicit_replication

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within it, cross_entropy and nll_loss take a plain target and weight together with scores that are a DTensor.

    Scores that are sharded on the classes are not gathered, forward and backward, with or without this context: see
    `_algorithms/class_parallel_loss.py`. So backward may run outside it. The context is for the plain target, which
    counts as replicated: every rank must have the whole target. On a mesh that shards the batch too, the target may be
    a sharded DTensor instead.

    Every reduction works on meshes of any number of dims, with `weight`, `ignore_index` and `label_smoothing`.
    Not collective; the losses within are.

        with loss_parallel():
            loss = F.cross_entropy(scores, target)      # scores: Shard(1), or (Shard(0), Shard(1))
            loss.backward()

    Source: torch.distributed.tensor.parallel.loss_parallel.

    Example:
        >>> scores = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
        >>> with loss_parallel():
        ...     loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2]))
        >>> loss.full_tensor()
        tensor(1.3863)
    """
    with implicit_replication():
        yield
