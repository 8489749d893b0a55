"""loss_parallel: the loss of scores whose classes are sharded, without gathering them."""

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.dtensor._mode import implicit_replication


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within it, cross_entropy and nll_loss take a plain target and weight beside scores that are a DTensor.

    That scores sharded on the classes are not gathered, forward and backward, needs no context: the algorithms of
    `algorithms/classes.py` do it wherever the classes are sharded, since the results are the same. So backward may run
    outside as well. What is left for the context is the plain target: it counts as replicated, so every rank must have
    the whole of it. On a mesh that shards the batch too, the target may be a DTensor with shards of it instead.

    Every reduction works on meshes of any number of dims, with `weight`, `ignore_index` and `label_smoothing`.
    Not collective; the losses within are.

        with loss_parallel():
            loss = F.cross_entropy(scores, target)      # scores: Shard(1), or (Shard(0), Shard(1))
            loss.backward()

    Source: torch.distributed.tensor.parallel.loss_parallel.
    """
    with implicit_replication():
        yield
