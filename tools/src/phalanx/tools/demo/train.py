"""The training loop of one rank."""

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.collectives import broadcast, is_core_group, wait_tensor
from phalanx.dtensor import DTensor, Replicate, distribute_tensor
from phalanx.tools.demo.compiled import compile_model
from phalanx.tools.demo.data import Batches, read_text
from phalanx.tools.demo.meter import Call, Meter
from phalanx.tools.demo.model import Size, Transformer, first_weights
from phalanx.tools.demo.options import VOCABULARY_SIZE, Options
from phalanx.tools.demo.parallel import full_tensors, settle_gradients, shard_parameters
from phalanx.tools.demo.reference import CheckFailedError, compare
from phalanx.tools.demo.show import Training, say

_WARM_UP_STEPS = 20  # of the learning rate
_METER_EVERY = 10  # steps; the meter costs time, so the steps between are the ones whose time counts


@dataclass
class Record:
    """What the training was like.

    Attributes:
        losses: Of each step.
        step_seconds: Of each step without a meter, after the checked ones and that which compiles.
        metered_seconds: Of each step with a meter, likewise; there are none if the steps are compiled.
        communication_seconds: Of the steps with a meter, in collectives.
        calls: Collectives of one step.
        calls_at_start: Collectives before the first step.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    metered_seconds: list[float] = field(default_factory=list)
    communication_seconds: list[float] = field(default_factory=list)
    calls: Counter[Call] = field(default_factory=Counter)
    calls_at_start: Counter[Call] = field(default_factory=Counter)


class Trainer:
    """One rank of the training. Every method is collective.

    Args:
        options: The same on all ranks.
        group: The ranks.
    """

    def __init__(self, options: Options, group: dist.ProcessGroup) -> None:
        self.options = options
        self.group = group
        self.mesh = DeviceMesh("cpu", torch.arange(group.size()))
        self.size = Size(VOCABULARY_SIZE, options.sequence, options.layers, options.hidden, options.heads)
        self.model = Transformer(self.size)
        self.record = Record()
        self._batches = None if group.rank() else self._read_batches()
        self._shard_first_weights()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))

    def run(self) -> Record:
        """Check the first steps, and train."""
        steps, checked = self.options.steps, min(self.options.checked_steps, self.options.steps)
        if checked:
            self._say(f"steps 1 to {checked}, compared with an ordinary model in one process:")
        progress = None
        for step in range(1, steps + 1):
            if step == checked + 1:
                self._say("training:")
                progress = Training(steps, self.group.rank() == 0)
            if step == 2 and self.options.compile:  # the meter of the first sees no op of a compiled graph
                compile_model(self.model, self.options.compile)
                self._say(f"  from step 2 on compiled by the backend {self.options.compile!r}")
            meter = Meter() if self._is_metered(step) else None
            started = time.perf_counter()
            with meter or nullcontext():
                characters = self._next_batch()
                loss = self._gradients(characters)
            if step <= checked:
                self._check(step, characters, loss)
            self._update(step)
            self._note(step, loss, meter, time.perf_counter() - started)
            if progress is not None:
                progress.show(step, loss)
        if progress is not None:
            progress.end()
        return self.record

    def _is_metered(self, step: int) -> bool:
        return step == 1 or (step % _METER_EVERY == 0 and not self.options.compile)

    def _gradients(self, characters: torch.Tensor) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(characters)
        loss.backward()  # type: ignore[no-untyped-call]
        settle_gradients(self.model)
        return loss.item()

    def _update(self, step: int) -> None:
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.options.learning_rate * min(1.0, step / _WARM_UP_STEPS)
        self._optimizer.step()

    def _note(self, step: int, loss: float, meter: Meter | None, seconds: float) -> None:
        record = self.record
        record.losses.append(loss)
        if step == 1 and meter is not None:
            record.calls = meter.calls
        if step <= max(2 if self.options.compile else 1, self.options.checked_steps):
            return  # these steps do more than train
        if meter is None:
            record.step_seconds.append(seconds)
        else:
            record.metered_seconds.append(seconds)
            record.communication_seconds.append(meter.seconds)

    def _check(self, step: int, characters: DTensor, loss: float) -> None:
        self._check_copies()
        named = list(self.model.named_parameters())
        gradients = full_tensors({name: parameter.grad for name, parameter in named if parameter.grad is not None})
        weights = full_tensors({name: parameter.detach() for name, parameter in named})
        if self.group.rank() == 0:
            seen = compare(self.size, weights, characters.to_local(), loss, gradients)
            say(
                f"  step {step}  loss {loss:.6f}, one process {seen.loss:.6f}; all {len(named)} gradients agree "
                f"(greatest difference {seen.gradient_difference:.0e}, in {seen.weight})"
            )

    def _check_copies(self) -> None:
        copies = [one.detach() for one in self.model.parameters() if one.placements == (Replicate(),)]  # type: ignore[attr-defined]
        flat = torch.cat([one.to_local().flatten() for one in copies])  # type: ignore[attr-defined]
        if not torch.equal(wait_tensor(broadcast(flat, 0, self.group)), flat):
            raise CheckFailedError(f"rank {self.group.rank()}'s copies of norms and embeddings are not those of rank 0")

    def _next_batch(self) -> DTensor:
        if self._batches is not None:
            characters = self._batches.next()
        else:
            characters = torch.empty(self.options.sequence + 1, self.options.batch, dtype=torch.int64)
        return distribute_tensor(characters, self.mesh)

    def _read_batches(self) -> Batches:
        options = self.options
        text = read_text(options.text_bytes)
        say(f"text: {len(text.characters):,} characters, {text.files} files of the Python standard library")
        return Batches(text, options.sequence, options.batch, options.seed)

    def _shard_first_weights(self) -> None:
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        if self.group.rank() == 0:
            self.model.load_state_dict(first_weights(shapes, self.size.layers, self.options.seed))
        with Meter() as meter:
            shard_parameters(self.model, self.mesh)
        self.record.calls_at_start = meter.calls
        own = sum(parameter.to_local().numel() for parameter in self.model.parameters())  # type: ignore[attr-defined]
        if not is_core_group(self.group):
            self._say("note: the core cannot serve these ranks, so torch.distributed does; phalanx doctor may say why")
        self._say(
            f"model: layers {self.size.layers}, features {self.size.hidden}, heads {self.size.heads}; "
            f"{sum(shape.numel() for shape in shapes.values()):,} weights, of which each rank has {own:,}"
        )

    def _say(self, text: str) -> None:
        if self.group.rank() == 0:
            say(text)
