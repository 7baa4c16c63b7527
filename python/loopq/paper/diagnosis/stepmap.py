"""A recurrence step as a map on states: its values, exact Jacobian products, and the identity bypass."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopq.analysis.diagnosis.weights import Weights, as_stored
from loopq.errors import ConfigError, SystemContractError, require
from loopq.models.replace import Replaced
from loopq.storage.schema import Object
from loopq.systems.declare import parameter_of
from loopq.systems.stepwise import single_steps, steps_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.layers.shared import SharedParameter
    from loopq.systems.base import Batch, LoopedSystem


@contextlib.contextmanager
def promoted(model: nn.Module) -> Iterator[None]:
    """Promote 16-bit parameters and buffers to float32 inside the block. No value changes.

    Norm layers may derive an epsilon from their weights' type (`eps` None). It keeps its value in that type. Tensors
    of float32 and float64 stay. The original tensors are restored afterwards.
    """
    torch = require("torch")
    short = (torch.float16, torch.bfloat16)
    kept: list[tuple[Any, Any]] = []
    pinned: list[Any] = []
    kind = next((p.dtype for p in model.parameters() if p.dtype in short), None)
    try:
        if kind is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype in short:
                    kept.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
            for module in model.modules():
                if "eps" in module.__dict__ and module.eps is None:
                    pinned.append(module)
                    module.eps = torch.finfo(kind).eps
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
        for module in pinned:
            module.eps = None


def exposed_adapter(system: LoopedSystem, n_steps: int) -> SharedParameter:
    """Return the one exposed adapter of a system with a single-step function.

    Raises
    ------
    ConfigError
        If there is not exactly one, or no single-step function.
    """
    exposed = [p for p in system.shared_parameters(n_steps) if p.exposed and p.role == "adapter"]
    if len(exposed) != 1 or steps_of(system) is None:
        raise ConfigError(
            f"system {system.name!r}: factors of a step, and a bypass of one, need a single-step function and one "
            f"exposed adapter; it has {len(exposed)} of them"
        )
    return exposed[0]


class Bypass:
    """Add the state to the output of the exposed adapter, so a(s, e) becomes s + a(s, e).

    A context manager. Inside the block, `step` is the system's step with the identity path.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter, with a single-step function. Its one exposed layer has outputs of the state's shape.

    Raises
    ------
    ConfigError
        If the system has no single-step function, or not exactly one exposed adapter.
    """

    def __init__(self, system: LoopedSystem, n_steps: int) -> None:
        self._owner = exposed_adapter(system, n_steps).owners[0]
        self._system = single_steps(system)
        self._state: Any = None
        self._fired = False
        self._handle: Any = None

    def __enter__(self) -> Bypass:
        module = self._system.model.get_submodule(self._owner)
        self._handle = module.register_forward_hook(self._add)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _add(self, module: Any, args: Any, out: Any) -> Any:
        if self._state is None:
            return out
        if out.shape != self._state.shape:
            raise SystemContractError(
                f"{self._owner} returns shape {tuple(out.shape)} and the state has {tuple(self._state.shape)}: "
                "the bypass needs equal shapes"
            )
        self._fired = True
        return out + self._state

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """State after the step with the identity path."""
        self._state, self._fired = state, False
        try:
            after = self._system.step(state, embedding, t, n_steps)
        finally:
            self._state = None
        if not self._fired:
            raise SystemContractError(
                f"{self._owner} was not called in the step: no identity path could be added around it"
            )
        return after


@dataclass
class StepMap:
    """One recurrence step, as a map from state to state.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter, with a single-step function.
    embedding : Any
        Inputs of the step besides the state.
    t, n_steps : int
        Number of the step, and depth.
    bypass : Bypass, optional
        An entered bypass. The map then has the identity path.
    n_products : int
        Jacobian products so far.
    """

    system: LoopedSystem
    embedding: Any
    t: int
    n_steps: int
    bypass: Bypass | None = None
    n_products: int = 0

    def __call__(self, state: Tensor) -> Tensor:
        """State after the step."""
        owner: Any = self.bypass or self.system
        after: Tensor = owner.step(state, self.embedding, self.t, self.n_steps)
        return after

    def product(self, state: Tensor, direction: Tensor) -> Tensor:
        """J v at a state by forward-mode differentiation: exact and without a graph, at the cost of a few steps."""
        torch = require("torch")
        _load_forward_mode()
        self.n_products += 1
        # The flash kernel for CPUs has no forward derivative.
        with torch.no_grad(), _plain_attention():
            _, out = torch.func.jvp(self, (state,), (direction,))
        image: Tensor = out
        return image

    def check(self, state: Tensor, tolerance: float = 0.3) -> None:
        """Compare one product with a central difference. They differ if the step detaches its input.

        Raises
        ------
        SystemContractError
            If they differ by more than the curvature of a step explains.
        """
        torch = require("torch")
        generator = torch.Generator().manual_seed(1)
        v = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state)
        size = 1e-3 * float(state.double().norm() / v.double().norm())
        with torch.no_grad():
            difference = (self(state + size * v).double() - self(state - size * v).double()) / (2 * size)
        gap = float((self.product(state, v).double() - difference).norm())
        if gap > tolerance * float(difference.norm()) + 1e-12:
            raise SystemContractError(
                f"system {self.system.name!r}: the derivative of the step differs from its finite difference by "
                f"{gap:.2e} of {float(difference.norm()):.2e}; check whether the step detaches its input"
            )

    def products(self, state: Tensor) -> tuple[Callable[[Tensor], Tensor], str]:
        """Return v -> J v at a state, for many products, and the method used.

        Returns
        -------
        callable
            J^T u is linear in u, so its derivative with respect to u along v is J v. This is as exact as forward mode
            and several times faster, since one graph serves all products.
        str
            "reverse over reverse", or "forward mode" if no gradient passes through the step.

        Raises
        ------
        SystemContractError
            If the two methods differ by more than rounding.
        """
        torch = require("torch")
        with torch.enable_grad(), _plain_attention():
            x = state.detach().clone().requires_grad_(True)
            y = self(x)
            u = torch.zeros_like(y, requires_grad=True)
            pulled = torch.autograd.grad(y, x, u, create_graph=True)[0] if y.requires_grad else None
        if pulled is None or not pulled.requires_grad:
            return lambda v: self.product(state, v), "forward mode"

        def product(v: Tensor) -> Tensor:
            self.n_products += 1
            (out,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
            image: Tensor = out
            return image

        generator = torch.Generator().manual_seed(2)
        v = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state)
        gap = float((product(v) - self.product(state, v)).double().norm())
        if gap > 1e-3 * float(product(v).double().norm()) + 1e-12:
            raise SystemContractError(
                f"system {self.system.name!r}: two exact methods for J v differ by {gap:.2e}; check whether the step "
                "detaches part of its input"
            )
        return product, "reverse over reverse"

    def transposed(self, state: Tensor) -> Any:
        """Return u -> J^T u at a state, by reverse mode.

        Raises
        ------
        SystemContractError
            If the step blocks gradients: u.(J v) and (J^T u).v differ.
        """
        torch = require("torch")
        with torch.enable_grad(), _plain_attention():
            _, pull = torch.func.vjp(self, state)
            generator = torch.Generator().manual_seed(0)
            u, v = (
                torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state) for _ in range(2)
            )
            forward = float((u * self.product(state, v)).double().sum().detach())
            (pulled,) = pull(u)
            backward = float((pulled * v).double().sum().detach())
        if abs(forward - backward) > 1e-3 * max(abs(forward), abs(backward), 1e-6):
            raise SystemContractError(
                f"system {self.system.name!r}: the step blocks gradients (u.Jv = {forward:.3e}, J^Tu.v = "
                f"{backward:.3e}), so its spectral norm cannot be computed"
            )
        return lambda vector: pull(vector)[0].detach()


@functools.cache
def _load_forward_mode() -> None:
    """Differentiate once. On the first use torch compiles its rules and warns about its internals."""
    torch = require("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        one = torch.ones(1)
        torch.func.jvp(torch.sin, (one,), (one,))


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    torch = require("torch")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@contextlib.contextmanager
def last_step(
    system: LoopedSystem, embedding: Any, n_steps: int, weights: Weights | None, bypassed: bool
) -> Iterator[StepMap]:
    """The last step as a map of states, with other weights and with the bypass if asked for."""
    with contextlib.ExitStack() as stack:
        if weights is not None:
            system = stack.enter_context(Replaced(system, as_stored(system, weights, n_steps)))
        path = stack.enter_context(Bypass(system, n_steps)) if bypassed else None
        yield StepMap(system, embedding, n_steps - 1, n_steps, path)


def factors(step: StepMap, state: Tensor, n_directions: int = 8) -> Object:
    """Compare the Jacobian J of a step with the product of its factors at a state (Li, Eq. 2).

    Returns
    -------
    dict
        `gap` is ||J v - J_k ... J_1 W_s v|| / ||J v|| over Gaussian directions v. W_s are the adapter's columns for the
        state, which are the first. J_i is the Jacobian of core block i at its input, I + dF_i/dx. `gain` of a factor A
        is ||A||_F / ||I||_F, and `identity` its cosine <A, I> / (||A||_F ||I||_F), both by the same directions.
    """
    torch = require("torch")
    system, adapter = step.system, exposed_adapter(step.system, step.n_steps)
    owners = [p.owners[0] for p in system.shared_parameters(step.n_steps) if not p.exposed]
    names = dict.fromkeys(m[1] for owner in owners if (m := re.match(r"(.+?\.\d+)\.", owner)))
    maps: Object = {}

    def keep(name: str, block: Any, args: Any, kwargs: Any) -> None:
        def of_input(x: Tensor) -> Tensor:
            out = block(x, *args[1:], **kwargs)
            return out[0] if isinstance(out, tuple) else out

        maps[name] = lambda v: torch.func.jvp(of_input, (args[0],), (v,))[1]

    with contextlib.ExitStack() as stack, torch.no_grad():
        for name in names:
            hook = functools.partial(keep, name)
            block = system.model.get_submodule(name)
            stack.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        step(state)
    columns = parameter_of(system.model, adapter)[:, : state.shape[-1]]
    maps = {adapter.owners[0]: lambda v: v @ columns.T, **maps}
    generator = torch.Generator().manual_seed(0)
    shape, off, size = (n_directions, *state.shape), 0.0, 0.0
    directions = torch.randn(shape, generator=generator, dtype=torch.float64).to(state)
    images: dict[str, list[Tensor]] = {name: [] for name in maps}
    with torch.no_grad(), _plain_attention():
        for v in directions:
            whole, chained = step.product(state, v), v
            for name, times in maps.items():
                chained = times(chained)
                images[name].append(times(v))
            off += float((chained - whole).square().sum())
            size += float(whole.square().sum())
    norm = float(directions.norm())
    stacked = {name: torch.stack(each) for name, each in images.items()}
    return {
        "gap": (off / max(size, 1e-300)) ** 0.5,
        "gain": {name: float(a.norm()) / norm for name, a in stacked.items()},
        "identity": {n: float((a * directions).sum()) / (float(a.norm()) * norm) for n, a in stacked.items()},
    }


def final_state(
    system: LoopedSystem, batch: Batch, n_steps: int, bypass: Bypass | None = None
) -> tuple[Any, Any]:
    """Return the embedding and the state after all updates, with or without the identity path."""
    torch = require("torch")
    system = single_steps(system)
    owner: Any = bypass or system
    with torch.no_grad():
        embedding = system.embed(batch)
        state = system.initial_state(batch, embedding)
        for t in range(system.n_updates(n_steps)):
            state = owner.step(state, embedding, t, n_steps)
    return embedding, state
