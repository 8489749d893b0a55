"""The collectives of the process group in Python. As collectives.cpp."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.collectives.c10d._python_base import BaseGroup, Issue, Tensors, checked
from phalanx.collectives.c10d._python_stream import AnyWork
from phalanx.collectives.c10d._python_tensors import (
    Buffers,
    check_tensor,
    elements_of,
    only,
    reduced_dtype,
    reduction_of,
    same_view,
    share_memory,
)
from phalanx.collectives.c10d._python_work import Work
from phalanx.collectives.c10d._torch_compat import options
from phalanx.core import Call, Group

_Output = TypeVar("_Output")


def _pairs(
    outputs: Sequence[_Output], inputs: Sequence[torch.Tensor], what: str
) -> Iterator[tuple[_Output, torch.Tensor]]:
    if len(outputs) != len(inputs):
        raise ValueError(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")
    return zip(outputs, inputs, strict=True)


def _addresses(buffers: Buffers, outputs: Tensors, inputs: Tensors) -> list[tuple[int, int]]:
    """The addresses of each output and its input. Outputs that are the same elements with the same input are staged."""

    def repeated(one: int, other: int) -> bool:
        return same_view(outputs[one], outputs[other]) and same_view(inputs[one], inputs[other])

    buffers.staged = share_memory(outputs, repeated)
    outs = [(buffers.writable(output), output.nbytes) for output in outputs]
    return [(out, buffers.apart_from_all(tensor, outs)) for (out, _), tensor in zip(outs, inputs, strict=True)]


class Collectives(BaseGroup):
    """Torch's arguments, checked, as calls of the core."""

    @checked
    def allreduce(self, tensors: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "all_reduce", opts or options.AllreduceOptions()
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self.allreduce_sparse(tensors, opts)
        tensor = only(tensors, what)
        op, scale = reduction_of(opts.reduceOp)
        dtype, buffers = reduced_dtype(tensor), Buffers(tensors)
        data = buffers.writable(tensor, read_too=True)
        call: Issue = lambda group, more: group.all_reduce(data, data, tensor.numel(), dtype, op, **more)  # noqa: E731
        return self._issue(what, opts, buffers, call, scale=scale)

    @checked
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "all_reduce_coalesced", opts or options.AllreduceCoalescedOptions()
        op, scale = reduction_of(opts.reduceOp)
        for tensor in tensors:
            check_tensor(tensor, what)
        buffers, calls = Buffers(tensors), []

        def may_share(one: int, other: int) -> bool:  # then, wherever an element is found twice, its sum is the same
            a, b = tensors[one], tensors[other]
            return (a.dtype, a.is_conj(), a.is_neg()) == (b.dtype, b.is_conj(), b.is_neg())

        buffers.staged = share_memory(tensors, may_share)
        for tensor in tensors:
            data = buffers.writable(tensor, read_too=True)
            calls.append(Call.all_reduce(data, data, tensor.numel(), reduced_dtype(tensor), op))
        return self._coalesced(what, opts, buffers, calls, scale)

    def _coalesced(self, what: str, opts: Any, buffers: Buffers, calls: list[Call], scale: float = 1.0) -> AnyWork:
        if not calls:
            raise ValueError(f"{what}: the list of tensors is empty")
        return self._issue(what, opts, buffers, lambda group, more: group.coalesced(calls, **more), scale=scale)

    @checked
    def broadcast(self, tensors: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "broadcast", opts or options.BroadcastOptions()
        tensor, root, buffers = only(tensors, what), self._root(opts.rootRank, what), Buffers(tensors)
        data = buffers.writable(tensor, read_too=True, copy_back=root != self._position)
        count, dtype = elements_of(tensor)
        return self._issue(what, opts, buffers, lambda group, more: group.broadcast(data, count, dtype, root, **more))

    @checked
    def reduce(self, tensors: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "reduce", opts or options.ReduceOptions()
        tensor, root, buffers = only(tensors, what), self._root(opts.rootRank, what), Buffers(tensors)
        op, scale = reduction_of(opts.reduceOp)
        dtype, here = reduced_dtype(tensor), root == self._position
        data = buffers.writable(tensor, read_too=True, copy_back=here)
        out, n = data if here else None, tensor.numel()
        call: Issue = lambda group, more: group.reduce(data, out, n, dtype, op, root, **more)  # noqa: E731
        return self._issue(what, opts, buffers, call, scale=scale)

    @checked
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "all_gather", opts or options.AllgatherOptions()
        tensor = only(inputs, what)
        if len(outputs) != 1:
            raise ValueError(f"{what}: one list of outputs is needed, not {len(outputs)}")
        self._check_list(outputs[0], what)
        for each in outputs[0]:
            check_tensor(each, what, tensor)
        own = outputs[0][self._position].numel()
        if own != tensor.numel():
            raise ValueError(f"{what}: the input has {tensor.numel()} elements, and the output for this rank {own}")
        buffers = Buffers(outputs[0])
        out, (count, dtype) = buffers.all_writable(outputs[0]), elements_of(tensor)
        counts = [elements_of(each).numel for each in outputs[0]]
        total = sum(each.nbytes for each in outputs[0])
        source = buffers.apart(buffers.readable(tensor), tensor.nbytes, out, total)

        def call(group: Group, more: dict[str, Any]) -> Any:
            if len(set(counts)) == 1:
                return group.all_gather(source, out, count, dtype, **more)
            return group.all_gather_v(source, out, counts, dtype, **more)

        return self._issue(what, opts, buffers, call)

    @checked
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> AnyWork:
        what, opts = "all_gather_into_tensor", opts or options.AllgatherOptions()
        buffers = Buffers([output])
        out, source = self._blocks(what, buffers, output, tensor, tensor.numel(), output)
        count, dtype = elements_of(tensor)
        return self._issue(what, opts, buffers, lambda group, more: group.all_gather(source, out, count, dtype, **more))

    _allgather_base = all_gather_single

    def _blocks(
        self, what: str, buffers: Buffers, output: torch.Tensor, tensor: torch.Tensor, block: int, whole: torch.Tensor
    ) -> tuple[int, int]:
        """Addresses of an output and an input of which the whole one has as many blocks as there are ranks."""
        self._check_blocks(what, output, tensor, block, whole)
        out = buffers.writable(output)
        return out, buffers.apart(buffers.readable(tensor), tensor.nbytes, out, output.nbytes)

    def _check_blocks(
        self, what: str, output: torch.Tensor, tensor: torch.Tensor, block: int, whole: torch.Tensor
    ) -> None:
        check_tensor(output, what)
        check_tensor(tensor, what, output)
        if whole.numel() != self._count * block:
            side = "output" if whole is output else "input"
            raise ValueError(f"{what}: the {side} has {whole.numel()} elements and needs {self._count} times {block}")

    @checked
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "all_gather_into_tensor_coalesced", opts or options.AllgatherOptions()
        buffers = Buffers(outputs)
        for output, tensor in _pairs(outputs, inputs, what):
            self._check_blocks(what, output, tensor, tensor.numel(), output)
        addresses = _addresses(buffers, outputs, inputs)
        calls = [
            Call.all_gather(source, out, *elements_of(tensor))
            for (out, source), tensor in zip(addresses, inputs, strict=True)
        ]
        return self._coalesced(what, opts, buffers, calls)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @checked
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "all_gather_coalesced", opts or options.AllgatherOptions()
        if len(outputs) != self._count:
            raise ValueError(
                f"{what}: {self._count} lists of outputs are needed, one for each rank, not {len(outputs)}"
            )
        for blocks in outputs:
            for output, tensor in _pairs(blocks, inputs, what):
                check_tensor(output, what, tensor)
                if output.numel() != tensor.numel():
                    raise ValueError(f"{what}: an output has {output.numel()} elements, and its input {tensor.numel()}")
        count, every = len(inputs), [each for blocks in outputs for each in blocks]
        buffers = Buffers(every)

        def repeated(one: int, other: int) -> bool:  # one input twice, into the same outputs
            given = same_view(inputs[one % count], inputs[other % count])
            return one // count == other // count and given and same_view(every[one], every[other])

        buffers.staged = share_memory(every, repeated)
        by_input = list(zip(*outputs, strict=True))
        outs = [(buffers.all_writable(blocks), sum(each.nbytes for each in blocks)) for blocks in by_input]
        calls = [
            Call.all_gather(buffers.apart_from_all(tensor, outs), out, *elements_of(tensor))
            for (out, _), tensor in zip(outs, inputs, strict=True)
        ]
        return self._coalesced(what, opts, buffers, calls)

    @checked
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "gather", opts or options.GatherOptions()
        tensor, root = only(inputs, what), self._root(opts.rootRank, what)
        buffers = Buffers()
        source, out = buffers.readable(tensor), None
        if root == self._position:
            if len(outputs) != 1:
                raise ValueError(f"{what}: the root needs one list of outputs, not {len(outputs)}")
            self._check_sizes(outputs[0], tensor, what)
            buffers.outputs = list(outputs[0])
            out = buffers.all_writable(outputs[0])
            source = buffers.apart(source, tensor.nbytes, out, sum(each.nbytes for each in outputs[0]))
        elif outputs and outputs[0]:
            raise ValueError(f"{what}: outputs on a rank that is not the root")
        count, dtype = elements_of(tensor)
        call: Issue = lambda group, more: group.gather(source, out, count, dtype, root, **more)  # noqa: E731
        return self._issue(what, opts, buffers, call)

    @checked
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> AnyWork:
        what, opts = "scatter", opts or options.ScatterOptions()
        tensor, root, buffers = only(outputs, what), self._root(opts.rootRank, what), Buffers(outputs)
        out, source = buffers.writable(tensor), None
        if root == self._position:
            if len(inputs) != 1:
                raise ValueError(f"{what}: the root needs one list of inputs, not {len(inputs)}")
            self._check_sizes(inputs[0], tensor, what)
            total = sum(each.nbytes for each in inputs[0])
            source = buffers.apart(buffers.all_readable(inputs[0]), total, out, tensor.nbytes)
        elif inputs and inputs[0]:
            raise ValueError(f"{what}: inputs on a rank that is not the root")
        count, dtype = elements_of(tensor)
        call: Issue = lambda group, more: group.scatter(source, out, count, dtype, root, **more)  # noqa: E731
        return self._issue(what, opts, buffers, call)

    @checked
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> AnyWork:
        what, opts = "reduce_scatter", opts or options.ReduceScatterOptions()
        tensor = only(outputs, what)
        if len(inputs) != 1:
            raise ValueError(f"{what}: one list of inputs is needed, not {len(inputs)}")
        self._check_list(inputs[0], what)
        for each in inputs[0]:
            check_tensor(each, what, tensor)
        counts, n = [each.numel() for each in inputs[0]], tensor.numel()
        if counts[self._position] != n:
            raise ValueError(
                f"{what}: the output has {n} elements, and the input for this rank {counts[self._position]}"
            )
        op, scale = reduction_of(opts.reduceOp)
        dtype, buffers = reduced_dtype(tensor), Buffers(outputs)
        out = buffers.writable(tensor)
        total = sum(each.nbytes for each in inputs[0])
        source = buffers.apart(buffers.all_readable(inputs[0]), total, out, tensor.nbytes)

        def call(group: Group, more: dict[str, Any]) -> Any:
            if len(set(counts)) == 1:
                return group.reduce_scatter(source, out, n, dtype, op, **more)
            return group.reduce_scatter_v(source, out, counts, dtype, op, **more)

        return self._issue(what, opts, buffers, call, scale=scale)

    @checked
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> AnyWork:
        what, opts = "reduce_scatter_tensor", opts or options.ReduceScatterOptions()
        op, scale = reduction_of(opts.reduceOp)
        dtype, buffers, n = reduced_dtype(output), Buffers([output]), output.numel()
        out, source = self._blocks(what, buffers, output, tensor, n, tensor)
        call: Issue = lambda group, more: group.reduce_scatter(source, out, n, dtype, op, **more)  # noqa: E731
        return self._issue(what, opts, buffers, call, scale=scale)

    _reduce_scatter_base = reduce_scatter_single

    @checked
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "reduce_scatter_tensor_coalesced", opts or options.ReduceScatterOptions()
        op, scale = reduction_of(opts.reduceOp)
        buffers = Buffers(outputs)
        for output, tensor in _pairs(outputs, inputs, what):
            self._check_blocks(what, output, tensor, output.numel(), tensor)
        addresses = _addresses(buffers, outputs, inputs)
        calls = [
            Call.reduce_scatter(source, out, output.numel(), reduced_dtype(output), op)
            for (out, source), output in zip(addresses, outputs, strict=True)
        ]
        return self._coalesced(what, opts, buffers, calls, scale)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @checked
    def allreduce_sparse(self, tensors: Tensors, opts: Any) -> AnyWork:
        """Of sparse COO tensors: each rank's indices and values, gathered and added up. Runs to its end at once."""
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError("all_reduce: sparse tensors can only be added up")
        gather = options.AllgatherOptions()
        gather.timeout, gather.asyncOp = opts.timeout, False
        mine = tensors[0].coalesce()
        counts = torch.empty(self._count, dtype=torch.int64)
        self.all_gather_single(counts, torch.tensor([mine._nnz()]), gather)

        def gathered(block: torch.Tensor) -> torch.Tensor:  # nnz first
            blocks = [block.new_empty((int(n), *block.shape[1:])) for n in counts]
            self.allgather([blocks], [block], gather)
            return torch.cat(blocks)

        with torch.no_grad():
            indices = gathered(mine.indices().t().contiguous()).t()
            tensors[0].copy_(torch.sparse_coo_tensor(indices, gathered(mine.values()), mine.shape).coalesce())
        work = Work(self._engine, "all_reduce", Buffers(tensors), self._limit_ms(opts), self._sequence)
        work.completed()
        return work
